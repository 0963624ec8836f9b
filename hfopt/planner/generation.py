"""What GRPO's generation holds beside the training: the key-value cache of all completions that are written at once.

bytes = 2 (keys and values) × layers × key-value heads × head size × tokens × completions × bytes of a number. It lives while nothing of the
backward does, so it is held against what stays (weights, optimizer state), not against the step's peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hfopt.planner.request import Subject
from hfopt.schema import MemoryPeak
from hfopt.units import format_bytes

_HALF = frozenset({"bfloat16", "float16"})


def generation_notes(subject: Subject, peak: MemoryPeak, *, budget_bytes: int, dtype: str | None) -> Iterator[str]:
    job, args = subject.job, subject.job.args
    if job.trainer != "GRPO":
        return
    if args.get("use_vllm") is True:
        yield "vLLM generates: on the same cards it takes the share that vllm_gpu_memory_utilization names, which is not in the estimate"
        return
    rows = int(args.get("generation_batch_size") or job.effective_batch) // job.world_size
    cache = cache_bytes(_config(subject), rows=rows, tokens=subject.workload.shape.length, dtype=dtype)
    if cache is None:
        return
    kept = 0 if peak.breakdown is None else peak.breakdown.weights_bytes + peak.breakdown.optimizer_bytes + peak.context_bytes
    said = f"generating {rows} completions at once holds a key-value cache of {format_bytes(cache)} beside weights and optimizer state"
    if kept + cache > budget_bytes:
        yield f"{said} ({format_bytes(kept)}): more than {format_bytes(budget_bytes)}; use a smaller generation_batch_size"
    else:
        yield f"{said}, which fits"


def cache_bytes(config: Any, *, rows: int, tokens: int | None, dtype: str | None) -> int | None:
    """None where the config does not say enough."""
    layers, heads = getattr(config, "num_hidden_layers", None), getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(hidden, int) and tokens):
        return None
    size = getattr(config, "head_dim", None) or hidden // heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    return 2 * layers * shared * size * tokens * rows * (2 if dtype in _HALF else 4)


def _config(subject: Subject) -> Any:
    built = subject.workload.build_model
    config: Any = getattr(built, "config", None) or getattr(getattr(built, "template", None), "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config
