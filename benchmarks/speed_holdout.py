"""What the step-time model says about a source, or a card, it has never seen: each is left out in turn, the shares fitted on the others.

usage: python benchmarks/speed_holdout.py [--traces FILE] [--runs FILE] [--pull 1]

Rows are those of speed_accuracy.py and trainer_runs.py together. The shares start from the figures of efficiency.toml for every fold:
coordinate descent on the mean over sources of |log(predicted / measured)|, so that each source counts once, plus what pulls each share
back to its start. Without that pull (--pull 0) a handful of rows pushes shares that no other row sees to the edge. The power rule's
constants stay: they were fitted on matrix products alone (matmul_power.py). Ranges come from the same folds: the share of error that 80 %
of the other sources' left-out rows keep within (each source counts once) is the range a source's rows are compared with. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import speed_accuracy
import trainer_runs

from hfopt.speed.device_speed import Speed, speed_of

SHARES = ("half", "tf32", "fp32", "attention", "memory", "reduction", "host", "byte")
STEPS = (1.15, 1.05)
PULL = 1.0  # on the sum of squared logs: 10 % off its start costs a share as much as 1 % of error on every row
ROWS_PER_SOURCE = 10  # that a fit looks at: evenly over the file
HELD = 0.8  # of the left-out rows, that a range should hold
CLEARLY = speed_accuracy.CLEARLY
Shares = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A published rate with a way to predict it at other shares."""

    source: str
    card: str
    config: Any  # what tells it from others of its source, card, model and task
    group: Any  # source, card, model and task
    across: Any  # source, model, task and settings: the same job on other cards
    measured: float
    predict: Callable[[Shares], float]
    limited: bool  # the board's power holds the clock


def with_shares(speed: Speed, shares: Shares) -> Speed:
    """The card at other shares: factors on those of efficiency.toml."""
    kinds = {"fp16": "half", "bf16": "half", "tf32": "tf32", "fp32": "fp32"}
    board = speed.board and replace(speed.board, byte_joules=speed.board.byte_joules * shares["byte"])
    return replace(
        speed,
        matmul_flops={kind: rate * shares[kinds[kind]] for kind, rate in speed.matmul_flops.items()},
        flash_share=speed.flash_share * shares["attention"],
        efficient_share=speed.efficient_share * shares["attention"],
        memory_bytes_per_s=speed.memory_bytes_per_s * shares["memory"],
        reduction_bytes_per_s=speed.reduction_bytes_per_s * shares["reduction"],
        host=speed.host.scaled(shares["host"]),
        board=board,
    )


def published_points(kept: Path | None) -> Iterable[Point]:
    cases, traced, _ = speed_accuracy.traced_cases(speed_accuracy.DATA, kept)
    for case in cases:
        speed = speed_of(case.gpu, torch_version=case.torch)
        assert speed is not None, case.gpu.name

        def predict(shares: Shares, case: Any = case, speed: Speed = speed) -> float:
            return speed_accuracy.predict(case, traced[case.key], with_shares(speed, shares)).samples_per_s

        row = case.row
        yield Point(
            source=row["source"],
            card=case.gpu.name,
            config=case.config,
            group=(row["source"], row["gpu"], case.model, row["task"]),
            across=None,
            measured=case.samples_per_s,
            predict=predict,
            limited=speed_accuracy.predict(case, traced[case.key]).clock_share < 0.95,
        )


def run_points(kept: Path | None) -> Iterable[Point]:
    runs, _ = trainer_runs.read_runs(trainer_runs.DATA, "speed")
    traces = trainer_runs.Traces(kept)
    for run in runs:
        made, speed = traces.of(run), trainer_runs.speed_as_run(run)

        def predict(shares: Shares, run: Any = run, made: Any = made, speed: Speed = speed) -> float:
            return trainer_runs.predict(run, made, with_shares(speed, shares)).predicted

        row = run.row
        yield Point(
            source=row["source"],
            card=run.gpu.name,
            config=run.title,
            group=(row["source"], run.gpu.name, row["model"], row["task"]),
            across=(row["source"], row["model"], row["task"], row["precision"], row["optimizer"]),
            measured=run.measured,
            predict=predict,
            limited=(trainer_runs.predict(run, made).clock_share or 1.0) < 0.95,
        )


# ---------------------------------------------------------------------------------------------- fits


def fitted(points: Sequence[Point], pull: float) -> dict[str, float]:
    by_source: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        by_source[point.source].append(point)
    looked_at = [rows[:: max(1, len(rows) // ROWS_PER_SOURCE)] for rows in by_source.values()]

    def loss(shares: Shares) -> float:
        means = [statistics.fmean(abs(math.log(p.predict(shares) / p.measured)) for p in rows) for rows in looked_at]
        return statistics.fmean(means) + pull * sum(math.log(share) ** 2 for share in shares.values())

    shares = dict.fromkeys(SHARES, 1.0)
    best = loss(shares)
    for step in STEPS:
        moved = True
        while moved:
            moved = False
            for name in shares:
                for factor in (step, 1 / step):
                    tried = {**shares, name: shares[name] * factor}
                    if (score := loss(tried)) < best - 1e-4:
                        shares, best, moved = tried, score, True
    return shares


def left_out(points: Sequence[Point], by: Callable[[Point], str], pull: float) -> list[tuple[Point, float]]:
    """Every point with its rate as predicted by a fit that has not seen its fold."""
    found = []
    for fold in dict.fromkeys(by(point) for point in points):
        shares = fitted([point for point in points if by(point) != fold], pull)
        own = [(point, point.predict(shares)) for point in points if by(point) == fold]
        found += own
        moved = ", ".join(f"{name} × {value:.2f}" for name, value in shares.items() if abs(value - 1) > 1e-3) or "as they are"
        print(f"{fold[:44]:44} {len(own):4} rows, off {_pct(own):5.1f} % in the median; the others' shares: {moved}", flush=True)
    return found


# ---------------------------------------------------------------------------------------------- what comes of it


def _pct(pairs: Sequence[tuple[Point, float]]) -> float:
    return 100 * statistics.median(abs(rate / point.measured - 1) for point, rate in pairs)


def ratios(pairs: Sequence[tuple[Point, float]], group: Callable[[Point], Any], name: Callable[[Point], Any]) -> list[tuple[float, float]]:
    """(measured, predicted) ratios of two in a group with different names; what was published twice counts once."""
    groups: dict[Any, dict[Any, list[tuple[Point, float]]]] = defaultdict(lambda: defaultdict(list))
    for point, rate in pairs:
        if group(point) is not None:
            groups[group(point)][name(point)].append((point, rate))
    made = []
    for named in groups.values():
        means = [(statistics.fmean(point.measured for point, _ in same), same[0][1]) for same in named.values()]
        made += [(a[0] / b[0], a[1] / b[1]) for a, b in combinations(means, 2)]
    return made


def covered(pairs: Sequence[tuple[Point, float]]) -> tuple[dict[str, float], float]:
    """(by source, the share of its rows within the range that the other sources give; the range that all give)."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for point, rate in pairs:
        by_source[point.source].append(abs(math.log(rate / point.measured)))
    shares = {}
    for source, own in by_source.items():
        reach = _quantile({name: errors for name, errors in by_source.items() if name != source})
        shares[source] = sum(error <= reach for error in own) / len(own)
    return shares, math.expm1(_quantile(by_source))


def _quantile(by_source: Mapping[Any, Sequence[float]]) -> float:
    """The error that HELD of the rows stay within, each source counting once."""
    weighted = sorted((error, 1 / len(errors)) for errors in by_source.values() for error in errors)
    total, reached = HELD * len(by_source), 0.0
    for error, weight in weighted:
        reached += weight
        if reached >= total:
            return error
    return weighted[-1][0]


def summary(pairs: Sequence[tuple[Point, float]]) -> dict[str, Any]:
    settings = ratios(pairs, lambda point: point.group, lambda point: point.config)
    cards = ratios(pairs, lambda point: point.across, lambda point: point.card)
    clear = [(measured > 1) == (guessed > 1) for measured, guessed in settings if max(measured, 1 / measured) > CLEARLY]
    off = [abs(guessed / measured - 1) for measured, guessed in settings]
    limited, free = ([pair for pair in pairs if pair[0].limited is held] for held in (True, False))
    return {
        "rows": len(pairs),
        "absolute_median_pct": round(_pct(pairs), 2),
        "ratio_median_pct": round(100 * statistics.median(off), 2),
        "ratio_80_pct": round(100 * statistics.quantiles(off, n=10)[7], 2),
        "order_right_share": round(sum(clear) / len(clear), 4),
        "cards_ratio_80_pct": round(100 * statistics.quantiles([abs(b / a - 1) for a, b in cards], n=10)[7], 2),
        "power_limited_median_pct": round(_pct(limited), 2),
        "others_median_pct": round(_pct(free), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="traces of speed_accuracy.py, kept there")
    parser.add_argument("--runs", type=Path, help="traces of trainer_runs.py, kept there")
    parser.add_argument("--pull", type=float, default=PULL)
    options = parser.parse_args()
    points = [*published_points(options.traces), *run_points(options.runs)]
    as_they_are = [(point, point.predict(dict.fromkeys(SHARES, 1.0))) for point in points]
    print(f"nothing fitted: {json.dumps(summary(as_they_are))}")
    result: dict[str, Any] = {}
    for name, by in (("source", lambda point: point.source), ("card", lambda point: point.card)):
        pairs = left_out(points, by, options.pull)
        result[f"{name}_left_out"] = summary(pairs)
        runs = [abs(rate / point.measured - 1) for point, rate in pairs if point.across is not None]
        result[f"{name}_left_out"]["trainer_runs_median_pct"] = round(100 * statistics.median(runs), 2)
        result[f"{name}_left_out"]["trainer_runs_p90_pct"] = round(100 * statistics.quantiles(runs, n=10, method="inclusive")[-1], 2)
        shares, reach = covered(pairs)
        rows = sum(share * sum(point.source == source for point, _ in pairs) for source, share in shares.items())
        result[f"{name}_left_out"] |= {
            "range_80_pct": round(100 * reach, 1),
            "rows_in_range": round(rows / len(pairs), 3),
            "sources_mean_in_range": round(statistics.fmean(shares.values()), 3),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
