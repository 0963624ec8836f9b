"""The plan itself: what was chosen among what, on which device, and what only the user can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hfopt.schema.candidate import Candidate, Priced, Rejection
from hfopt.schema.evaluation import EvaluationPeak
from hfopt.schema.hardware import Hardware
from hfopt.schema.job import Assumption, Change, TrainJob
from hfopt.schema.step_cost import LoaderPlan, MemoryPeak, MemoryPhase, StepTime
from hfopt.schema.trial import Correction, Neutrality, Trial


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The settings before or after, priced."""

    candidate: Candidate
    memory: MemoryPeak
    time: StepTime
    loader: LoaderPlan
    fits: bool  # the training, and the first evaluation where there is one
    fault: str | None = None  # why it cannot run at all, so that no speed of it means anything
    evaluation: EvaluationPeak | None = None  # None: nothing is evaluated, it cannot be estimated, or the training does not fit already

    @property
    def runs(self) -> bool:
        return self.fits and self.fault is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Something only the user may do: a larger effective batch, an environment variable, another card."""

    title: str
    detail: str
    flag: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChoice:
    """How several devices share the work, why so, and how the result is started."""

    name: str  # 'DDP', 'FSDP2 (full shard)', 'ZeRO-3 with CPU offload'
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()  # other engines, each with its reason
    commands: tuple[str, ...] = ()  # each starts the result, exactly
    deepspeed: Mapping[str, Any] | None = None  # the DeepSpeed config, which `-o` writes beside the YAML


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFacts:
    """What the planner decided; `hfopt.planner.Plan` wraps it with apply(), to_yaml() and report()."""

    job: TrainJob
    hardware: Hardware
    effective_batch: int
    budget_bytes: int  # what may be used on the card after headroom
    before: Chosen
    after: Chosen
    changes: tuple[Change, ...]
    alternatives: tuple[Priced, ...]
    rejected: tuple[Rejection, ...]
    advice: tuple[Advice, ...] = ()
    trial: Trial | None = None
    correction: Correction | None = None  # before and after are predicted; the limits of the others are corrected by it
    neutrality: Neutrality | None = None
    assumed: tuple[Assumption, ...] = ()
    warnings: tuple[str, ...] = ()  # said first, and to who asked for quiet too: this trains otherwise than it seems
    notes: tuple[str, ...] = ()
    engine: EngineChoice | None = None  # None: one device
    phases: tuple[MemoryPhase, ...] = ()  # of a step that generates with vLLM on the same card
    weights_dtype: str | None = None  # what the weights are stored in while training; None is float32 or unknown
    as_written: Mapping[str, Change] = field(default_factory=dict)  # changes of keys that the file's tool spells otherwise
    repairs: tuple[Change, ...] = ()  # of what was outdated in the file, made before the plan
    launches: str = ""  # whose host the launches were priced for

    @property
    def changed_lines(self) -> tuple[Change, ...]:
        """All that becomes other in the file: repairs and plan; a key that both touch goes from its old value to its last."""
        planned = {change.key: change for change in self.changes}
        old = {repair.key: repair.before for repair in self.repairs}
        repairs = tuple(repair for repair in self.repairs if repair.key not in planned)
        changes = (replace(change, before=old.get(change.key, change.before)) for change in self.changes)
        return (*repairs, *(self.as_written.get(change.key, change) for change in changes))
