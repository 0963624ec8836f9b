"""The power rule against large matrix products that others measured on many cards; its constants are fitted here and on nothing else.

usage: python benchmarks/matmul_power.py [CSV] [--fit] [--rows]

CSV is shaped like benchmarks/data/published_matmul.csv: square products of up to 10240, timed for seconds, so that the clock is the one
the board sustains. Predicted is peak × what cuBLAS reaches × that clock. Beside it in the same run: the data sheet's peak. With --fit
every card is left out in turn, the constants are fitted on the others from the same start, and the card left out is predicted. The fit
minimises the mean over cards of |log(predicted / measured)| and is pulled to the start (10 % off costs as much as 0.03 % of error on
every card). The last line is one JSON object. Nothing here was measured by us.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfopt.hardware import catalog
from hfopt.schema import Gpu
from hfopt.speed.device_speed import architecture, board_of, efficiency, sustained_clock

DATA = Path(__file__).parent / "data" / "published_matmul.csv"
REACHED = 0.94  # of the peak at its clock, by products that size on tensor cores; in float32 the shares of efficiency.toml
STEPS, PULL = (0.2, 0.1, 0.05, 0.02), 0.003
PLAIN = ("static_share", "doubling_width", "voltage_knee", "voltage_slope", "geforce_headroom")
Constants = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Row:
    gpu: Gpu
    precision: str
    flops_per_s: float  # measured


def read_rows(path: Path) -> list[Row]:
    found = []
    with path.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            gpu = catalog.find(row["card"])
            if row["precision"] in gpu.peak_flops:
                found.append(Row(gpu=gpu, precision=row["precision"], flops_per_s=float(row["tflops"]) * 1e12))
    return found


def flat(power: Mapping[str, Any]) -> dict[str, float]:
    """The constants of [power] that matrix products can tell."""
    return {**{name: power[name] for name in PLAIN}, **{name: one["nj_per_sm_clock"] for name, one in power["processes"].items()}}


def filled(constants: Constants) -> dict[str, Any]:
    power = efficiency()["power"]
    processes = {name: {**one, "nj_per_sm_clock": constants[name]} for name, one in power["processes"].items()}
    return {**power, **{name: constants[name] for name in PLAIN}, "processes": processes}


def predicted(row: Row, power: Mapping[str, Any]) -> float:
    board = board_of(row.gpu, power)
    assert board is not None, row.gpu.name
    width = board.width_weight(row.gpu.peak_flops[row.precision], row.precision)
    clock = sustained_clock(board, lambda s: board.static_w + board.joules(plain_s=1, weighted_s=width, moved_bytes=0, clock=s))
    share = architecture(row.gpu.capability)[1]["matmul"]["fp32"] if row.precision == "fp32" else REACHED
    return row.gpu.peak_flops[row.precision] * share * clock


def errors(rows: Sequence[Row], power: Mapping[str, Any]) -> dict[str, list[float]]:
    """By card, log(predicted / measured)."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        found[row.gpu.name].append(math.log(predicted(row, power) / row.flops_per_s))
    return found


def fitted(rows: Sequence[Row], start: Constants) -> dict[str, float]:
    def loss(constants: Constants) -> float:
        cards = errors(rows, filled(constants)).values()
        off = statistics.fmean(statistics.fmean(abs(e) for e in card) for card in cards)
        return off + PULL * sum(math.log(value / start[name]) ** 2 for name, value in constants.items())

    constants = dict(start)
    best = loss(constants)
    for step in STEPS:
        moved = True
        while moved:
            moved = False
            for name in constants:
                for factor in (1 + step, 1 / (1 + step)):
                    tried = {**constants, name: constants[name] * factor}
                    if (score := loss(tried)) < best - 1e-5:
                        constants, best, moved = tried, score, True
    return constants


def spread(logs: Sequence[float]) -> dict[str, float]:
    sizes = [abs(math.expm1(error)) for error in logs]
    return {
        "median_pct": round(100 * statistics.median(sizes), 2),
        "p80_pct": round(100 * statistics.quantiles(sizes, n=10, method="inclusive")[7], 2),
        "p90_pct": round(100 * statistics.quantiles(sizes, n=10, method="inclusive")[8], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", nargs="?", type=Path, default=DATA)
    parser.add_argument("--fit", action="store_true", help="fit the constants, and predict each card from the others")
    parser.add_argument("--rows", action="store_true", help="print every row")
    options = parser.parse_args()
    rows, start = read_rows(options.csv), flat(efficiency()["power"])
    if options.rows:
        for row in rows:
            peak = row.gpu.peak_flops[row.precision]
            shares = f"measured {row.flops_per_s / peak:.2f} of the peak, predicted {predicted(row, filled(start)) / peak:.2f}"
            print(f"{row.gpu.name:36} {row.gpu.power_limit_w:5.0f} W {row.precision:5} {shares}")
    found = [error for card in errors(rows, filled(start)).values() for error in card]
    sheet = [math.log(row.gpu.peak_flops[row.precision] / row.flops_per_s) for row in rows]
    result: dict[str, Any] = {"rows": len(rows), "cards": len({row.gpu.name for row in rows}), "constants": len(start), **spread(found)}
    result["data_sheet"] = spread(sheet)
    if options.fit:
        print("fitted on all: " + ", ".join(f"{name} {value:.3f}" for name, value in fitted(rows, start).items()))
        left_out = []
        for card in dict.fromkeys(row.gpu.name for row in rows):
            constants = fitted([row for row in rows if row.gpu.name != card], start)
            left_out += errors([row for row in rows if row.gpu.name == card], filled(constants))[card]
        result["card_left_out"] = spread(left_out)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
