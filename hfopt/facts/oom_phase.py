"""In which phase of a run memory ran out, by the frames of a traceback or, where there is none, by the log's last lines.

A frame's function says what it does by the words in its name, whoever wrote it: `validate_epoch`, `run_eval` and `evaluation_loop` all
evaluate. What surrounds a step (saving, evaluating, generating, loading) counts before the parts of a step, and of those the backward and
the optimizer count before the forward, which both run again. Frames are read in all forms that Python, IPython, pytest and rich print.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

from hfopt.facts.log_text import LogLine
from hfopt.facts.oom_messages import form_of
from hfopt.schema import OomPhase

_FRAMES = (
    re.compile(r'File "(?P<file>[^"]+)", line \d+, in (?P<function>[\w<>.]+)'),
    re.compile(r"File (?P<file>\S+?\.py):\d+, in (?P<function>[\w<>.]+)"),  # IPython
    re.compile(r"(?P<file>\S+\.py) in (?P<function>[\w<>.]+)\("),  # older IPython
    re.compile(r"(?P<file>\S+\.py):\d+:? in\s*(?P<function>[\w<>.]*)"),  # rich, pytest
    re.compile(r"(?P<file>[\w./\\-]+\.py):\d+ (?P<function>[\w<>.]+) ?(?:->|$)"),
    re.compile(r"^(?P<file>(?:Cell In|Input In|In) ?\[\d+\])(?:, line \d+, in (?P<function>[\w<>.]+))?"),
    re.compile(r"^(?P<file>[^\s\"]*)(?:\", | *)line \d+, in (?P<function>[\w<>.]+)$"),  # pasted from its middle on
)
_NATIVE_BACKWARD = re.compile(r"frame #\d+: .*(?:torch::autograd::Engine|_backward\w*\()")  # C++ frames behind a message
_CODE = re.compile(r"^  |^[❱╰╭]|^-+> ?\d|^`?(?:return |[\w., ]+ = )[\w.]+\(")
_COMPILER = re.compile(r"torch/_(?:inductor|dynamo)/\S*\|(?!\w*(?:forward|backward))")  # its functions' names say nothing of the phase
_TYPED = re.compile(r"^(?:In \[\d+\]:|>>>) (?P<code>\S.*)")  # at a prompt
_ENDED = re.compile(r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Interrupt)(?:: .*)?$")
_CHAINED = re.compile(r"During handling of the above|direct cause of the following")
_CALL = re.compile(r"[\w\])]\(|\) ?[@*+] ?\w")
_START = re.compile(r"Traceback \(most recent call last\)|^-{20,}$")
_CONTEXT = re.compile(r"^\s*[│|]?\s*\d+(?:\s|$)")  # a numbered line that IPython or rich prints around the one that ran
_FAR = 400  # lines before an error that may belong to its traceback
_NEAR = 40  # without a traceback's beginning
_REDRAWN = 3  # lines behind an error, in which a progress bar is drawn once more
_AFTER = 80  # lines behind an error, in which the traceback of another process may tell the phase

_ENGINE_STARTS = (
    r"(?:profile_run|_dummy_\w+|capture\w*|warm_?up\w*|compile_or_warm_up_model|init\w*|_init\w*|__init__|load_\w+|create_weights"
    r"|determine_\w+|\w*kv_cache\w*|raise_if_cache_size_invalid|wait_for_engine_startup|weight_loader|_get_model|get_model|get_weight)"
)
_LOADS = r"\w*(?<!data)(?<!off)(?<!un)(?<!up)(?<!down)(?<!work)(?<!pay)load(?!er|_dataset|_data\b|_image|_audio|_video|_example)\w*"

# Signs in a traceback, each `file|function` or a line of code: the first row with a sign decides.
_SIGNS: tuple[tuple[OomPhase, str], ...] = (
    (
        "saving",
        r"\|(?!\w*load_|_maybe_log_save_evaluate|\w*save_for_backward|\w*saved_tensors)\w*(?:save|saving|export_model|push_to_hub)\w*"
        r"|\|(?:get_state_dict|state_dict|\w*_state_dict_hook|_unload_and_optionally_merge|\w*merge_(?:and|lora|adapter|weight|model|peft)\w*|\w*model_?merger?"
        r"|merge|get_delta_weight)\b|_state_dict_utils\.py|torch\.save\(|\.(?:save_(?:pretrained|checkpoint|model|state)|push_to_hub|merge_and_unload)\w*\(|[^_]state_dict\(\)",
    ),
    ("vllm_start", rf"(?:vllm|sglang)\w*/\S*\|{_ENGINE_STARTS}\b|(?:vllm|sglang)\w*/[\s\S]*torch\.cuda\.graph\(|[( =]LLM\("),
    ("data", r"\|spawn_main\b"),  # a worker that could not start
    (
        "setup",
        r"deepspeed\.initialize\(|\|(?:_prepare_deepspeed|_configure_optimizer|_configure_zero_optimizer|_configure_distributed_model)\b",
    ),
    (
        "evaluation",
        r"\|(?!_maybe_log_save_evaluate)\w*evaluat\w*|\|(?:\w*_)?eval(?:_\w+)?\b|\|(?:\w*_)?validation(?:_\w+)?\b"
        r"|\|(?:\w*_)?(?:val|valid|validate|test|prediction)(?:_(?:step|loop|epoch|one_epoch|fn))?\b|\|(?!predict_noise)_?predict\w*|\|\w+_predictions?\b"
        r"|\|(?:nested_concat|nested_gather|pad_across_processes|gather_for_metrics|torch_pad_and_concatenate|compute_metrics|inference_on_dataset|\w*sanity_check"
        r"|\w*(?:compute|calc\w*)_\w*(?:metric|fid|score|accuracy|auc)\w*)\b"
        r"|/(?:validator|evaluator)s?\.py\||trainer\.(?:evaluate|predict|validate|test)\(|Validating",
    ),
    (
        "generation",
        r"\|(?!_generate_(?:examples|tables)|\w*generator)\w*(?:generat(?:e|ion)|rollout|beam_search|greedy_search|contrastive_search)\w*"
        r"|\|(?:sample|_sample|_?prefill|setup_caches?|wake_up|_move_model_to_vllm|sync_weights|update_weights|transcribe|chat|(?:run_|do_|_)?infer(?:ence)?|inference_\w+|log_images?|\w+2img|process_images\w*)\b|text_generation_server/|\.generate\(|\.chat\("
        r"|unwrap_model_for_generation\(|(?:diffusers|transformers)/pipelines/\S*\||pipeline_\w+\.py\||(?:diffusion|comfy)\S*\|(?:sample\w*|predict_noise)\b|(?:vllm|sglang)\w*/\S*\|(?:execute_model|step|run_busy_loop|event_loop\w*)\b",
    ),
    (
        "backward",
        r"\|(?!\w*forward_backward)\w*(?:backward|bwd)\w*|\|(?:unpack_hook|recompute_fn|_checkpoint_without_reentrant_generator)\b"
        r"|\.backward\(|run_backward\(|autograd\.grad\(|autograd/(?:__init__|graph)\.py",
    ),
    (
        "optimizer",
        r"(?:torch|bitsandbytes)/optim/\S*\|(?!load_state_dict)|zero/stage\w*\.py\|step|galore|apollo_torch|(?:optim|adam|adafactor|muon|lion)\w*(?:/\w+)*\.py\|"
        r"(?:step|wrapper|_step|update\w*|init\w*|_init\w*)\b"
        r"|\|(?:\w*optim(?:izer)?_step\w*|_multi_tensor_\w+|_single_tensor_\w+|_fused_adamw?|_init_group|init_state|update_step|_maybe_opt_step"
        r"|_take_model_step|_prepare_sub_group|\w*clip_grad\w*|\w*initialize_optimizer_states|_?unscale\w*|zeropower_via_\w+|step_with_(?:closure|ready_grads))\b"
        r"|optim(?:izer)?\.step\(|scaler\.step\(|_maybe_opt_step\(|clip_grad_norm|_foreach_(?:sqrt|add|norm|div|mul|addcdiv|addcmul)|exp_avg",
    ),
    (
        "loading",
        rf"\|{_LOADS}|\|(?:from_pretrained|from_config|set_module_tensor_to_device|dispatch_model|create_quantized_param|_?quantize\w*"
        r"|_move_model_to_device|_materialize_copy|_job|setup_model_and_tokenizer|caching_allocator_warmup|resize_token_embeddings|create_weights"
        r"|reset_parameters|_?init_weights|restore\w*|\w*(?:build|create|init|initialize|get|make)_model\w*|create_reference_model|deepcopy|__deepcopy__|setup_model_and_optimizer)\b"
        r"|\.from_pretrained\(|set_module_tensor_to_device\(|load_state_dict\(|torch\.load\(|load_file\("
        r"|(?:model|net|network|self|pipe|unet|vae|encoder|transformer)\.(?:to|cuda)\(|= \w+\(.*\)\.(?:to|cuda)\("
        r"|nn/modules/\w+\.py\|__init__|nn/modules/module\.py\|(?:convert|_apply|to|cuda|half|float|bfloat16)\b|\|(?:cuda|_apply|convert|to)\n.*\Z",
    ),
    (
        "setup",
        r"\|(?:prepare|prepare_model|_prepare_one|fully_shard|initialize|_sync_module_states|_verify_param_shape\w*|_ddp_init_helper"
        r"|_recursive_wrap|get_peft_model|prepare_model_for_kbit_training|_broadcast_coalesced|_init_param_handle\w*|setup|inject_adapter|create_optimizer|init_process_group)\b|torch/cuda/__init__\.py\|_lazy_init|param_and_grad_buffer\.py\||accelerator\.prepare\("
        r"|DistributedDataParallel\(|fsdp/_init_utils|wrapper_cls\(|fully_sharded_data_parallel\.py\|__init__",
    ),
    (
        "loss",
        r"\|(?!\w*compute_loss|\w*loss_(?:func|step)\b)\w*(?:loss|cross_entropy|log_softmax|logsumexp|logps|log_probs?|entropy)\w*|/loss\w*\.py\|"
        r"|logits\.float\(\)|logits = logits|output\.float\(\), labels|logits\.clone\(\)|logits\.to\("
        r"|cross_entropy\w*\(|log_softmax\(|loss_fct\(|criterion\(|self\.lm_head\(|lm_head\(hidden",
    ),
    (
        "data",
        r"popen_fork\.py|\|\w*(?:collat|tokeniz|preprocess)\w*|\|(?:\w*cache_\w*latents|_next_data|fetch|_worker_loop|__getitem__|torch_call|pin_memory"
        r"|\w*load_dataset\w*|\w*load_data|\w*(?:build|prepare|get|create|make|read)_(?:train_)?(?:data|dataset|dataloader|csv|examples)\w*|get_batch_samples|_generate_(?:examples|tables))\b|dataloader\.py\||dataset\w*\.py\|"
        r"|/datasets/(?:arrow|builder|load|table|iterable|packaged|io|utils)|/pandas/|/pyarrow/",
    ),
    ("communication", r"distributed_c10d\.py\||\|(?:all_reduce|all_gather\w*|barrier|broadcast|reduce_scatter\w*)\b"),
    (
        "forward",
        r"scaled_dot_product_attention\(|\|(?:\w*(?:forward|fwd)\w*|\w*attention\w*|training_step|compute_loss|_call_impl|_wrapped_call_impl|_?inner_training_loop"
        r"|train|apply_model|update_(?:actor|policy|critic))\b|forward=True|trainer\.(?:train|fit)\(|nn/(?:modules|functional|parallel)|/modeling_\w+\.py\|"
        r"|/\w*(?:attention|attn|unet|vae|encoder|decoder|transformer|resnet|backbone|layers?|blocks?|embed\w*|model)\w*\.py\||/models?/\S*\|"
        r"|(?:softmax|matmul|bmm|einsum|conv[123]d|layer_norm|dropout|gelu|silu|relu|grid_sample|interpolate)\(| @ \w",
    ),
)
_KNOWN = tuple((phase, re.compile(signs, re.IGNORECASE)) for phase, signs in _SIGNS)
_IN_FORWARD = re.compile(
    r"\|\w*forward\w*|_call_impl|attention|nn/(?:modules|functional)|/modeling_|training_step|compute_loss", re.IGNORECASE
)
_IN_STEP: frozenset[OomPhase] = frozenset({"loading", "setup"})  # overruled where the Trainer is already in a step
_CLOSURE = re.compile(r"\|(?:\w*closure\w*|training_step)\b")  # Lightning calls the step from inside the optimizer
_STARTS_ENGINE = re.compile(r"Engine core initialization failed|EngineCore failed to start|engine process failed to start", re.IGNORECASE)
_SCRIPTS: tuple[tuple[OomPhase, re.Pattern[str]], ...] = (  # of a forward outside of training, by the name of the script that runs it
    ("evaluation", re.compile(r"(?:^|/)(?:test|eval|evaluate|validate|val|predict)\.py\|", re.MULTILINE)),
    (
        "generation",
        re.compile(r"(?:^|/)(?:demo|infer|inference|generate|sample|chat|app|webui|gradio_\w+|\w+_demo|\w+2img)\.py\|", re.MULTILINE),
    ),
)
_TRAINS = re.compile(r"\|\w*(?:train|fit)\w*|trainer", re.IGNORECASE)
_ENGINE = re.compile(r"(?:vllm|sglang)\w*/\S*\|", re.IGNORECASE)
_ENGINE_WARMS_UP = re.compile(r"Capturing (?:cudagraph|CUDA graph)|profile run|Memory profiling|warm(?:ing)? up", re.IGNORECASE)
_BAR = re.compile(r"(\d+)/(\d+) \[\d+:\d\d")

# Lines of a log without a traceback; the last one before the error decides.
_LINES: tuple[tuple[OomPhase, re.Pattern[str]], ...] = (
    (
        "data",
        re.compile(
            r"^(?:Map|Filter|Tokenizing|Running tokenizer|Generating \w+ split|Packing|Applying chat template|Converting)\b.*\d+%"
            r"|Running tokenizer|Preprocessing|Tokenizing|Generating train split|Grouping texts|Caching latents|Loading (?:the )?data"
            r"|(?:building|creating|reading|downloading) (?:the )?(?:train\w* |val\w* )?data",
            re.IGNORECASE,
        ),
    ),
    (
        "loading",
        re.compile(
            r"\bload(?:ing)?\b[^/]{0,30}\b(?:checkpoint|weights|safetensors|model|vae|u-?net|pipeline)\b|Fetching \d+ files"
            r"|Restoring (?:from )?(?:the )?checkpoint|Materializing param|Initiali[sz]ing (?:the )?model(?! parallel)|Quantizing",
            re.IGNORECASE,
        ),
    ),
    (
        "evaluation",
        re.compile(
            r"\*+ Running (?:Evaluation|Prediction)|Evaluating|Validating|\d+/\d+, [\d.]+ task/s|eval(?:uation)? ?:? +\d+%"
            r"|(?:Validation|Testing|Predicting) (?:DataLoader|sanity)|Sanity Checking",
            re.IGNORECASE,
        ),
    ),
    (
        "saving",
        re.compile(
            r"Saving (?:model )?(?:checkpoint|the model|LoRA|model)|Configuration saved in|Model weights saved|\bMerging\b|Exporting",
            re.IGNORECASE,
        ),
    ),
    ("generation", re.compile(r"Processed prompts:|Generating completions|\bprefill\b|generation error", re.IGNORECASE)),
    (
        "forward",
        re.compile(
            r"\*+ Running training|\bloss\b.{0,24}?\d|\d+/\d+ \[\d+:\d\d|(?<!saved )\bstep \d+|\[\d+/\d+ \d+:\d\d"
            r"|\biter(?:ation)?:? \d+|\bepoch\b.{0,8}\[\d+/\d+\]|\bepoch:? ?\[?\d+|Training Started|Start(?:ing)? training",
            re.IGNORECASE,
        ),
    ),
)
STEP = re.compile(r"(\d+)/\d+ \[[\d:]+<")


def phase_before(lines: Sequence[LogLine], index: int) -> tuple[OomPhase, str | None]:
    """The phase of the error at `lines[index]`, and the line that tells it."""
    rank = lines[index].rank
    own = [line for line in lines[max(0, index - 6 * _FAR) : index + 1] if line.rank in (rank, None) or rank is None][-_FAR:]
    after = [line for line in lines[index + 1 : index + _AFTER] if line.rank in (rank, None) or rank is None]
    found = _by_frames(_traceback(own)) or _by_frames(_traceback([*after, lines[index]]))  # streams mix: frames may follow the message
    if found is None or found[0] == "forward":
        native = next((line.text for line in reversed([*own, *after]) if _NATIVE_BACKWARD.search(line.text)), None)
        if native is not None:  # `train()` alone says less than the autograd engine
            return "backward", native
    started = next((line.text for line in after if _STARTS_ENGINE.search(line.text)), None)
    if started is not None and (found is None or found[0] in ("forward", "loading")):
        return "vllm_start", started
    if found is None:
        return _by_lines(own, [line for line in after[:_REDRAWN] if STEP.search(line.text)])
    return _whose_forward(own, found[1]) if found[0] == "forward" else found


def _whose_forward(own: Sequence[LogLine], evidence: str | None) -> tuple[OomPhase, str | None]:
    """A forward is a part of training, of an evaluation, or of an inference engine: by its frames and by what the log said last."""
    text = "\n".join(_traceback(own))
    if _ENGINE.search(text):
        warms_up = next((line.text for line in reversed(own[:-1]) if _ENGINE_WARMS_UP.search(line.text)), None)
        return ("generation", evidence) if warms_up is None else ("vllm_start", warms_up)
    if not _TRAINS.search(text):
        return next((phase for phase, script in _SCRIPTS if script.search(text)), "forward"), evidence
    if not _IN_FORWARD.search(text):  # `train()` alone
        start = next((at for at in range(len(own) - 1, -1, -1) if _START.search(own[at].text)), len(own) - 1)
        around = _by_lines([*own[: start + 1], own[-1]], ())
        return ("forward", evidence) if around[0] in ("unknown", "loading", "data") else around
    return "forward", evidence


def _traceback(lines: Sequence[LogLine]) -> list[str]:
    """`file|function` of each frame and the code below it, from the last traceback's beginning; cut ones begin where they begin."""
    start = next((at for at in range(len(lines) - 1, -1, -1) if _START.search(lines[at].text) and _has_frame(lines[at:])), None)
    if start is not None:
        return [] if _anothers(lines[start:-1]) else _signs(lines[start:])
    nearby = lines[-_NEAR:]
    return _signs(nearby) if _has_frame(nearby) else _broken(nearby) or _code_above(nearby)


def _anothers(lines: Sequence[LogLine]) -> bool:
    """A traceback that ended in another error before the message, which was not raised from it."""
    end = next((at for at in range(len(lines) - 1, 0, -1) if _ENDED.search(lines[at].text) and form_of(lines[at].text) is None), None)
    return end is not None and not any(_frame(line.text) or _CHAINED.search(line.text) for line in lines[end + 1 :])


def _broken(lines: Sequence[LogLine]) -> list[str]:
    """Frames whose lines a terminal broke in the middle of words."""
    joined = "".join(line.text for line in lines[:-1])
    frames = [f"{match['file']}|{match['function']}" for match in _FRAMES[0].finditer(joined)]
    return [*frames, joined] if frames else []


def _code_above(lines: Sequence[LogLine]) -> list[str]:
    """The indented lines right above the message: the code of a frame whose own line was not pasted."""
    above = list(takewhile(lambda line: _CODE.search(line.text) or not line.text.strip(), reversed(lines[:-1])))
    beside = [line.text for line in lines[-2:-1] if not above and " = " in line.text] + [_begun(lines[-1].text)]
    return [*_signs([*reversed(above), lines[-1]]), *(text for text in beside if _CALL.search(text))]


def _begun(text: str) -> str:
    """What stands before the message on its own line."""
    form = form_of(text)
    said = None if form is None else form.sign.search(text)
    return text[: 0 if said is None else said.start()]


def _has_frame(lines: Sequence[LogLine]) -> bool:
    return any(_frame(line.text) is not None for line in lines)


def _frame(text: str) -> str | None:
    if not any(sign in text for sign in (".py", "line ", "In [", "In[")):  # a long line without any costs as much as its square
        return None
    for form in _FRAMES:
        match = form.search(text)
        if match is not None:
            return f"{match['file']}|{(match['function'] or '').rsplit('.', 1)[-1]}".replace("\\\\", "/").replace("\\", "/")
    return None


def _signs(lines: Sequence[LogLine]) -> list[str]:
    """Frames, and of the code shown with them only what ran."""
    signs: list[str] = []
    for line in lines[:-1]:  # the last one is the message itself
        frame = _frame(line.text)
        if signs and signs[-1].endswith(".py|") and re.fullmatch(r"\s*[\w<>.]+\s*", line.text):
            signs[-1] += line.text.strip()  # rich breaks the line before a long function's name
            continue
        if frame is None and _CONTEXT.search(line.text):
            continue
        code = re.sub(r"^[\s❱>-]*(?:-+> ?)?\d* ?[│|]?\s*", "", line.text)
        typed = _TYPED.match(line.text)
        if typed is not None:
            signs.append(typed["code"])
        elif frame is not None:
            signs.append(frame if _COMPILER.search(frame) is None else frame.split("|")[0] + "|")
        elif code.strip() and not set(code.strip()) <= set("^~ ") and (signs or "(" in code):
            signs.append(code.strip())
    return signs


def _by_frames(signs: list[str]) -> tuple[OomPhase, str | None] | None:
    if not signs:
        return None
    text = "\n".join(signs)
    in_step = re.search(r"\|(?:training_step|compute_loss|_inner_training_loop|inner_training_loop)\b", text) is not None
    closure = max((match.end() for match in _CLOSURE.finditer(text)), default=0)
    for phase, known in _KNOWN:
        match = known.search(text, closure if phase == "optimizer" else 0)
        if match is None or (phase in _IN_STEP and in_step and not _late_loading(text)):
            continue
        if phase == "loss" and _goes_deeper(text, max(found.end() for found in known.finditer(text))):
            continue
        return phase, _evidence(signs, known)
    return None


def _late_loading(text: str) -> bool:
    """Within train(), weights are only loaded before the first step or after the last."""
    return re.search(
        r"[|.](?:_load_best_model|_load_from_checkpoint|_load_optimizer_and_scheduler|prepare|prepare_model|_move_model_to_device)\b", text
    ) is not None and not re.search(r"\|(?:training_step|compute_loss)\b", text)


def _goes_deeper(text: str, end: int) -> bool:
    """Frames of a model's own layers after the last that names the loss: the forward of a model inside a loss function."""
    return (
        re.search(r"(?:modeling_\w+|attention|transformer|mlp)\w*\.py\||(?:self_attn|attention|decoder_layer|layers?)\(", text[end:])
        is not None
    )


def _evidence(signs: list[str], known: re.Pattern[str]) -> str:
    """The innermost frame or line that says so."""
    found = next((sign for sign in reversed(signs) if known.search(sign)), signs[-1])
    return found.replace("|", ", in ", 1)


def _by_lines(own: Sequence[LogLine], after: Sequence[LogLine]) -> tuple[OomPhase, str | None]:
    """By the last line before the message that shows it, what stands before the message on its own line first."""
    for text in (_begun(own[-1].text), *(line.text for line in reversed(own[:-1])), *(line.text for line in after)):
        for phase, sign in _LINES:
            if sign.search(text):
                return ("unknown", None) if phase in ("forward", "generation") and _is_over(text) else (phase, text)
    return "unknown", None


def _is_over(text: str) -> bool:
    """A bar at its end: whatever it counted was done."""
    bars = _BAR.findall(text)
    return bool(bars) and bars[-1][0] == bars[-1][1] and "loss" not in text
