"""What GRPO's generation holds beside the training, and whether it fits: every completion of a generation batch is written at once.

    cache  = layers × key-value heads × head size × tokens × completions × (bytes of a key + bytes of a value), and one layer's keys twice
             while the cache grows by a token
    logits = vocabulary × completions × 10: the next token's in the compute type, in float32, and as probabilities
    copies = what autocast makes of float32 weights for the length of a forward pass

It lives while nothing of the backward does, so it is held against what stays (weights, optimizer state, the context), not against the
step's peak. No candidate changes it: the generation batch is the user's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hfopt.errors import NothingFits
from hfopt.planner.request import Subject
from hfopt.schema import MemoryPeak, Precision, TrainJob
from hfopt.units import MIB, format_bytes

_HALF = frozenset({"bfloat16", "float16"})
_GENERATIONS = 8  # TRL's default of num_generations
_WORKSPACE = int(8.125 * MIB)  # cuBLAS's


@dataclass(frozen=True, kw_only=True, slots=True)
class Writing:
    """One model writing: its shape, and in what numbers."""

    layers: int
    kv_width: int  # key-value heads × head size
    vocabulary: int
    copied_weights: int  # in 16 bits beside float32
    key_bytes: int
    value_bytes: int

    def bytes_for(self, completions: int, tokens: int) -> int:
        layer = self.kv_width * tokens * completions
        cache = self.layers * layer * (self.key_bytes + self.value_bytes) + layer * self.key_bytes
        return cache + 10 * self.vocabulary * completions + 2 * self.copied_weights + _WORKSPACE


def completions_at_once(job: TrainJob) -> int:
    """Of one rank."""
    size, steps = job.args.get("generation_batch_size"), job.args.get("steps_per_generation")
    if isinstance(size, int):
        return max(1, size // job.world_size)
    return job.per_device_batch * steps if isinstance(steps, int) else job.effective_batch // job.world_size


def check_generation(subject: Subject, peak: MemoryPeak, *, budget_bytes: int, precision: Precision, dtype: str | None) -> Iterator[str]:
    """What there is to say about it; NothingFits where every run would end in its first generation."""
    job = subject.job
    if job.trainer != "GRPO":
        return
    if job.args.get("use_vllm") is True:
        yield "vLLM generates: on the same cards it takes the share that vllm_gpu_memory_utilization names, which is not in the estimate"
        return
    tokens, writing = subject.workload.shape.length, writing_of(subject, precision=precision, dtype=dtype)
    if writing is None or tokens is None or peak.breakdown is None:
        return
    rows = completions_at_once(job)
    kept = peak.breakdown.weights_bytes + peak.breakdown.optimizer_bytes + peak.context_bytes
    need = writing.bytes_for(rows, tokens)
    taken = f"{format_bytes(need)} (key-value cache, logits) beside the {format_bytes(kept)} that stay"
    said = f"generating {rows} completions at once takes {taken}"
    if kept + need > budget_bytes:
        raise NothingFits(
            f"nothing fits: {said}, more than {format_bytes(budget_bytes)}", hint=_remedy(job, writing, tokens, budget_bytes - kept)
        )
    yield f"{said}, which fits (by rule; the same was counted on the virtual GPU)"


def _remedy(job: TrainJob, writing: Writing, tokens: int, room_bytes: int) -> str:
    group = int(job.args.get("num_generations") or _GENERATIONS)
    fitting = [rows for rows in range(group, completions_at_once(job), group) if writing.bytes_for(rows, tokens) <= room_bytes]
    if fitting:
        return f"generation_batch_size: {fitting[-1] * job.world_size}, the micro-batch dividing it, generates more often and fits"
    return "use a shorter max_completion_length, LoRA, or let vLLM generate on a card of its own (use_vllm, vllm_mode: server)"


def writing_of(subject: Subject, *, precision: Precision, dtype: str | None) -> Writing | None:
    """None where the config does not say enough. Rotary positions leave keys in the type of the hidden states, which is the weights'."""
    config = _config(subject)
    layers, heads = getattr(config, "num_hidden_layers", None), getattr(config, "num_attention_heads", None)
    hidden, vocabulary = getattr(config, "hidden_size", None), getattr(config, "vocab_size", None)
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(hidden, int) and isinstance(vocabulary, int)):
        return None
    size = getattr(config, "head_dim", None) or hidden // heads
    half_weights, half_compute = dtype in _HALF, dtype in _HALF or precision in ("bf16", "fp16")
    embedding = 0 if getattr(config, "tie_word_embeddings", False) else vocabulary * hidden
    return Writing(
        layers=layers,
        kv_width=(getattr(config, "num_key_value_heads", None) or heads) * size,
        vocabulary=vocabulary,
        copied_weights=max(0, subject.workload.parameters - embedding) if half_compute and not half_weights else 0,
        key_bytes=2 if half_weights else 4,
        value_bytes=2 if half_compute else 4,
    )


def _config(subject: Subject) -> Any:
    built = subject.workload.build_model
    config: Any = getattr(built, "config", None) or getattr(getattr(built, "template", None), "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config
