"""What tells the phase of an out-of-memory error: names of functions and files, lines of code, and what programs print.

A frame's function says what it does by the words in its name, whoever wrote it: `validate_epoch`, `run_eval` and `evaluation_loop` all
evaluate. What surrounds a step (saving, evaluating, generating, loading) counts before the parts of a step, and of those the backward and
the optimizer count before the forward, which both run again.
"""

from __future__ import annotations

import re

from hfopt.schema import OomPhase

_ENGINE_STARTS = (
    r"(?:profile_run|_dummy_\w+|capture\w*|warm_?up\w*|compile_or_warm_up_model|init\w*|_init\w*|__init__|load_\w+|create_weights"
    r"|determine_\w+|\w*kv_cache\w*|raise_if_cache_size_invalid|wait_for_engine_startup|weight_loader|_get_model|get_model|get_weight"
    r"|\w*repack\w*|process_weights\w*)"
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
        r"deepspeed\.initialize\(|\|(?:_prepare_deepspeed|_configure_optimizer|_configure_zero_optimizer|_configure_distributed_model|set_device)\b"
        r"|param_and_grad_buffer\.py\||deepspeed/runtime/zero/stage\w*\.py\|(?:__init__|_create_\w+|_setup_\w+)\b",
    ),
    (
        "evaluation",
        r"\|(?!_maybe_log_save_evaluate|evaluate_actions|\w*train)\w*evaluat\w*|\|(?!\w*train)(?:\w*_)?eval(?:_\w+)?\b|\|(?:\w*_)?validation(?:_\w+)?\b"
        r"|\|(?:\w*_)?(?:val|valid|validate|test|prediction)(?:_(?:step|loop|epoch|one_epoch|fn))?\b|\|(?!predict_noise)_?predict\w*|\|\w+_predictions?\b"
        r"|\|(?:nested_concat|nested_gather|pad_across_processes|gather_for_metrics|torch_pad_and_concatenate|compute_metrics|inference_on_dataset|\w*sanity_check"
        r"|\w*(?:compute|calc\w*)_\w*(?:metric|fid|score|accuracy|auc)\w*)\b"
        r"|/(?:validator|evaluator)s?\.py\||trainer\.(?:evaluate|predict|validate|test)\(|Validating",
    ),
    (
        "generation",
        r"\|(?!_generate_(?:examples|tables)|\w*generator)\w*(?:generat(?:e|ion)|rollout|beam_search|greedy_search|contrastive_search)\w*"
        r"|\|(?:sample|_sample|_?prefill|setup_caches?|wake_up|_move_model_to_vllm|sync_weights|update_weights|transcribe|chat|(?:run_|do_|_)?infer(?:ence)?|inference_\w+|log_images?|\w+2img|process_images\w*)\b|text_generation_server/|\.generate\(|\.chat\(|\bpipe(?:line)?\("
        r"|unwrap_model_for_generation\(|(?:diffusers|transformers)/pipelines/\S*\||pipeline_\w+\.py\|__call__|(?:diffusion|comfy)\S*\|(?:sample\w*|predict_noise)\b|(?:vllm|sglang)\w*/\S*\|(?:execute_model|step|run_busy_loop|event_loop\w*)\b",
    ),
    ("optimizer", r"\|_take_model_step\b|engine\.step\("),  # DeepSpeed's, which accelerate calls in its backward
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
        r"|_recursive_wrap|get_peft_model|prepare_model_for_kbit_training|_broadcast_coalesced|_init_param_handle\w*|setup|inject_adapter|create_optimizer|init_process_group|\w*init_(?:ddp|dist)\w*)\b|init_process_group\(|torch/cuda/__init__\.py\|_lazy_init|param_and_grad_buffer\.py\||accelerator\.prepare\("
        r"|DistributedDataParallel\(|fsdp/_init_utils|wrapper_cls\(|fully_sharded_data_parallel\.py\|__init__",
    ),
    (
        "loss",
        r"\|(?!\w*compute_loss|\w*loss_(?:func|step)\b)\w*(?:loss|cross_entropy|log_softmax|logsumexp|logps|log_?probs?|entropy)\w*|\w*(?:loss|cross_entropy)\w*(?:/\w+)?\.py\|"
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
        r"|\w*train(?:_(?:step|fn|epoch|one_epoch|loop|batch|one_batch|model))?|apply_model|update_(?:actor|policy|critic))\b|forward=True|trainer\.(?:train|fit)\(|nn/(?:modules|functional|parallel)|/modeling_\w+\.py\|"
        r"|/\w*(?:attention|attn|unet|vae|encoder|decoder|transformer|resnet|backbone|layers?|blocks?|embed\w*|model)\w*\.py\||/models?/\S*\|"
        r"|(?:softmax|matmul|bmm|einsum|conv[123]d|layer_norm|dropout|gelu|silu|relu|grid_sample|interpolate)\(| @ \w",
    ),
)
KNOWN = tuple((phase, re.compile(signs, re.IGNORECASE)) for phase, signs in _SIGNS)
SCRIPTS: tuple[tuple[OomPhase, re.Pattern[str]], ...] = (  # of a forward outside of training, by the name of the script that runs it
    ("evaluation", re.compile(r"(?:^|/)(?:test|eval|evaluate|validate|val|predict)\.py\|", re.MULTILINE)),
    (
        "generation",
        re.compile(r"(?:^|/)(?:demo|infer|inference|generate|sample|chat|app|webui|gradio_\w+|\w+_demo|\w+2img)\.py\|", re.MULTILINE),
    ),
)

# Lines of a log without a traceback; the last one before the error decides.
LINES: tuple[tuple[OomPhase, re.Pattern[str]], ...] = (
    (
        "data",
        re.compile(
            r"\d+%.*\d example|^(?:Map|Filter|Tokenizing|Packing|Applying chat template|Converting)\b.*\d+%"
            r"|Running tokenizer|Preprocessing|Tokenizing|Generating train split|Grouping texts|Caching latents|Loading (?:the )?data"
            r"|(?:building|creating|reading|downloading) (?:the )?(?:train\w* |val\w* )?data",
            re.IGNORECASE,
        ),
    ),
    (
        "setup",
        re.compile(
            r"DeepSpeed\w* initialize|(?:before|after) (?:creating|initializing) .{0,30}(?:partitions|optimizer|states)"
            r"|distributed_backend=|Reduce bucket size|^Parameter Offload\b"
            r"|Creating \w+ (?:un)?fused optimizer",
            re.IGNORECASE,
        ),
    ),
    (
        "loading",
        re.compile(
            r"\bload(?:ing)?\b[^/]{0,30}\b(?:checkpoint|weights|safetensors|model|vae|u-?net|pipeline)\b|Fetching \d+ files"
            r"|Restoring (?:from )?(?:the )?checkpoint|Materializing param"
            r"|(?:Initiali[sz]|Build|Creat)(?:e|ing)? (?:the )?model(?! parallel)\b|Quantizing",
            re.IGNORECASE,
        ),
    ),
    (
        "evaluation",
        re.compile(
            r"\*+ Running (?:Evaluation|Prediction)|Evaluating|Validating|\d+/\d+, [\d.]+ task/s"
            r"|\b(?:val(?:id(?:ation|ating|ate)?)?|eval(?:uation|uating)?|test(?:ing)?|predict(?:ion|ing)?)\b[^\d%]{0,24}\d+%"
            r"|(?:Validation|Testing|Predicting) (?:DataLoader|sanity)|Sanity Checking",
            re.IGNORECASE,
        ),
    ),
    (
        "saving",
        re.compile(
            r"(?:Saving|Summoning) (?:model )?(?:checkpoint|the model|LoRA|model)|Configuration saved in"
            r"|Model weights saved|\bMerging\b|Exporting",
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
