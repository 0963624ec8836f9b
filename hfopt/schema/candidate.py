"""Candidates: what was tried, what it costs, and why one was rejected."""

from __future__ import annotations

from dataclasses import dataclass, field

from hfopt.schema.job import Precision
from hfopt.schema.step_cost import Checkpointing, MemoryPeak, StepTime


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One point of the search space. The effective batch is batch × accumulation × world and is the same for all of them."""

    per_device_batch: int
    accumulation: int
    precision: Precision
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    optim: str | None = None  # None: as the config has it
    attn_implementation: str | None = None
    torch_compile: bool = False
    use_liger_kernel: bool = False

    def precision_words(self, weights_dtype: str | None) -> str:
        """What it computes in: without autocast that is what the weights are stored in (None: float32)."""
        stored = {"bfloat16": "bf16 weights", "float16": "fp16 weights"}.get(weights_dtype or "")
        return stored if stored is not None and self.precision in ("fp32", "tf32") else self.precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """A candidate with what it is predicted to cost."""

    candidate: Candidate
    memory: MemoryPeak
    time: StepTime


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    candidate: Candidate
    reason: str
