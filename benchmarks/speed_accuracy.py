"""Predicted against published training speed: ratios between settings, their order, and the absolute rate.

usage: python benchmarks/speed_accuracy.py [CSV] [--rows] [--traces FILE]

CSV is shaped like benchmarks/data/published_speed.csv (the default). Pairs are two different configurations of the same source, card,
model and task; the peer in the same run is a plain roofline: the data sheet's peaks and bandwidth, no efficiency, no launch cost, no tiles.
The last line is one JSON object. Every figure rests on published measurements of real cards; nothing here was measured by us.
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from published_rows import Case, read_cases

from hfopt.errors import HfoptError
from hfopt.memory.step_memory import estimate
from hfopt.schema import BatchShape, Gpu, OpCost, Precision, Workload
from hfopt.speed.device_speed import Speed, speed_of
from hfopt.speed.step_time import RankTraffic, StepTimer

DATA = Path(__file__).parent / "data" / "published_speed.csv"
CLEARLY = 1.10  # pairs further apart than this must be in the right order


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """A step's kernels at full depth, and the sizes communication needs."""

    ops: tuple[OpCost, ...]
    parameter_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, kw_only=True)
class Predicted:
    case: Case
    samples_per_s: float
    roofline_samples_per_s: float
    clock_share: float = 1.0  # of the nominal clock


# ---------------------------------------------------------------------------------------------- kernels of a case


def kernels(case: Case) -> Kernels:
    """Two shallow traces, drawn out to the model's depth."""
    period = max(1, case.settings.checkpointing.every_n_layers)
    shallow, deeper = period, 2 * period
    low, high = _traced(case, shallow), _traced(case, deeper)
    reach = (case.layers - shallow) / (deeper - shallow)
    sizes = [round(a + reach * (b - a)) for a, b in zip(_sizes(case, shallow), _sizes(case, deeper), strict=True)]
    tensors, parameter_bytes, gradient_bytes = sizes
    return Kernels(ops=tuple(_drawn_out(low, high, reach, case, tensors)), parameter_bytes=parameter_bytes, gradient_bytes=gradient_bytes)


def _traced(case: Case, depth: int) -> tuple[OpCost, ...]:
    workload = Workload(
        name=case.model,
        model_class=case.model,
        task="custom",
        build_model=lambda: case.build(depth),
        make_batch=case.make_batch,
        shape=BatchShape(kind="text", length=case.length),
        parameters=0,
        trainable_parameters=0,
    )
    return estimate(workload, replace(case.settings, accumulation=1)).ops


def _sizes(case: Case, depth: int) -> tuple[int, int, int]:
    import torch

    with torch.device("meta"):
        parameters = list(case.build(depth).parameters())
    trained = [p for p in parameters if p.requires_grad]
    return len(trained), sum(p.numel() * p.element_size() for p in parameters), sum(p.numel() * p.element_size() for p in trained)


def _drawn_out(low: Sequence[OpCost], high: Sequence[OpCost], reach: float, case: Case, tensors: int) -> Iterator[OpCost]:
    def totals(ops: Sequence[OpCost]) -> dict[Any, list[float]]:
        found: dict[Any, list[float]] = {}
        for op in ops:
            key = (op.name, op.kind, op.dtype, op.phase) if op.phase == "optimizer" else replace(op, count=0)
            total = found.setdefault(key, [0.0] * 5)
            values = (1.0, op.flops_constant, op.flops_slope, op.bytes_constant, op.bytes_slope)
            for index, value in enumerate(values):
                total[index] += value * op.count
        return found

    a, b = totals(low), totals(high)
    for key in dict.fromkeys([*a, *b]):
        zero = [0.0] * 5
        count, *amounts = (x + reach * (y - x) for x, y in zip(a.get(key, zero), b.get(key, zero), strict=True))
        if count <= 0:
            continue
        if isinstance(key, OpCost):
            yield replace(key, count=count)
            continue
        kernels = max(count, tensors) if case.looped_optimizer and key[1] == "optimizer" else count
        each = [amount / kernels for amount in amounts]
        yield OpCost(
            name=key[0],
            kind=key[1],
            dtype=key[2],
            phase=key[3],
            count=kernels,
            flops_constant=each[0],
            flops_slope=each[1],
            bytes_constant=each[2],
            bytes_slope=each[3],
        )


def traced_cases(path: Path, kept: Path | None) -> tuple[list[Case], dict[Any, Kernels], list[tuple[dict[str, str], str]]]:
    """The cases of a file with the kernels of each, and the rows left out with the reason. `kept` holds traces between runs."""
    cases, skipped = read_cases(path)
    found = pickle.loads(kept.read_bytes()) if kept is not None and kept.exists() else {}
    traced = {key: Kernels(**values) for key, values in found.items()}
    good = []
    for case in cases:
        try:
            if case.key not in traced:
                traced[case.key] = kernels(case)
                if kept is not None:
                    kept.with_suffix(".new").write_bytes(pickle.dumps({key: vars(values) for key, values in traced.items()}))
                    kept.with_suffix(".new").replace(kept)
        except HfoptError as error:
            skipped.append((case.row, str(error)))
            continue
        good.append(case)
    return good, traced, skipped


# ---------------------------------------------------------------------------------------------- predictions


def predict(case: Case, made: Kernels, speed: Speed | None = None) -> Predicted:
    speed = speed or speed_of(case.gpu, torch_version=case.torch)
    assert speed is not None, case.gpu.name
    if case.world_size > 8:
        speed = replace(speed, link_bytes_per_s=case.node_link_bytes_per_s)
    ranks = _ranks(case, made)
    ops = [_share(op, case.world_size) if case.sharded and op.phase == "optimizer" else op for op in made.ops]
    timer = StepTimer(ops, speed, case.settings.precision, ranks=ranks, compiled=case.compiled)
    found = timer.at(case.batch, case.accumulation)
    return Predicted(
        case=case,
        samples_per_s=found.samples_per_s,
        roofline_samples_per_s=_roofline(case, ops),
        clock_share=found.clock_share or 1.0,
    )


def _ranks(case: Case, made: Kernels) -> RankTraffic:
    """Sharded: gathered for forward and backward, reduced, in every micro-batch. Else the gradients once, there and back."""
    share = (case.world_size - 1) / case.world_size
    if case.sharded:
        return RankTraffic(world_size=case.world_size, micro_batch_bytes=(2 * made.parameter_bytes + made.gradient_bytes) * share)
    return RankTraffic(world_size=case.world_size, step_bytes=2 * made.gradient_bytes * share)


def _share(op: OpCost, world_size: int) -> OpCost:
    """Each of the sharded ranks updates its part."""
    return replace(
        op,
        flops_constant=op.flops_constant / world_size,
        flops_slope=op.flops_slope / world_size,
        bytes_constant=op.bytes_constant / world_size,
        bytes_slope=op.bytes_slope / world_size,
    )


def _roofline(case: Case, ops: Sequence[OpCost]) -> float:
    step_s = roofline_step_s(ops, case.gpu, case.settings.precision, batch=case.batch, accumulation=case.accumulation)
    return case.batch * case.accumulation * case.world_size / step_s


def roofline_step_s(ops: Sequence[OpCost], gpu: Gpu, precision: Precision, *, batch: int, accumulation: int) -> float:
    """The data sheet alone: each kernel at the card's peak or its bandwidth, whichever is slower."""
    bandwidth = gpu.bandwidth_bytes_per_s
    assert bandwidth is not None
    step_s = 0.0
    for op in ops:
        kind = {"float16": "fp16", "bfloat16": "bf16"}.get(op.dtype, "tf32" if precision == "tf32" else "fp32")
        peak = gpu.peak_flops.get(kind) or gpu.peak_flops["fp32"]
        flops = op.flops_constant + op.flops_slope * batch if op.kind in ("matmul", "conv", "attention") else 0.0
        moved = op.bytes_constant + op.bytes_slope * batch
        step_s += op.count * max(flops / peak, moved / bandwidth) * (1 if op.phase == "optimizer" else accumulation)
    return step_s


# ---------------------------------------------------------------------------------------------- the comparison


def pairs(found: Sequence[Predicted]) -> list[tuple[Predicted, Predicted]]:
    """Different configurations of the same source, card, model and task; a configuration published twice counts once."""
    groups: dict[Any, dict[Any, list[Predicted]]] = defaultdict(lambda: defaultdict(list))
    for one in found:
        row = one.case.row
        groups[row["source"], row["gpu"], one.case.model, row["task"]][one.case.config].append(one)
    made = []
    for configs in groups.values():
        made.extend(combinations([_averaged(same) for same in configs.values()], 2))
    return made


def _averaged(same: Sequence[Predicted]) -> Predicted:
    mean = statistics.fmean(one.case.samples_per_s for one in same)
    return replace(same[0], case=replace(same[0].case, samples_per_s=mean))


def compare(found: Sequence[Predicted], rate: Callable[[Predicted], float]) -> dict[str, float | None]:
    """None where there is no pair or no row."""
    made = pairs(found)
    errors, right = [], []
    for a, b in made:
        measured, guessed = a.case.samples_per_s / b.case.samples_per_s, rate(a) / rate(b)
        errors.append(abs(guessed / measured - 1))
        if max(measured, 1 / measured) > CLEARLY:
            right.append((measured > 1) == (guessed > 1))
    absolute = [abs(rate(one) / one.case.samples_per_s - 1) for one in found]
    return {
        "pairs": len(made),
        "ratio_median_pct": round(100 * statistics.median(errors), 2) if errors else None,
        "order_right_share": round(sum(right) / len(right), 4) if right else None,
        "absolute_median_pct": round(100 * statistics.median(absolute), 2) if absolute else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", nargs="?", type=Path, default=DATA)
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--traces", type=Path, help="keep the traces there, and read those that are there")
    options = parser.parse_args()
    started = time.perf_counter()
    cases, traced, skipped = traced_cases(options.csv, options.traces)
    found = [predict(case, traced[case.key]) for case in cases]
    _print(found, skipped, rows=options.rows)
    ours, plain = compare(found, lambda one: one.samples_per_s), compare(found, lambda one: one.roofline_samples_per_s)
    print(f"a plain roofline in the same run: {json.dumps(plain)}")
    print(f"{len(found)} rows, {len(traced)} pairs of traces, {time.perf_counter() - started:.0f} s")
    print(json.dumps({**ours, "rows": len(found), "skipped": len(skipped)}))


def _print(found: Sequence[Predicted], skipped: Sequence[tuple[dict[str, str], str]], *, rows: bool) -> None:
    by_source: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one in found:
        by_source[one.case.row["source"][:40], one.case.gpu.name].append(one.samples_per_s / one.case.samples_per_s)
        if rows:
            c = one.case
            print(
                f"{c.model:20} {c.gpu.name:22} x{c.world_size:<3} {c.length:6} {c.batch:4} x {c.accumulation:<3} {c.settings.precision:5}"
                f" ckpt {c.settings.checkpointing.every_n_layers}  measured {c.samples_per_s:9.2f}  predicted {one.samples_per_s:9.2f}"
            )
    for (source, gpu), ratios in by_source.items():
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{source:40} {gpu:22} {len(ratios):4} rows, predicted over measured {statistics.median(ratios):.2f} ({spread})")
    reasons: dict[str, int] = defaultdict(int)
    for _, why in skipped:
        reasons[why] += 1
    for why, count in sorted(reasons.items(), key=lambda item: -item[1]):
        print(f"left out, {count}: {why}")


if __name__ == "__main__":
    main()
