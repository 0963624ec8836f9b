"""One training configuration to be run on the virtual GPU and estimated: the same model and batches on both sides.

A model is one of the bundled table, or `tiny:` and a name of data/tiny_families.json: a small config of a family, with random weights.
"""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfopt.memory.curve import MemoryCurve
from hfopt.memory.step_memory import estimate
from hfopt.schema import Checkpointing, DataSpec, Lora, ModelSpec, StepSettings, Workload

TINY = "tiny:"
FAMILIES = Path(__file__).parent / "data" / "tiny_families.json"


@functools.cache
def _tiny(name: str) -> str:
    """A folder with the family's config."""
    folder = Path(tempfile.mkdtemp(prefix="hfopt-tiny-"))
    (folder / "config.json").write_text(json.dumps(json.loads(FAMILIES.read_text())[name]))
    return str(folder)


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    batch: int
    length: int | None = None
    task: str | None = None
    precision: Any = "fp32"
    checkpointing: bool = False
    reentrant: bool = False
    accumulation: int = 1
    optim: str = "adamw_torch"
    max_grad_norm: float = 1.0
    label_smoothing: float = 0.0
    weights_dtype: str | None = None
    attn: str | None = None
    lora: bool = False
    audio_seconds: float | None = None
    data: dict[str, Any] = field(default_factory=dict)  # further fields of DataSpec
    frozen_parts: list[str] = field(default_factory=list)
    overrides: dict[str, Any] = field(default_factory=dict)
    steps: int = 3

    @property
    def title(self) -> str:
        parts = [self.model.split("/")[-1], self.precision, f"{self.batch}x{self.accumulation}", self.optim]
        extras = {
            "ckpt": self.checkpointing,
            "reentrant": self.reentrant,
            "lora": self.lora,
            f"weights {self.weights_dtype}": self.weights_dtype,
            f"attn {self.attn}": self.attn,
            "smooth": self.label_smoothing,
            f"frozen {'+'.join(self.frozen_parts)}": self.frozen_parts,
            " ".join(f"{name} {value}" for name, value in self.data.items()): self.data,
        }
        return " ".join([*parts, *(name for name, on in extras.items() if on)])


def trained_workload(case: Case) -> Workload:
    from hfopt.model.from_config import from_spec

    model = ModelSpec(
        name=_tiny(case.model.removeprefix(TINY)) if case.model.startswith(TINY) else case.model,
        task=case.task,  # type: ignore[arg-type]
        weights_dtype=case.weights_dtype,
        attn_implementation=case.attn,
        lora=Lora() if case.lora else None,
        overrides=case.overrides,
        frozen_parts=tuple(case.frozen_parts),  # type: ignore[arg-type]
    )
    data = DataSpec(max_length=case.length, audio_seconds=case.audio_seconds, **case.data)
    return from_spec(model, data)


def estimated_curve(case: Case) -> MemoryCurve:
    """As a plan has it: traced with two micro-batches at most, then with the whole window."""
    traced = estimate(trained_workload(case), step_settings(case)).curve
    return traced.of_window(case.accumulation) or traced


def step_settings(case: Case) -> StepSettings:
    """Those that are traced."""
    return StepSettings(
        precision=case.precision,
        checkpointing=Checkpointing(every_n_layers=int(case.checkpointing), use_reentrant=case.reentrant),
        accumulation=min(case.accumulation, 2),
        optim=case.optim,
        max_grad_norm=case.max_grad_norm,
        label_smoothing=case.label_smoothing,
        capability=(8, 6),
        multiprocessors=28,
    )
