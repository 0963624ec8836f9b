"""What the figures of an out-of-memory message say in sentences, and what helps in that phase where no config is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hfopt.schema import FittingChange, OomCause, OomPhase, OomReport
from hfopt.units import GIB, format_bytes

EXPANDABLE = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
PHASES: Mapping[OomPhase, str] = {
    "data": "preparing or loading data",
    "loading": "loading the model's weights onto the device",
    "setup": "setting up the devices, or wrapping the model for several of them",
    "forward": "a forward pass",
    "loss": "the head and the loss of a training step (logits: batch × tokens × vocabulary)",
    "backward": "the backward of a training step",
    "optimizer": "the optimizer's step (its states are made in the first one)",
    "evaluation": "an evaluation",
    "generation": "generating",
    "saving": "saving or merging the model",
    "vllm_start": "the start of an inference engine",
    "communication": "exchanging between ranks",
    "unknown": "a part of the run that the log does not show",
}
_CAUSES: Mapping[OomCause, str] = {
    "device_full": "the run itself fills the card",
    "fragmentation": "fragmentation: enough memory was there, but in pieces",
    "other_processes": "other processes hold a part of the card",
    "one_request": "a single tensor asks for more than the card can give",
    "refused_though_free": "the driver refused though enough was free: another process was quicker, Windows keeps a share, or a single "
    "allocation may not be so large (Intel Arc: 4 GiB)",
    "limit": "a limit on this process's memory was reached, not the card's end",
    "spill": "more is allocated than the card has: Windows lends the host's memory (sysmem fallback), which is slow and ends too",
    "library": "no room was left for a CUDA library's handle or workspace, outside PyTorch's pool: the card was full",
    "communication": "no room was left for NCCL's own buffers, outside PyTorch's pool: the card was full",
    "host": "the host's memory ran out, not the card's",
    "host_killed": "the kernel ended the process because the host's (or the container's) memory ran out",
    "shared_memory": "/dev/shm is too small for the batches that DataLoader workers hand over",
    "kv_cache": "what vLLM may use of the card leaves too little for its KV cache",
    "vllm_share": "the share of the card that vLLM asks for is not free when it starts",
    "bad_size": "no program means to request that size: a broken tensor or a failed collective, not a lack of memory",
}


def reasons_of(report: OomReport) -> tuple[str, ...]:
    """What was asked for and what was free; the cause; whether it was fragmentation; the phase."""
    certain = _CAUSES[report.cause] if report.certain else f"most likely {_CAUSES[report.cause]}; the log does not say so itself"
    return tuple(filter(None, (_asked(report), f"cause: {certain}", _fragments(report), _phase(report), *_more(report))))


def _asked(report: OomReport) -> str | None:
    figures = report.figures
    where = f" on {report.device}" if report.device else ""
    asked = None if figures.requested_bytes is None else f"{report.source} requested {format_bytes(figures.requested_bytes)}{where}"
    known = (
        ("of", figures.total_bytes, "in all"),
        ("", figures.free_bytes, "free"),
        ("", figures.allocated_bytes, "allocated by PyTorch"),
        ("", figures.unused_bytes, "reserved by PyTorch but unused"),
        ("", figures.others_bytes if (figures.others_bytes or 0) > GIB // 2 else None, "held by others"),
        ("", figures.limit_bytes, "allowed"),
    )
    stated = ", ".join(f"{format_bytes(size)} {words}" for _, size, words in known if size is not None)
    if asked is None:
        held = "" if figures.process_bytes is None else f"; the process held {format_bytes(figures.process_bytes)}"
        return (
            f"{report.source} ran out of memory{where}: {stated}{held}" if stated or held else f"{report.source} ran out of memory{where}"
        )
    return f"{asked}: {stated}" if stated else asked


def _fragments(report: OomReport) -> str | None:
    figures = report.figures
    unused, requested = figures.unused_bytes, figures.requested_bytes
    if unused is None or requested is None:
        return None
    if report.cause == "fragmentation":
        return (
            f"fragmentation: yes. {format_bytes(unused)} were reserved and unused, {format_bytes(requested)} were requested: "
            "no piece was large enough"
        )
    return f"fragmentation: no. Only {format_bytes(unused)} were reserved and unused"


def _phase(report: OomReport) -> str:
    steps = "in the first step" if report.step == 0 else f"after {report.step} step{'' if report.step == 1 else 's'}"
    at = "" if report.step is None else f", {steps}"
    by = "" if report.evidence is None else f" (by: {report.evidence})"
    return f"phase: {PHASES[report.phase]}{at}{by}"


def _more(report: OomReport) -> Iterator[str]:
    if report.went_on:
        yield "the run went on after it: the log shows training behind the error"
    if len(report.ranks) > 1:
        yield f"ranks {', '.join(map(str, report.ranks))} ran out alike"
    elif report.ranks:
        yield f"rank {report.ranks[0]} ran out"
    for process, size in report.processes.items():
        yield f"process {process} on the same card holds {format_bytes(size)}"
    vllm = report.vllm
    if "share" in vllm and "card_bytes" in vllm and "weights_bytes" in vllm:
        yield (
            f"vLLM may use {vllm['share']:g} of {format_bytes(int(vllm['card_bytes']))}; its weights take "
            f"{format_bytes(int(vllm['weights_bytes']))}, its activations at most {format_bytes(int(vllm.get('peak_bytes', 0)))}"
        )


# --------------------------------------------------------------------------------------------------------- what helps


def general_changes(report: OomReport) -> tuple[FittingChange, ...]:
    """Without a config: by cause, then by phase; figures where the message has them."""
    by_cause = tuple(_by_cause(report))
    if report.cause in ("device_full", "fragmentation", "library", "communication", "spill", "one_request", "refused_though_free", "limit"):
        return (*by_cause, *_BY_PHASE.get(report.phase, _BY_PHASE["unknown"]))
    return by_cause


def _change(what: str, how: str, effect: str = "same") -> FittingChange:
    return FittingChange(what=what, how=how, effect=effect)


def _by_cause(report: OomReport) -> Iterator[FittingChange]:
    figures = report.figures
    match report.cause:
        case "fragmentation" if report.source != "XLA":
            yield _change(f"expandable segments: the {format_bytes(figures.unused_bytes or 0)} in pieces become usable", EXPANDABLE)
        case "other_processes":
            named = ", ".join(str(process) for process in report.processes)
            held = format_bytes(figures.others_bytes or 0)
            yield _change(
                f"end the other processes, which hold {held}",
                f"kill {named}" if named else "nvidia-smi lists them; end those, or use another card",
            )
        case "limit":
            allowed = "" if figures.limit_bytes is None else f" ({format_bytes(figures.limit_bytes)} allowed)"
            yield _change(f"raise the limit{allowed}", "set_per_process_memory_fraction, or PYTORCH_MPS_HIGH_WATERMARK_RATIO on Apple")
        case "spill":
            yield _change(
                f"bring the run back under {format_bytes(figures.total_bytes or 0)}"
                if figures.total_bytes
                else "bring the run back onto the card",
                "NVIDIA control panel: CUDA - Sysmem Fallback Policy: Prefer No Sysmem Fallback, so that it fails at once",
            )
        case "library" | "communication":
            yield _change(
                "leave some memory outside PyTorch's pool",
                "a smaller batch, or torch.cuda.set_per_process_memory_fraction(0.95) before training",
            )
        case "host" | "host_killed":
            yield from _host(report)
        case "shared_memory":
            yield _change("a larger /dev/shm", "docker run --shm-size=8g (Kubernetes: an emptyDir of medium Memory at /dev/shm)")
            yield _change(
                "fewer batches in flight", "dataloader_num_workers: 2, dataloader_prefetch_factor: 2; or dataloader_num_workers: 0"
            )
        case "kv_cache" | "vllm_share":
            yield from _vllm(report)
        case "bad_size":
            yield _change(
                "look for the first error above it", "a failed collective or a corrupt tensor size; NCCL_DEBUG=WARN shows the former"
            )
        case _:
            return


def _host(report: OomReport) -> Iterator[FittingChange]:
    if report.phase == "loading":
        yield _change(
            "load weights shard by shard, in their own dtype", 'from_pretrained(..., dtype="auto"): float32 doubles a bfloat16 checkpoint'
        )
        yield _change(
            "let one process per machine read the weights", "FSDP: cpu_ram_efficient_loading: true; DeepSpeed: zero3_init_flag: true"
        )
    elif report.phase == "data":
        yield _change(
            "fewer workers, each of which holds the data again", "dataloader_num_workers: 2, or dataset_num_proc: 1 while tokenizing"
        )
        yield _change("data from disk instead of memory", "datasets with keep_in_memory=False, or streaming=True")
    elif report.phase == "saving":
        yield _change("sharded checkpoints", "fsdp_config: {state_dict_type: SHARDED_STATE_DICT}; save_only_model: true")
    elif report.phase == "evaluation":
        yield _change("keep fewer predictions", "preprocess_logits_for_metrics, prediction_loss_only: true, or batch_eval_metrics: true")
    else:
        yield _change("fewer workers and batches in flight", "dataloader_num_workers: 2, dataloader_prefetch_factor: 2")
        yield _change(
            "no offload to the host, or more of its memory",
            "offload_optimizer and offload_param keep 16 bytes for each trained weight there",
        )
    held = report.figures.process_bytes
    words = "more memory for the process" if held is None else f"more memory than the {format_bytes(held)} it held"
    yield _change(
        words, "Slurm: --mem; Docker: --memory; Kubernetes: resources.limits.memory; `dmesg | grep -i oom` shows whether it was the kernel"
    )


def _vllm(report: OomReport) -> Iterator[FittingChange]:
    seen, cause = report.vllm, report.cause
    if cause == "vllm_share":
        free, total = seen.get("free_bytes"), seen.get("total_bytes")
        share = None if not free or not total else int(100 * free / total) / 100
        fitting = "a share that is free" if share is None else f"at most {share:g}: that much is free"
        yield _change(f"lower gpu_memory_utilization: {fitting}", _share_keys(share))
        yield _change(
            "free the card first", "start vLLM before the training's model, end other processes (nvidia-smi), or use vllm_mode: server"
        )
        return
    if (length := seen.get("estimated_length") or seen.get("storable")) is not None:
        yield _change(
            f"sequences of at most {int(length)} tokens, which its cache can hold",
            f"max_model_len={int(length)} (TRL: vllm_max_model_length)",
        )
    elif seen.get("max_length"):
        yield _change("shorter sequences", "max_model_len (TRL: vllm_max_model_length)")
    yield _change(f"raise gpu_memory_utilization{_needed_share(seen)}", _share_keys(None))
    yield _change(
        "a smaller model or its weights in fewer bits",
        "tensor_parallel_size over several cards, a quantized checkpoint, kv_cache_dtype=fp8",
    )


def _needed_share(seen: Mapping[str, float]) -> str:
    card, needed, available, share = (seen.get(name) for name in ("card_bytes", "needed_bytes", "available_bytes", "share"))
    if card and needed and available is not None and share:
        return f" to at least {min(0.99, share + (needed - available) / card + 0.005):.2f}"
    weights, peak = seen.get("weights_bytes"), seen.get("peak_bytes")
    if card and weights and share:
        return f" above {min(0.99, (weights + (peak or 0.0)) / card + 0.02):.2f}: weights and activations alone take that"
    return ""


def _share_keys(share: float | None) -> str:
    value = "" if share is None else f"={share:g}"
    return f"gpu_memory_utilization{value} (TRL: vllm_gpu_memory_utilization{'' if share is None else f': {share:g}'})"


_BATCH = _change("a smaller batch, the same effective one", "half of per_device_train_batch_size, twice gradient_accumulation_steps")
_CHECKPOINTING = _change("recompute activations instead of keeping them", "gradient_checkpointing: true")
_SHORTER = _change("shorter sequences", "max_length (cutoff_len, sequence_len)", "training")
_ADAPTERS = _change("train adapters on 4-bit weights (QLoRA)", "use_peft: true, load_in_4bit: true", "training")
_LOSS = _change(
    "a loss that never holds the logits whole", "use_liger_kernel: true, or TRL's SFTTrainer from 1.0 on; axolotl: cut_cross_entropy: true"
)
_OPTIMIZER = _change(
    "smaller or paged optimizer states", "optim: adamw_bnb_8bit, paged_adamw_8bit, or paged_adamw_32bit for the same update", "rounding"
)
_SHARDED = _change("share the model over several cards", "--num-gpus N with hfopt plan: FSDP2 or ZeRO-3")
_BY_PHASE: Mapping[str, tuple[FittingChange, ...]] = {
    "forward": (_BATCH, _CHECKPOINTING, _SHORTER, _ADAPTERS),
    "backward": (_BATCH, _CHECKPOINTING, _LOSS, _SHORTER, _ADAPTERS),
    "loss": (_LOSS, _BATCH, _SHORTER),
    "optimizer": (_OPTIMIZER, _SHARDED, _ADAPTERS),
    "unknown": (_BATCH, _CHECKPOINTING, _OPTIMIZER, _ADAPTERS),
    "communication": (_BATCH, _CHECKPOINTING),
    "setup": (_SHARDED, _ADAPTERS),
    "data": (_BATCH,),
    "loading": (
        _change("load the weights as they are stored", "dtype: bfloat16 (or auto): float32 doubles them"),
        _SHARDED,
        _ADAPTERS,
    ),
    "evaluation": (
        _change("a smaller evaluation batch", "per_device_eval_batch_size: 1 or 2"),
        _change("predictions moved to the host more often", "eval_accumulation_steps: 1"),
        _change("no predictions kept", "prediction_loss_only: true, or argmax in preprocess_logits_for_metrics"),
    ),
    "generation": (
        _change("fewer or shorter completions at once", "num_generations, generation_batch_size, max_completion_length"),
        _change("a smaller share for vLLM, which sleeps while training", "vllm_gpu_memory_utilization: 0.3, vllm_enable_sleep_mode: true"),
    ),
    "saving": (
        _change(
            "sharded checkpoints, or gather on the host",
            "fsdp_config: {state_dict_type: SHARDED_STATE_DICT}, or offload_to_cpu with FULL_STATE_DICT",
        ),
        _change("save the adapter or the model alone", "save_only_model: true"),
    ),
    "vllm_start": (_change("a smaller share for vLLM", "vllm_gpu_memory_utilization"),),
}
