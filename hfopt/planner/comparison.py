"""One job, many cards: the traces are shared, only memory budgets and speeds differ, so each further card costs milliseconds.

Kernels and allocations depend on the card only through its compute capability; cards whose traces are the same by the rules share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hfopt.errors import ConfigError, HfoptError, NothingFits
from hfopt.hardware.detect import named
from hfopt.memory.curve import MemoryCurve
from hfopt.memory.step_memory import Estimate, context_bytes, estimate
from hfopt.planner.algorithm import plan_subject
from hfopt.planner.request import USE_CPU, Request, Subject, from_file
from hfopt.planner.result import Plan
from hfopt.schema import Assumption, StepSettings, Workload
from hfopt.speed.efficiency import cards_error
from hfopt.units import format_bytes, format_percent, format_rate, format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What one card makes of the job."""

    card: str
    plan: Plan | None
    why_not: str | None = None
    run_s: float | None = None
    cost: float | None = None
    assumed: tuple[Assumption, ...] = ()
    notes: tuple[str, ...] = ()

    def cells(self) -> tuple[str, ...]:
        if self.plan is None:
            return self.card, "no", self.why_not or "", "", "", "", "", ""
        after = self.plan.facts.after
        return (
            self.card,
            "yes",
            _settings(self.plan),
            self._rate(),
            format_percent(after.time.gpu_utilization),
            format_bytes(after.memory.device_bytes),
            "" if self.run_s is None else format_seconds(self.run_s),
            "" if self.cost is None else f"{self.cost:.2f}",
        )

    def _rate(self) -> str:
        assert self.plan is not None
        time = self.plan.facts.after.time
        rate = format_rate(time.samples_per_s, "").removesuffix(" /s")
        return rate if time.rate_error is None else f"{rate} ± {round(100 * time.rate_error)} %"

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "card": self.card,
            "fits": self.plan is not None,
            "why_not": self.why_not,
            "run_s": self.run_s,
            "cost": self.cost,
            "assumed": [asdict(item) for item in self.assumed],
        }
        if self.plan is not None:
            whole = self.plan.to_json()
            data |= {"effective_batch": whole["effective_batch"], "changes": whole["changes"], **whole["after"]}
        return data


class SharedTraces:
    """An estimator that traces once per kind of capability: what differs between cards of one kind is the context's size only."""

    def __init__(self) -> None:
        self._made: dict[StepSettings, Estimate] = {}

    def __call__(self, workload: Workload, settings: StepSettings) -> Estimate:
        kind = replace(settings, capability=_kind(settings.capability), multiprocessors=None)
        if kind not in self._made:
            self._made[kind] = estimate(workload, kind)
        shared = self._made[kind]
        context = context_bytes(settings.capability, multiprocessors=settings.multiprocessors)
        curve = MemoryCurve(shared.curve.timeline, context, shared.curve.varying, shared.curve.goes_on, shared.curve.options)
        return replace(shared, curve=curve)


def _kind(capability: tuple[int, int]) -> tuple[int, int]:
    """Before 8.0 there is no flash attention; 9.0 and later take larger cuBLAS workspaces. Within these the traces are the same."""
    if capability < (8, 0):
        return (7, 5)
    return (8, 0) if capability < (9, 0) else (9, 0)


def compare_cards(config: Path, names: Sequence[str], request: Request, *, prices: Mapping[str, float] | None = None) -> tuple[Row, ...]:
    """A row per card, in the order given."""
    traces = SharedTraces()
    subject = from_file(config, replace(request, gpu=names[0]))
    if subject.job.args.get(USE_CPU) is True:
        raise ConfigError(f"{config}: {USE_CPU}: true, so no card is used", hint=f"drop {USE_CPU} to compare cards")
    return tuple(_row(subject, name, request, traces, prices or {}) for name in names)


def told_apart(rows: Sequence[Row]) -> str | None:
    """Which cards are as fast as the fastest for all the prediction can say; None where it stands alone."""
    rates = {row.card: row.plan.facts.after.time.samples_per_s for row in rows if row.plan is not None}
    best = max(rates.values(), default=0.0)
    equal = [card for card, rate in sorted(rates.items(), key=lambda item: -item[1]) if rate * (1 + cards_error()) >= best]
    if len(equal) < 2:
        return None
    listed = f"{', '.join(equal[:-1])} and {equal[-1]}"
    return f"{listed} cannot be told apart: 8 of 10 ratios between cards are met within {format_percent(cards_error())}"


def _row(subject: Subject, name: str, request: Request, traces: SharedTraces, prices: Mapping[str, float]) -> Row:
    hardware = named(name, count=request.num_gpus or 1)
    card = hardware.gpus[0].name if hardware.gpus else "CPU"
    subject = replace(subject, hardware=hardware)
    try:
        made = plan_subject(subject, request, estimator=traces)
    except NothingFits as error:
        return Row(card=card, plan=None, why_not=str(error).partition(": ")[2], assumed=subject.assumed, notes=hardware.notes)
    run_s = _run_s(subject, made)
    price = _price(prices, name, card)
    cost = None if price is None or run_s is None else price * (request.num_gpus or 1) * run_s / 3600
    return Row(card=card, plan=made, run_s=run_s, cost=cost, assumed=subject.assumed, notes=made.facts.notes)


def _run_s(subject: Subject, made: Plan) -> float | None:
    """The whole run: max_steps, or the epochs over the samples; None where the config says neither."""
    args, time = subject.job.args, made.facts.after.time
    steps = args.get("max_steps")
    if isinstance(steps, int) and steps > 0:
        return steps * time.step_s
    count = subject.job.data.samples
    if count is None:
        return None
    return float(args.get("num_train_epochs") or 3.0) * count / time.samples_per_s


def _price(prices: Mapping[str, float], name: str, card: str) -> float | None:
    """By the name the user gave, or by any spelling of the card."""
    for key, price in prices.items():
        if key.lower() in (name.lower(), card.lower()) or _same_card(key, card):
            return price
    return None


def _same_card(key: str, card: str) -> bool:
    try:
        return any(gpu.name == card for gpu in named(key).gpus)
    except HfoptError:
        return False


def _settings(made: Plan) -> str:
    candidate = made.candidate
    parts = [f"{candidate.per_device_batch} × {candidate.accumulation}", candidate.precision_words(made.facts.weights_dtype)]
    if candidate.checkpointing.on:
        parts.append(
            "checkpointing" if candidate.checkpointing.every_n_layers == 1 else f"checkpointing/{candidate.checkpointing.every_n_layers}"
        )
    return " ".join(parts)
