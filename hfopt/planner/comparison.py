"""One job, many cards: the traces are shared, only memory budgets and speeds differ, so each further card costs milliseconds.

Kernels and allocations depend on the card only through its compute capability; cards whose capabilities choose alike share a trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hfopt.errors import ConfigError, NothingFits
from hfopt.hardware.detect import named
from hfopt.hardware.prices import RentalOffer, cheapest
from hfopt.memory.trace_store import TraceStore
from hfopt.planner.algorithm import plan_subject
from hfopt.planner.device_figures import with_host
from hfopt.planner.request import USE_CPU, Request, Subject, from_file
from hfopt.planner.result import Plan
from hfopt.schema import Assumption
from hfopt.store import default_store


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What one card makes of the job, and what renting it costs."""

    card: str
    plan: Plan | None
    cards: int = 1
    why_not: str | None = None
    run_s: float | None = None
    offer: RentalOffer | None = None
    assumed: tuple[Assumption, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def samples_per_s(self) -> float | None:
        return None if self.plan is None else self.plan.facts.after.time.samples_per_s

    @property
    def usd_per_hour(self) -> float | None:
        return None if self.offer is None else self.offer.hour_of(self.cards)

    @property
    def usd_per_million(self) -> float | None:
        """Of a million samples."""
        rate, hour = self.samples_per_s, self.usd_per_hour
        return None if not rate or hour is None else hour * 1e6 / rate / 3600

    @property
    def kwh_per_million(self) -> float | None:
        power_w = None if self.plan is None else self.plan.facts.after.time.power_w
        return None if power_w is None or not self.samples_per_s else self.cards * power_w * 1e6 / self.samples_per_s / 3.6e6

    @property
    def cost(self) -> float | None:
        """Of the whole run."""
        return None if self.run_s is None or self.usd_per_hour is None else self.usd_per_hour * self.run_s / 3600

    @property
    def kwh(self) -> float | None:
        power_w = None if self.plan is None else self.plan.facts.after.time.power_w
        return None if power_w is None or self.run_s is None else self.cards * power_w * self.run_s / 3.6e6

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "card": self.card,
            "fits": self.plan is not None,
            "why_not": self.why_not,
            "run_s": self.run_s,
            "cost": self.cost,
            "kwh": self.kwh,
            "usd_per_million_samples": self.usd_per_million,
            "kwh_per_million_samples": self.kwh_per_million,
            "offer": None if self.offer is None else _offer(self.offer, self.usd_per_hour),
            "assumed": [asdict(item) for item in self.assumed],
        }
        if self.plan is not None:
            whole = self.plan.to_json()
            data |= {"effective_batch": whole["effective_batch"], "changes": whole["changes"], **whole["after"]}
        return data


def _offer(offer: RentalOffer, usd_per_hour: float | None) -> dict[str, Any]:
    return {
        "provider": offer.provider,
        "product": offer.product,
        "usd_per_hour": usd_per_hour,
        "source": offer.source,
        "date": None if offer.date is None else offer.date.isoformat(),
    }


def compare_cards(config: Path, names: Sequence[str], request: Request, *, offers: Sequence[RentalOffer] = ()) -> tuple[Row, ...]:
    """A row per card, in the order given; a card that was named twice has one."""
    traces = TraceStore(default_store())
    subject = from_file(config, replace(request, gpu=names[0]))
    if subject.job.settings.use_cpu:
        raise ConfigError(f"{config}: {USE_CPU}: true, so no card is used", hint=f"drop {USE_CPU} to compare cards")
    rows = [_row(subject, name, request, traces, offers) for name in names]
    return tuple({row.card: row for row in rows}.values())


def _row(subject: Subject, name: str, request: Request, traces: TraceStore, offers: Sequence[RentalOffer]) -> Row:
    count = request.num_gpus or 1
    hardware = with_host(named(name, count=count), subject.named_host)
    card = hardware.gpus[0].name if hardware.gpus else "CPU"
    subject = replace(subject, hardware=hardware)
    offer = cheapest(offers, card, count)
    try:
        made = plan_subject(subject, request, estimator=traces)
    except NothingFits as error:
        why_not = str(error).partition(": ")[2]
        return Row(card=card, plan=None, cards=count, why_not=why_not, offer=offer, assumed=subject.assumed, notes=hardware.notes)
    run_s = _run_s(subject, made)
    return Row(card=card, plan=made, cards=count, run_s=run_s, offer=offer, assumed=subject.assumed, notes=made.facts.notes)


def _run_s(subject: Subject, made: Plan) -> float | None:
    """The whole run: max_steps, or the epochs over the samples; None where the config says neither."""
    settings, time = subject.job.settings, made.facts.after.time
    if settings.max_steps is not None:
        return settings.max_steps * time.step_s
    count = subject.job.data.samples
    if count is None:
        return None
    return settings.epochs * count / time.samples_per_s
