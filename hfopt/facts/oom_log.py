"""A log with an out-of-memory error in it, read: which message counts, what it states, and in which phase of training it happened.

The frames of a traceback name what was going on; the innermost ones decide between a step's parts, the outer ones between training,
evaluating and saving. Where there is no traceback the log's own lines do (`Loading checkpoint shards`, `***** Running Evaluation *****`).
Names are those of transformers, TRL, accelerate, peft, DeepSpeed, bitsandbytes, vLLM and torch, in all forms that Python, IPython and rich
print a frame in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, takewhile

from hfopt.facts.log_text import LogLine, shown
from hfopt.facts.oom_messages import Form, cause_of, device_of, figures_of, form_of, killed_bytes, other_fault, processes_of, vllm_of
from hfopt.schema import OomPhase, OomReport

_FRAMES = (
    re.compile(r'File "(?P<file>[^"]+)", line \d+, in (?P<function>[\w<>.]+)'),
    re.compile(r"File (?P<file>\S+?\.py):\d+, in (?P<function>[\w<>.]+)"),  # IPython
    re.compile(r"(?P<file>\S+\.py) in (?P<function>[\w<>.]+)\("),  # older IPython
    re.compile(r"(?P<file>\S+\.py):\d+:? in\s*(?P<function>[\w<>.]*)"),  # rich, pytest
    re.compile(r"(?P<file>[\w./\\-]+\.py):\d+ (?P<function>[\w<>.]+) ?(?:->|$)"),
    re.compile(r"^(?P<file>(?:Cell In|Input In|In) ?\[\d+\])(?P<function>)"),
    re.compile(r"^(?P<file>[^\s\"]*)(?:\", | *)line \d+, in (?P<function>[\w<>.]+)$"),  # pasted from its middle on
)
_NATIVE_BACKWARD = re.compile(r"frame #\d+: .*(?:torch::autograd::Engine|_backward\w*\()")  # C++ frames behind a message
_CODE = re.compile(r"^  |^`?(?:return |[\w., ]+ = )[\w.]+\(")
_START = re.compile(r"Traceback \(most recent call last\)|^-{20,}$")
_FAR = 400  # lines before an error that may belong to its traceback
_NEAR = 40  # without a traceback's beginning
_REDRAWN = 3  # lines behind an error, in which a progress bar is drawn once more
_AFTER = 80  # lines behind an error, in which the traceback of another process may tell the phase

# Signs in a traceback, each `file|function|code`: the first row with a sign decides.
_SIGNS: tuple[tuple[OomPhase, str], ...] = (
    (
        "saving",
        r"\|(?:_save_checkpoint|save_checkpoint|save_model|save_pretrained|_save_optimizer_and_scheduler|save_fsdp_model|save_fsdp_optimizer"
        r"|get_state_dict|safe_save_model_for_hf_trainer|save_model_and_optimizer_sharded|fsdp_save_\w+|merge_and_unload"
        r"|_full_(?:pre|post)_state_dict_hook|_save)\b|_state_dict_utils\.py|torch\.save\(|\.save_pretrained\(|\.save_checkpoint\(",
    ),
    (
        "vllm_start",
        r"vllm/.*\|(?:initialize_cache|_initialize_kv_caches|profile_run|determine_(?:num_)?available_\w+|init_device|load_model|capture_model"
        r"|_dummy_run|_dummy_sampler_run|compile_or_warm_up_model|initialize_from_config|initialize_kv_cache\w*|check_enough_kv_cache_memory"
        r"|raise_if_cache_size_invalid|get_kv_cache_configs?|init_worker\w*|__init__)\b",
    ),
    ("data", r"\|spawn_main\b"),  # a worker that could not start
    (
        "setup",
        r"deepspeed\.initialize\(|\|(?:_prepare_deepspeed|_configure_optimizer|_configure_zero_optimizer|_configure_distributed_model)\b",
    ),
    (
        "evaluation",
        r"\|(?:evaluate|evaluation_loop|prediction_loop|prediction_step|predict|nested_concat|nested_gather|pad_across_processes"
        r"|torch_pad_and_concatenate|compute_metrics|_?(?:run_)?evaluate|_evaluation_step|validation_step|test_step|_?validate|eval_loop)\b|trainer\.(?:evaluate|predict)\(|Validating",
    ),
    (
        "generation",
        r"\|(?:generate(?:_with\w*|_sequences|_completions|_text)?|_generate\w*|setup_caches?|_sample|_beam_search|sample|_prefill|unwrap_model_for_generation|wake_up|_move_model_to_vllm"
        r"|sync_weights|generate_and_score_completions)\b|\.generate\(|unwrap_model_for_generation\(|vllm/.*\|(?:execute_model|step)\b",
    ),
    (
        "backward",
        r"\|(?:backward|run_backward|_engine_run_backward|unpack_hook|recompute_fn|_checkpoint_without_reentrant_generator)\b"
        r"|\.backward\(|run_backward\(|autograd/(?:__init__|graph)\.py|autograd\\(?:__init__|graph)\.py|_engine_run_backward",
    ),
    (
        "optimizer",
        r"torch[/\\]optim[/\\]|bitsandbytes[/\\]optim|\|(?:_multi_tensor_adamw?|_single_tensor_adamw?|_fused_adamw?|_init_group|init_state|update_step"
        r"|_maybe_opt_step|_take_model_step|_prepare_sub_group|clip_grad_norm_?|optimizer_step|_initialize_optimizer_states|initialize_optimizer_states|_optimizer_step"
        r"|unscale_|step_with_closure)\b|optimizer\.step\(|scaler\.step\(|_maybe_opt_step\(|optim\.step\(|clip_grad_norm|_foreach_(?:sqrt|add|norm|div|mul|addcdiv|addcmul)"
        r"|exp_avg|galore|apollo_torch|zero[/\\\\]stage\w*\.py\|step",
    ),
    (
        "loading",
        r"\|(?:from_pretrained|_load_pretrained_model|_load_state_dict_into\w*|set_module_tensor_to_device|load_checkpoint\w*|load_sharded_checkpoint"
        r"|load_state_dict|_load_best_model|_load_from_checkpoint|_load_optimizer_and_scheduler|dispatch_model|create_quantized_param|_quantize|load_model|_move_model_to_device"
        r"|load_pretrained|_materialize_copy|_job|load_tokenizer_and_model|load_model_and_tokenizer|setup_model_and_tokenizer|caching_allocator_warmup|resize_token_embeddings)\b"
        r"|\.from_pretrained\(|set_module_tensor_to_device\(|load_state_dict\(|torch\.load\(|model\.to\(|\.cuda\(\)|model\.cuda|\|(?:cuda|_apply|convert|to)\n.*\Z",
    ),
    (
        "setup",
        r"\|(?:prepare|prepare_model|_prepare_one|_prepare_deepspeed|fully_shard|initialize|_sync_module_states|_verify_param_shape\w*|_ddp_init_helper"
        r"|_recursive_wrap|get_peft_model|prepare_model_for_kbit_training|_broadcast_coalesced|_init_param_handle\w*|setup)\b|accelerator\.prepare\("
        r"|DistributedDataParallel\(|fsdp/_init_utils|wrapper_cls\(|deepspeed\.initialize\(|fully_sharded_data_parallel\.py\|__init__",
    ),
    (
        "loss",
        r"\|(?:cross_entropy|ForCausalLMLoss|fixed_cross_entropy|loss_function|log_softmax|selective_log_softmax|entropy_from_logits|_get_per_token_logps\w*"
        r"|compute_log_probs|get_batch_logps|_compute_loss_liger|chunked_\w*loss|dpo_loss|nll_loss|vocab_parallel_cross_entropy)\b"
        r"|logits\.float\(\)|logits = logits|output\.float\(\), labels|logits\.clone\(\)"
        r"|cross_entropy\w*\(|log_softmax\(|loss_fct\(|self\.lm_head\(|lm_head\(hidden",
    ),
    (
        "data",
        r"popen_fork\.py|\|(?:\w*cache_\w*latents|_next_data|fetch|_worker_loop|__getitem__|collate_fn|torch_call|pin_memory)\b|dataloader\.py\||[/\\]datasets[/\\](?:arrow|builder|load|table|iterable|packaged)",
    ),
    ("communication", r"distributed_c10d\.py\||\|(?:all_reduce|all_gather\w*|barrier|broadcast|reduce_scatter\w*)\b"),
    (
        "forward",
        r"scaled_dot_product_attention\(|\|(?:\w*forward|training_step|compute_loss|_call_impl|_wrapped_call_impl|inner_training_loop|_inner_training_loop|train)\b|trainer\.train\(|nn[/\\\\](?:modules|functional)",
    ),
)
_KNOWN = tuple((phase, re.compile(signs, re.IGNORECASE)) for phase, signs in _SIGNS)
_IN_STEP: frozenset[OomPhase] = frozenset({"loading", "setup"})  # overruled where the Trainer is already in a step

# Lines of a log without a traceback; the last one before the error decides.
_LINES: tuple[tuple[OomPhase, re.Pattern[str]], ...] = (
    (
        "loading",
        re.compile(
            r"\bload(?:ing)?\b[^/]{0,30}\b(?:checkpoint|weights|safetensors|model|vae|u-?net)\b|Fetching \d+ files|Materializing param",
            re.IGNORECASE,
        ),
    ),
    ("evaluation", re.compile(r"\*+ Running (?:Evaluation|Prediction)|Evaluating|Validating|eval(?:uation)? ?:? +\d+%", re.IGNORECASE)),
    (
        "saving",
        re.compile(
            r"Saving (?:model )?(?:checkpoint|the model|LoRA)|Configuration saved in|Model weights saved|Saving model", re.IGNORECASE
        ),
    ),
    (
        "data",
        re.compile(
            r"^(?:Map|Filter|Tokenizing|Running tokenizer|Generating \w+ split|Packing|Applying chat template|Converting)\b.*\d+%"
            r"|Running tokenizer|Preprocessing|Tokenizing|Generating train split|Grouping texts",
            re.IGNORECASE,
        ),
    ),
    ("generation", re.compile(r"Processed prompts:|Generating completions|\bprefill\b", re.IGNORECASE)),
    (
        "forward",
        re.compile(
            r"\*+ Running training|\bloss\b.{0,24}?\d|\d+/\d+ \[\d+:\d\d|\bstep \d+|\[\d+/\d+ \d+:\d\d|\bepoch\b.{0,8}\[\d+/\d+\]",
            re.IGNORECASE,
        ),
    ),
)


def phase_before(lines: Sequence[LogLine], index: int) -> tuple[OomPhase, str | None]:
    """The phase of the error at `lines[index]`, and the line that tells it."""
    rank = lines[index].rank
    own = [line for line in lines[max(0, index - 6 * _FAR) : index + 1] if line.rank in (rank, None) or rank is None][-_FAR:]
    after = [line for line in lines[index + 1 : index + _AFTER] if line.rank in (rank, None) or rank is None]
    for part in (own, [*after, lines[index]]):  # streams of several processes mix: a traceback may come behind its message
        found = _by_frames(_traceback(part))
        if found is not None:
            break
    native = next((line.text for line in reversed([*own, *after]) if _NATIVE_BACKWARD.search(line.text)), None)
    if native is not None and (found is None or found[0] == "forward"):  # `train()` alone says less than the autograd engine
        return "backward", native
    return found or _by_lines(own, [line for line in after[:_REDRAWN] if _STEP.search(line.text)])


def _traceback(lines: Sequence[LogLine]) -> list[str]:
    """`file|function` of each frame and the code below it, from the last traceback's beginning; cut ones begin where they begin."""
    start = next((at for at in range(len(lines) - 1, -1, -1) if _START.search(lines[at].text) and _has_frame(lines[at:])), None)
    if start is not None:
        return _signs(lines[start:])
    nearby = lines[-_NEAR:]
    return _signs(nearby) if _has_frame(nearby) else _broken(nearby) or _code_above(nearby)


def _broken(lines: Sequence[LogLine]) -> list[str]:
    """Frames whose lines a terminal broke in the middle of words."""
    joined = "".join(line.text for line in lines[:-1])
    frames = [f"{match['file']}|{match['function']}" for match in _FRAMES[0].finditer(joined)]
    return [*frames, joined] if frames else []


def _code_above(lines: Sequence[LogLine]) -> list[str]:
    """The indented lines right above the message: the code of a frame whose own line was not pasted."""
    above = list(takewhile(lambda line: _CODE.search(line.text) or not line.text.strip(), reversed(lines[:-1])))
    return _signs([*reversed(above), lines[-1]])


def _has_frame(lines: Sequence[LogLine]) -> bool:
    return any(_frame(line.text) is not None for line in lines)


def _frame(text: str) -> str | None:
    if not any(sign in text for sign in (".py", "line ", "In [", "In[")):  # a long line without any costs as much as its square
        return None
    for form in _FRAMES:
        match = form.search(text)
        if match is not None:
            return f"{match['file']}|{match['function'].rsplit('.', 1)[-1]}"
    return None


def _signs(lines: Sequence[LogLine]) -> list[str]:
    signs: list[str] = []
    for line in lines[:-1]:  # the last one is the message itself
        frame = _frame(line.text)
        if signs and signs[-1].endswith(".py|") and re.fullmatch(r"\s*[\w<>.]+\s*", line.text):
            signs[-1] += line.text.strip()  # rich breaks the line before a long function's name
            continue
        code = re.sub(r"^[\s❱>-]*(?:-+> ?)?\d* ?[│|]?\s*", "", line.text)
        if frame is not None:
            signs.append(frame)
        elif code.strip() and not set(code.strip()) <= set("^~ ") and (signs or "(" in code):
            signs.append(code.strip())
    return signs


def _by_frames(signs: list[str]) -> tuple[OomPhase, str | None] | None:
    if not signs:
        return None
    text = "\n".join(signs)
    in_step = re.search(r"\|(?:training_step|compute_loss|_inner_training_loop|inner_training_loop)\b", text) is not None
    for phase, known in _KNOWN:
        match = known.search(text)
        if match is None or (phase in _IN_STEP and in_step and not _late_loading(text)):
            continue
        if phase == "loss" and _goes_deeper(text, match.end()):
            continue
        return phase, _evidence(signs, known)
    return None


def _late_loading(text: str) -> bool:
    """Within train(), weights are only loaded before the first step or after the last."""
    return re.search(
        r"[|.](?:_load_best_model|_load_from_checkpoint|_load_optimizer_and_scheduler|prepare|prepare_model|_move_model_to_device)\b", text
    ) is not None and not re.search(r"\|(?:training_step|compute_loss)\b", text)


def _goes_deeper(text: str, end: int) -> bool:
    """A line that names the loss, with frames of the model's own layers after it: the forward of a model inside a loss function."""
    return re.search(r"\|(?:forward)\b[\s\S]*(?:self_attn|mlp|attention|decoder_layer|layers?\()", text[end:]) is not None


def _evidence(signs: list[str], known: re.Pattern[str]) -> str:
    """The innermost frame or line that says so."""
    found = next((sign for sign in reversed(signs) if known.search(sign)), signs[-1])
    return found.replace("|", ", in ", 1)


def _by_lines(own: Sequence[LogLine], after: Sequence[LogLine]) -> tuple[OomPhase, str | None]:
    """By the last line before the message that shows it, what stands before the message on its own line first."""
    form = form_of(own[-1].text)
    said = None if form is None else form.sign.search(own[-1].text)
    begun = own[-1].text[: 0 if said is None else said.start()]
    for text in (begun, *(line.text for line in reversed(own[:-1])), *(line.text for line in after)):
        for phase, sign in _LINES:
            if sign.search(text):
                return phase, text
    return "unknown", None


_APART = 500  # lines between two messages, from which on they are of two runs
_AFTER_MESSAGE = 8  # lines a message may be broken into
_AROUND = 300  # lines in which vLLM states its figures
_BATCH = re.compile(r"(?:Instantaneous batch size per device|per_device_train_batch_size|micro_batch_size)\W{1,4}(\d+)")
_ACCUMULATION = re.compile(r"(?:Gradient Accumulation steps|gradient_accumulation_steps)\W{1,4}(\d+)")
_STEP = re.compile(r"(\d+)/\d+ \[[\d:]+<")
_ENDS_MESSAGE = re.compile(r'^\s*$|Traceback \(most|^\s*File "|^\s*(?:srun|wandb|ERROR:|WARNING:|E\d{4})')
_PINNED, _PINNING = re.compile(r"\.pin_memory\(|cudaHostAlloc|cudaHostRegister"), 4  # in the frame right above a message
_VLLM_PHASES: frozenset[str] = frozenset({"kv_cache", "vllm_share"})


def read_oom(lines: Sequence[LogLine]) -> OomReport | None:
    """The shortage that ended the last run in the log; None: there is none, or another fault came first."""
    hits = _hits(lines)
    if not hits:
        return None
    index, form = min(hits, key=lambda hit: (hit[1].rank, hit[0]))
    if form.rank >= 3 and form.cause is None and any(other_fault(line.text) for line in lines[max(0, index - _APART) : index + 1]):
        return None
    if form.source == "CUDA" and any(_PINNED.search(line.text) for line in lines[max(0, index - _PINNING) : index]):
        form = replace(form, cause="host")  # page-locked memory is the host's, whatever the runtime calls it
    message = _message(lines, index)
    figures = figures_of(message)
    if form.cause == "host_killed" and (held := killed_bytes(message)) is not None:
        figures = replace(figures, process_bytes=held)
    phase, evidence = _phase(lines, index, form, message)
    before = lines[: index + 1]
    return OomReport(
        source=form.source,
        cause=cause_of(form, figures, listed=bool(processes_of(message))),
        phase=phase,
        figures=figures,
        line=lines[index].number,
        text=shown(message.replace("\n", " "), 600),
        certain=form.certain,
        evidence=None if evidence is None else shown(evidence, 160),
        device=device_of(message),
        ranks=tuple(sorted({rank for at, one in hits if one.source == form.source and (rank := lines[at].rank) is not None})),
        batch=_stated(before, _BATCH),
        accumulation=_stated(before, _ACCUMULATION),
        step=_last_step(before),
        processes=processes_of(message),
        vllm=vllm_of("\n".join(line.text for line in lines[max(0, index - _AROUND) : index + _AFTER_MESSAGE]))
        if form.source == "vLLM"
        else {},
    )


def fault_beside_memory(lines: Sequence[LogLine]) -> str | None:
    """The fault that the log does show, where it is not memory."""
    found = next((line.text for line in lines if other_fault(line.text)), None)
    return None if found is None else shown(found, 200)


def _hits(lines: Sequence[LogLine]) -> list[tuple[int, Form]]:
    """Of the last run, in order: from the log's end back to where none was found for `_APART` lines."""
    hits: list[tuple[int, Form]] = []
    for index in range(len(lines) - 1, -1, -1):
        if hits and hits[-1][0] - index > _APART:
            break
        if (form := form_of(lines[index].text)) is not None:
            hits.append((index, form))
    if hits:
        return hits[::-1]
    pairs = enumerate(pairwise(lines))  # a terminal may have broken the message's own line
    return [(index, form) for index, (line, following) in pairs if (form := form_of(line.text + following.text.lstrip())) is not None]


def _message(lines: Sequence[LogLine], index: int) -> str:
    """The line and what it goes on with, of the same rank."""
    found = [lines[index].text]
    for line in lines[index + 1 : index + 1 + 4 * _AFTER_MESSAGE]:
        if line.rank is not None and lines[index].rank is not None and line.rank != lines[index].rank:
            continue
        if len(found) > _AFTER_MESSAGE or _ENDS_MESSAGE.search(line.text):
            break
        found.append(line.text)
    return "\n".join(found)


def _phase(lines: Sequence[LogLine], index: int, form: Form, message: str) -> tuple[OomPhase, str | None]:
    if form.cause in _VLLM_PHASES:
        return "vllm_start", None
    if form.source == "PyTorch's DataLoader":
        return "data", None
    if form.source == "pyarrow":
        return "data", "pyarrow, which datasets reads and writes with"
    if "Failed to clone() tensor" in message:
        return "saving", "state_dict of FSDP"
    phase, evidence = phase_before(lines, index)
    if form.source == "bitsandbytes" and phase in ("unknown", "forward") and "pythonInterface" in message:
        return "optimizer", "bitsandbytes keeps paged states in managed memory (pythonInterface.c)"
    if form.cause == "communication" and phase in ("unknown", "forward", "data"):
        return "communication", evidence
    return phase, evidence


def _stated(lines: Sequence[LogLine], pattern: re.Pattern[str]) -> int | None:
    for line in reversed(lines):
        match = pattern.search(line.text)
        if match is not None:
            return int(match[1]) if 0 < int(match[1]) < 1 << 20 else None
    return None


def _last_step(lines: Sequence[LogLine]) -> int | None:
    for line in reversed(lines[-400:]):
        found = None if re.search(r"shards|Map|Filter|Fetching|Download", line.text) else _STEP.search(line.text)
        if found is not None:
            return int(found[1])
    return None
