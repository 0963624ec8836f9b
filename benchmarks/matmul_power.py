"""The power rule against large matrix products that others measured on many cards; its constants are fitted here and on nothing else.

usage: python benchmarks/matmul_power.py [CSV] [--fit] [--rows] [--sizes]

CSV is shaped like benchmarks/data/published_matmul.csv: square products of up to 10240, timed for seconds, so that the clock is the one
the board sustains. Predicted is peak × what cuBLAS reaches × that clock. Beside it in the same run: the data sheet's peak. With --fit
every card is left out in turn, the constants are fitted on the others from the same start, and the card left out is predicted. The fit
minimises the mean over cards of |log(predicted / measured)| and is pulled to the start (10 % off costs as much as 0.03 % of error on
every card). With --sizes the time that a tile takes besides multiplying is judged: how much slower products of 2048 and 4096 are than
those of 8192 (data/published_matmul_sizes.csv), on tensor cores. The last line is one JSON object. Nothing here was measured by us.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hfopt.hardware import catalog
from hfopt.schema import Gpu, OpCost
from hfopt.speed.device_speed import architecture, board_of, efficiency, speed_of, sustained_clock
from hfopt.speed.step_time import StepTimer

DATA = Path(__file__).parent / "data" / "published_matmul.csv"
STEPS, PULL = (0.2, 0.1, 0.05, 0.02), 0.003
PLAIN = ("static_share", "doubling_width", "voltage_knee", "voltage_slope", "geforce_headroom")
SIZES_DATA = DATA.with_name("published_matmul_sizes.csv")
SIZES, LARGEST = (2048, 4096), 8192
TILE_CLOCKS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8)
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
    share = architecture(row.gpu.capability)[1]["matmul"]["fp32"] if row.precision == "fp32" else power["reached"]
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


def product_rate(gpu: Gpu, precision: str, size: int, tile_clocks: float) -> float:
    """Operations per second of square products of this size, one after the other, at the clock that they leave."""
    speed = speed_of(gpu)
    assert speed is not None and speed.board is not None, gpu.name
    dtype = {"fp16": "float16", "bf16": "bfloat16"}.get(precision, "float32")
    product = OpCost(
        name="mm",
        kind="matmul",
        dtype=dtype,
        phase="forward",
        count=1e5,
        flops_constant=2.0 * size**3,
        flops_slope=0.0,
        bytes_constant=3.0 * size**2 * (2 if dtype != "float32" else 4),
        bytes_slope=0.0,
        shape=((size, 0), (size, 0), (size, 0), (1, 0)),
    )
    speed = replace(speed, tile_element_s=tile_clocks / speed.board.clock_hz)
    timer = StepTimer([product], speed, "tf32" if precision == "tf32" else "fp32")
    return float(2.0 * size**3 / timer.each_kernel_s(1)[0])


def judged_by_size(path: Path) -> dict[str, float]:
    """By clocks of an SM for each element of a tile: how far the slowdown of small products is off, the median over all."""
    off: dict[float, list[float]] = {clocks: [] for clocks in TILE_CLOCKS}
    with path.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            gpu, precision = catalog.find(row["card"]), row["precision"]
            if precision == "fp32" or precision not in gpu.peak_flops:
                continue
            for clocks, found in off.items():
                largest = product_rate(gpu, precision, LARGEST, clocks) / float(row[f"tflops_{LARGEST}"])
                found += [math.log(product_rate(gpu, precision, size, clocks) / float(row[f"tflops_{size}"]) / largest) for size in SIZES]
    return {str(clocks): round(100 * statistics.median(abs(math.expm1(error)) for error in found), 2) for clocks, found in off.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", nargs="?", type=Path, default=DATA)
    parser.add_argument("--fit", action="store_true", help="fit the constants, and predict each card from the others")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--sizes", action="store_true", help="how far small products are off, by what a tile takes besides multiplying")
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
    if options.sizes:
        result["sizes_median_pct"] = judged_by_size(SIZES_DATA)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
