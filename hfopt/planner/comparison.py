"""One job, many cards: shared traces, so that each further card costs milliseconds, and which card to rent for speed, cost or energy.

Kernels and allocations depend on the card only through its compute capability; cards whose capabilities choose alike share a trace.

and which cards no other beats in both speed and cost (the Pareto front).

Two cards are told apart where their ratio is larger than what eight of ten such ratios were met within. Prices are known, so a cost is as
unsure as the speed; energy is speed and power, so the power rule's own error is added.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hfopt.errors import ConfigError, NothingFits
from hfopt.hardware.detect import named
from hfopt.hardware.prices import HF_JOBS, RentalOffer, cheapest
from hfopt.job.request import Request
from hfopt.job.subject import USE_CPU, Subject, from_file
from hfopt.memory.curve import replays_kept
from hfopt.memory.trace_store import TraceStore
from hfopt.planner.algorithm import plan_subject
from hfopt.planner.result import Plan, chosen_output
from hfopt.schema import Assumption
from hfopt.schema.outputs import CardPlanned, CardRank, CardTooSmall, OfferOutput, RunOnCard
from hfopt.speed.calibration import NamedHost, with_host
from hfopt.speed.device_speed import cards_error, efficiency, limits
from hfopt.store import default_store
from hfopt.units import format_energy, format_percent, format_rate, format_seconds


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
    def vcpus(self) -> int | None:
        """Of the machine that is rented."""
        return None if self.offer is None else self.offer.vcpus_of(self.cards)

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

    def to_json(self, rank: CardRank) -> CardPlanned | CardTooSmall:
        common: RunOnCard = {
            **rank,
            "card": self.card,
            "why_not": self.why_not,
            "run_s": self.run_s,
            "cost": self.cost,
            "kwh": self.kwh,
            "usd_per_million_samples": self.usd_per_million,
            "kwh_per_million_samples": self.kwh_per_million,
            "offer": None if self.offer is None else _offer(self.offer, self.usd_per_hour, self.vcpus),
            "assumed": self.assumed,
        }
        if self.plan is None:
            return {**common, "fits": False}
        facts = self.plan.facts
        return {**common, "effective_batch": facts.effective_batch, "changes": facts.changed_lines, **chosen_output(facts.after)}


def _offer(offer: RentalOffer, usd_per_hour: float | None, vcpus: int | None) -> OfferOutput:
    return {
        "provider": offer.provider,
        "product": offer.product,
        "usd_per_hour": usd_per_hour,
        "vcpus": vcpus,
        "source": offer.source,
        "date": None if offer.date is None else offer.date.isoformat(),
    }


def compare_cards(config: Path, names: Sequence[str], request: Request, *, offers: Sequence[RentalOffer] = ()) -> tuple[Row, ...]:
    """A row per card, in the order given; a card that was named twice has one."""
    traces = TraceStore(default_store())
    subject = from_file(config, replace(request, gpu=names[0]))
    if subject.job.settings.use_cpu:
        raise ConfigError(f"{config}: {USE_CPU}: true, so no card is used", hint=f"drop {USE_CPU} to compare cards")
    with replays_kept(subject.workload.key, subject.workload.name):
        rows = [_row(subject, name, request, traces, offers) for name in names]
    return tuple({row.card: row for row in rows}.values())


def _row(subject: Subject, name: str, request: Request, traces: TraceStore, offers: Sequence[RentalOffer]) -> Row:
    count = request.num_gpus or 1
    hardware = named(name, count=count)
    card = hardware.gpus[0].name if hardware.gpus else "CPU"
    offer = cheapest(offers, card, count)
    host = _host_of(subject, offer, count)
    subject = replace(subject, hardware=with_host(hardware, host), named_host=host)
    try:
        made = plan_subject(subject, replace(request, charts=False), estimator=traces)
    except NothingFits as error:
        why_not = str(error).partition(": ")[2]
        return Row(card=card, plan=None, cards=count, why_not=why_not, offer=offer, assumed=subject.assumed, notes=hardware.notes)
    run_s = _run_s(subject, made)
    return Row(card=card, plan=made, cards=count, run_s=run_s, offer=offer, assumed=subject.assumed, notes=made.facts.notes)


def _host_of(subject: Subject, offer: RentalOffer | None, count: int) -> NamedHost:
    """The host that is named; else the one of the machine that is rented, where its vCPUs are known; else as here."""
    vcpus = None if offer is None else offer.vcpus_of(count)
    return subject.named_host if subject.named_host.cores is not None or vcpus is None else replace(subject.named_host, cores=float(vcpus))


def _run_s(subject: Subject, made: Plan) -> float | None:
    """The whole run: max_steps, or the epochs over the samples; None where the config says neither."""
    settings, time = subject.job.settings, made.facts.after.time
    if settings.max_steps is not None:
        return settings.max_steps * time.step_s
    count = subject.job.data.samples
    if count is None:
        return None
    return settings.epochs * count / time.samples_per_s


Aim = Literal["speed", "cost", "energy"]
Verdict = Literal["yes", "close", "no"]
JOB_IMAGE = "huggingface/trl"
"""TRL's own image has torch, transformers and TRL (huggingface.co/docs/trl/jobs_training)."""
_TIMEOUT_MARGIN = 1.5  # of the longest likely run: loading, evaluation and saving are not in it
_MOST_NAMED = 5
_NEEDED = "the config does not say how long the run is"


@dataclass(frozen=True, kw_only=True, slots=True)
class Winner:
    """The best card for one aim, and those that may be as good for all the prediction can say."""

    aim: Aim
    row: Row
    equal: tuple[Row, ...]
    error: float

    @property
    def words(self) -> str:
        title = {"speed": "fastest", "cost": "cheapest", "energy": "least energy"}[self.aim]
        names = [row.card for row in self.equal[:_MOST_NAMED]]
        if len(self.equal) > len(names):
            names.append(f"{len(self.equal) - len(names)} more")
        listed = "" if not names else names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
        same = f"; {listed} cannot be told apart (8 of 10 such ratios are off by at most {format_percent(self.error)})" if names else ""
        return f"{title}: {self.row.card}, {_figure(self.row, self.aim)}{same}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the run may cost and how long it may take; None: no limit."""

    budget_usd: float | None = None
    deadline_s: float | None = None

    def verdict(self, row: Row) -> Verdict:
        """Whether the row keeps both: `close` where the range of the prediction reaches across a limit."""
        error = 0.0 if row.plan is None else row.plan.facts.after.time.rate_error or 0.0
        pairs = ((row.cost, self.budget_usd), (row.run_s, self.deadline_s))
        asked = [(value, limit) for value, limit in pairs if limit is not None]
        if row.plan is None or any(value is None for value, _ in asked):
            return "no"
        ranges = [(limits(value, error), limit) for value, limit in asked if value is not None]
        if all(high <= limit for (_, high), limit in ranges):
            return "yes"
        return "no" if any(low > limit for (low, _), limit in ranges) else "close"

    def why_not(self, row: Row) -> str | None:
        """'over the budget' where the row breaks a limit; None where it keeps them, as far as can be told."""
        if row.plan is None or self.verdict(row) == "yes":
            return None
        if self.budget_usd is not None and row.cost is None:
            return "no price"
        if self.verdict(row) == "close":
            return "too close to call"
        error = row.plan.facts.after.time.rate_error or 0.0
        late = self.deadline_s is not None and row.run_s is not None and limits(row.run_s, error)[0] > self.deadline_s
        return "too late" if late else "over the budget"

    def check(self, rows: Sequence[Row]) -> None:
        """A limit needs the length of the run, and a budget a price."""
        option = "--budget" if self.budget_usd is not None else "--deadline" if self.deadline_s is not None else None
        if option is not None and not any(row.run_s is not None for row in rows if row.plan is not None) and any(row.plan for row in rows):
            raise ConfigError(f"{option}: {_NEEDED}", hint="add --samples N, or max_steps in the config")


def winners(rows: Sequence[Row], kept: Limits) -> tuple[Winner, ...]:
    """For each aim that has figures: the best of the rows that may keep the limits; () where there is nothing to compare."""
    compared = [row for row in rows if row.plan is not None]
    able = [row for row in compared if kept.verdict(row) != "no"]
    aims: tuple[tuple[Aim, Callable[[Row], float | None], float], ...] = (
        ("speed", lambda row: 1 / row.samples_per_s if row.samples_per_s else None, 0.0),
        ("cost", lambda row: row.usd_per_million, 0.0),
        ("energy", lambda row: row.kwh_per_million, float(efficiency()["ranges"]["unseen_card"])),
    )
    found = []
    for aim, measure, besides in aims:
        ranked = sorted(((value, row) for row in able if (value := measure(row)) is not None), key=lambda item: item[0])
        if not ranked or len(compared) < 2:
            continue
        best, first = ranked[0]
        errors = {row.card: math.hypot(cards_error(first.card, row.card), besides) for _, row in ranked[1:]}
        equal = tuple(row for value, row in ranked[1:] if value <= best * (1 + errors[row.card]))
        found.append(
            Winner(
                aim=aim,
                row=first,
                equal=equal,
                error=max((errors[row.card] for row in equal or compared if row.card in errors), default=0.0),
            )
        )
    return tuple(found)


def ordered(rows: Sequence[Row], aim: Aim) -> tuple[Row, ...]:
    """The best first; those without the figure after them, those that do not fit last."""
    measures: dict[Aim, Callable[[Row], float | None]] = {
        "speed": lambda row: None if row.samples_per_s is None else -row.samples_per_s,
        "cost": lambda row: row.usd_per_million,
        "energy": lambda row: row.kwh_per_million,
    }

    def place(row: Row) -> tuple[bool, bool, float]:
        value = measures[aim](row)
        return row.plan is None, value is None, value or 0.0

    return tuple(sorted(rows, key=place))


def front(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The cards with a price of which no other is as fast and as cheap, and better in one of both."""
    able = [row for row in rows if row.samples_per_s is not None and row.usd_per_million is not None]
    return tuple(row for row in able if not any(_beats(other, row) for other in able))


def _beats(other: Row, row: Row) -> bool:
    speed, cost = (other.samples_per_s or 0, row.samples_per_s or 0), (other.usd_per_million or 0, row.usd_per_million or 0)
    return speed[0] >= speed[1] and cost[0] <= cost[1] and (speed[0] > speed[1] or cost[0] < cost[1])


def job_command(row: Row, config: Path, command: str | None = None) -> tuple[str, ...]:
    """The shell lines that start this row's run on HF Jobs; () where its offer is another provider's."""
    if row.offer is None or row.offer.key != HF_JOBS or row.plan is None:
        return ()
    flavor = row.offer.product
    planned = f"{config.stem}.{flavor}{config.suffix}"
    folder = shlex.quote(str(config.parent) if str(config.parent) != "." else ".")
    engine = row.plan.started_with(planned).facts.engine
    inside = command or (engine.commands[0] if engine is not None and engine.commands else f"python train.py {shlex.quote(planned)}")
    timeout = f" --timeout {_timeout_hours(row)}h" if row.run_s is not None else ""
    cards = f" --num-gpus {row.cards}" if row.cards > 1 else ""
    cards += f" --host {row.vcpus}cores" if row.vcpus is not None else ""
    return (
        f"hfopt plan {shlex.quote(str(config))} --gpu {shlex.quote(row.card)}{cards} -o {shlex.quote(str(config.parent / planned))}",
        f"hf jobs run --flavor {flavor}{timeout} --secrets HF_TOKEN -v {folder}:/work:rw {JOB_IMAGE} "
        f"bash -c {shlex.quote(f'cd /work && {inside}')}",
    )


def _timeout_hours(row: Row) -> int:
    assert row.plan is not None and row.run_s is not None
    longest_s = row.run_s * (1 + (row.plan.facts.after.time.rate_error or 0.0)) * _TIMEOUT_MARGIN
    return max(1, math.ceil(longest_s / 3600))


def _figure(row: Row, aim: Aim) -> str:
    if aim == "speed":
        return format_rate(row.samples_per_s or 0.0, "samples") + ("" if row.run_s is None else f", {format_seconds(row.run_s)}")
    if aim == "cost":
        place = "" if row.offer is None or not row.offer.words else f" ({row.offer.words})"
        spent = f"{row.usd_per_million or 0:.2f} USD a million samples" if row.cost is None else f"{row.cost:.2f} USD"
        return f"{spent}{place}"
    return f"{format_energy(row.kwh_per_million or 0.0)} a million samples" if row.kwh is None else format_energy(row.kwh)
