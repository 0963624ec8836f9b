"""`hfopt compare`: the same job planned for several cards from shared traces: which one to rent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hfopt.cli.json_output import answer_json
from hfopt.cli.options import Allow, ConfigFile, Headroom, HostName, Like, Model, ModelFrom, Samples, allowed
from hfopt.cli.output import people, tables
from hfopt.errors import ConfigError

if TYPE_CHECKING:
    from hfopt.hardware.prices import RentalOffer
    from hfopt.planner.comparison import Aim, Limits, Row
    from hfopt.schema import Assumption
    from hfopt.schema.outputs import CompareOutput

ALL = "all"
NEEDS_SAMPLES = "needs --samples"
_RIGHT = ("samples/s", "busy", "memory", "USD/h", "run", "cost", "kWh", "USD/1M samples", "kWh/1M samples")


def compare(
    config: ConfigFile,
    gpus: Annotated[
        str, typer.Option("--gpus", metavar="NAMES", help="Cards, separated by commas: t4,l4,4090; or `all` that have a price.")
    ],
    prices: Annotated[
        Path | None, typer.Option("--prices", metavar="FILE", help="Your prices instead of the public ones (YAML, JSON, TOML): t4: 0.35.")
    ] = None,
    provider: Annotated[
        str | None, typer.Option("--provider", metavar="NAMES", help="Only prices of these: hf, lambda, runpod, aws, gcp, nebius.")
    ] = None,
    budget: Annotated[float | None, typer.Option("--budget", metavar="USD", min=0.0, help="What the run may cost.")] = None,
    deadline: Annotated[str | None, typer.Option("--deadline", metavar="8h", help="How long the run may take: 90m, 8h, 2d.")] = None,
    sort: Annotated[str | None, typer.Option("--sort", help="speed, cost or energy; else speed, or cost with a deadline.")] = None,
    command: Annotated[
        str | None, typer.Option("--command", metavar="COMMAND", help="What the job on HF Jobs runs; else python train.py CONFIG.")
    ] = None,
    num_gpus: Annotated[int, typer.Option("--num-gpus", min=1, help="How many of each.")] = 1,
    host: HostName = None,
    model: Model = None,
    like: Like = None,
    model_from: ModelFrom = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len", min=1, help="Tokens per sample.")] = None,
    samples: Samples = None,
    headroom: Headroom = 0.06,
    allow: Allow = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout instead of the table.")] = False,
) -> None:
    """Plan the same job for several cards. Says which fits, how fast, what the run costs, and which one to rent.

    Prices are public ones of a stated day (hfopt/hardware/prices.toml), on demand, without tax, storage and traffic. A card is the
    winner as far as the predictions tell cards apart. With `--gpus all` only cards are shown that no other beats in speed and cost.

    \b
    Examples:
      hfopt compare train.yaml --gpus t4,l4,4090,a100-80gb --samples 50000
      hfopt compare train.yaml --gpus all --samples 50000 --deadline 8h        the cheapest that is done in time
      hfopt compare train.yaml --gpus all --samples 50000 --budget 20          the fastest for the money
      hfopt compare train.yaml --gpus all --provider hf                        on HF Jobs, with the command that starts it
      hfopt compare train.yaml --gpus l4,h100-sxm --prices prices.yaml --json
    """
    from hfopt.hardware.prices import of_providers, public_offers, read_offers, rentable
    from hfopt.planner import Request
    from hfopt.planner.comparison import Limits, compare_cards, ordered

    offers = of_providers(read_offers(prices) if prices is not None else public_offers(), (provider or "").split(","))
    everything = gpus.strip().lower() == ALL
    names = list(rentable(offers, num_gpus)) if everything else _named(gpus)
    limits = Limits(budget_usd=budget, deadline_s=_seconds(deadline))
    aim = _aim(sort, limits)
    request = Request(
        own_process=True,
        num_gpus=num_gpus,
        host=host,
        model=model,
        like=like,
        model_from=model_from,
        seq_len=seq_len,
        samples=samples,
        headroom=headroom,
        allow=allowed(allow),
        dry_run=False,
    )
    rows = ordered(compare_cards(config, names, request, offers=offers), aim)
    limits.check(rows)
    if as_json:
        answer_json("compare", _as_data(rows, limits, config, command))
    else:
        _show(rows, limits, front_only=everything)
        _show_job(rows, limits, config, command, offers)


def _named(gpus: str) -> list[str]:
    names = [name.strip() for name in gpus.split(",") if name.strip()]
    if not names:
        raise ConfigError("--gpus names no card", hint="for example --gpus t4,l4,4090")
    return names


def _seconds(deadline: str | None) -> float | None:
    from hfopt.units import parse_duration

    try:
        return None if deadline is None else parse_duration(deadline)
    except ValueError as error:
        raise ConfigError(f"--deadline {error}") from None


def _aim(sort: str | None, limits: Limits) -> Aim:
    if sort is None:
        return "cost" if limits.deadline_s is not None and limits.budget_usd is None else "speed"
    if sort not in ("speed", "cost", "energy"):
        raise ConfigError(f"--sort {sort} is not known", hint="one of: speed, cost, energy")
    return sort  # type: ignore[return-value]


def _as_data(rows: tuple[Row, ...], limits: Limits, config: Path, command: str | None) -> CompareOutput:
    from hfopt.planner.comparison import front, job_command, winners

    best = winners(rows, limits)
    undominated = {row.card for row in front(rows)}
    return [
        row.to_json(
            {
                "best_for": [winner.aim for winner in best if winner.row is row],
                "as_good_for": [winner.aim for winner in best if row in winner.equal],
                "on_pareto_front": row.card in undominated,
                "within_limits": limits.verdict(row),
                "job_commands": list(job_command(row, config, command)),
            }
        )
        for row in rows
    ]


def _show(rows: tuple[Row, ...], limits: Limits, *, front_only: bool) -> None:
    """The table and the winners are the answer, so they go to stdout; remarks go to stderr."""
    from rich.table import Table

    from hfopt.planner.comparison import front, winners
    from hfopt.report.text import assumed_lines

    console = people()
    for line in assumed_lines(_assumed(rows)):
        console.print(line)
    best = winners(rows, limits)
    undominated = front(rows)
    kept = (*undominated, *(row for winner in best for row in (winner.row,)))
    shown = tuple(row for row in rows if row in kept) if front_only and undominated else rows
    known = any(row.run_s is not None for row in rows)
    limited = limits.budget_usd is not None or limits.deadline_s is not None
    titles = ["card", "fits", "settings", "samples/s", "busy", "memory", "USD/h", "rented at", "run"]
    titles += ["cost", "kWh"] if known else ["USD/1M samples", "kWh/1M samples"]
    table = Table(box=None, pad_edge=False)
    for title in (*titles, "limits") if limited else titles:
        table.add_column(title, justify="right" if title in _RIGHT else "left", no_wrap=title != "settings")
    for row in shown:
        cells = _cells(row, known=known)
        table.add_row(*((*cells, limits.why_not(row) or ("kept" if row.plan else "")) if limited else cells))
    out = tables()
    out.print(table)
    for winner in best:
        out.print(winner.words, soft_wrap=True)
    if limited and not any(limits.verdict(row) != "no" for row in rows):
        out.print("no card keeps the limits", soft_wrap=True)
    _remarks(rows, len(rows) - len(shown), known=known)


def _assumed(rows: tuple[Row, ...]) -> tuple[Assumption, ...]:
    """What all rows rest on; hosts that differ are in the table."""
    from dataclasses import replace

    first = rows[0].assumed
    hosts = {one.value for row in rows for one in row.assumed if one.what == "host"}
    if len(hosts) == 1:
        return first
    return tuple(replace(one, value="as rented (vCPU in the table)", guessed=False) if one.what == "host" else one for one in first)


def _remarks(rows: tuple[Row, ...], hidden: int, *, known: bool) -> None:
    console = people()
    if hidden:
        console.print(f"{hidden} cards are not shown: each is slower and no cheaper than one that is, or does not fit (--json has all)")
    if not known:
        console.print("the time, cost and energy of the whole run need --samples N (or max_steps in the config)")
    days = sorted({row.offer.date for row in rows if row.offer is not None and row.offer.date is not None})
    if days:
        read = f"read on {days[0]}" if days[0] == days[-1] else f"read between {days[0]} and {days[-1]}"
        console.print(f"public prices, on demand, without tax, storage and traffic, {read} (hfopt gpus CARD names sources); --prices FILE")
    for note in dict.fromkeys(note for row in rows for note in row.notes):
        console.print(note, style="dim")


def _cells(row: Row, *, known: bool) -> tuple[str, ...]:
    from hfopt.units import format_bytes, format_percent, format_rate, format_seconds

    hour = "" if row.usd_per_hour is None else f"{row.usd_per_hour:.2f}"
    place = "no public price" if row.offer is None else row.offer.words + (f", {row.vcpus} vCPU" if row.vcpus is not None else "")
    if row.plan is None:
        return row.card, "no", row.why_not or "", "", "", "", hour, place, "", "", ""
    after = row.plan.facts.after
    rate = format_rate(after.time.samples_per_s, "").removesuffix(" /s")
    spread = "" if after.time.rate_error is None else f" ± {round(100 * after.time.rate_error)} %"
    cost, energy = (row.cost, row.kwh) if known else (row.usd_per_million, row.kwh_per_million)
    return (
        row.card,
        "yes",
        _settings(row),
        f"{rate}{spread}",
        format_percent(after.time.gpu_utilization),
        format_bytes(after.memory.device_bytes),
        hour,
        place,
        NEEDS_SAMPLES if row.run_s is None else format_seconds(row.run_s),
        "" if cost is None else f"{cost:.2f}",
        "" if energy is None else f"{energy:.2f}" if energy >= 0.095 else f"{energy:.2g}",
    )


def _settings(row: Row) -> str:
    assert row.plan is not None
    candidate = row.plan.candidate
    parts = [f"{candidate.per_device_batch} × {candidate.accumulation}", candidate.precision_words(row.plan.facts.weights_dtype)]
    if candidate.checkpointing.on:
        every = candidate.checkpointing.every_n_layers
        parts.append("checkpointing" if every == 1 else f"checkpointing/{every}")
    return " ".join(parts)


def _show_job(rows: tuple[Row, ...], limits: Limits, config: Path, command: str | None, offers: tuple[RentalOffer, ...]) -> None:
    """How the cheapest of these cards is started on HF Jobs, where they have one."""
    from dataclasses import replace

    from hfopt.hardware.prices import HF_JOBS, cheapest
    from hfopt.planner.comparison import job_command, ordered

    there = [offer for offer in offers if offer.key == HF_JOBS]
    able = [replace(row, offer=cheapest(there, row.card, row.cards)) for row in rows if row.plan is not None]
    able = [row for row in able if row.offer is not None and limits.verdict(row) != "no"]
    if not able:
        return
    row = ordered(able, "cost")[0]
    assert row.offer is not None
    spent = "" if row.cost is None else f", about {row.cost:.2f} USD"
    out = people()
    out.print(f"on HF Jobs the cheapest of these is {row.offer.product} ({row.card}): {row.usd_per_hour:.2f} USD/h{spent}")
    for line in job_command(row, config, command):
        out.print(f"  {line}", soft_wrap=True, markup=False)
    if row.run_s is None:
        out.print("  a job there ends after 30 minutes unless --timeout says otherwise", soft_wrap=True)
