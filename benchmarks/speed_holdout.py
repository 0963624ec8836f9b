"""What the step-time model says about a source it has never seen: each source is left out in turn, the shares are fitted on the others.

usage: python benchmarks/speed_holdout.py [CSV] [--traces FILE] [--pull 1]

Here the efficiency table is one row for all architectures (most have one source only, which is left out), fitted from the same round
start for every fold: coordinate descent on the mean over sources of |log(predicted / measured)|, so that each source counts once, plus what
pulls each share back to its round figure. Without that pull (--pull 0) a handful of rows pushes shares that no other row sees to the edge.
The predictions of the source left out are pooled. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from published_rows import Case
from speed_accuracy import DATA, Kernels, Predicted, compare, predict, traced_cases

from hfopt.speed.device_speed import HostCost, Speed, speed_of

START = {"half": 0.65, "tf32": 0.65, "fp32": 0.85, "attention": 0.55, "memory": 0.85, "reduction": 0.65, "host": 1.0}
STEPS = (1.3, 1.12, 1.05)
PULL = 1.0  # on the sum of squared logs: 10 % off its round figure costs a share as much as 1 % of error on every row
ROWS_PER_SOURCE = 10  # that a fit looks at: evenly over the file


def with_shares(speed: Speed, shares: Mapping[str, float], bandwidth: float) -> Speed:
    """The card at other shares of its peaks."""
    kinds = {"fp16": "half", "bf16": "half", "tf32": "tf32", "fp32": "fp32"}
    host = speed.host
    slower = shares["host"]
    return replace(
        speed,
        matmul_flops={kind: peak * shares[kinds[kind]] for kind, peak in speed.peak_flops.items() if kind in kinds},
        attention_share=shares["attention"] / shares["half"],
        memory_bytes_per_s=bandwidth * shares["memory"],
        reduction_bytes_per_s=bandwidth * shares["reduction"],
        host=HostCost(
            forward_s=host.forward_s * slower,
            backward_s=host.backward_s * slower,
            optimizer_s=host.optimizer_s * slower,
            sync_s=host.sync_s * slower,
            step_s=host.step_s * slower,
        ),
    )


def predicted(case: Case, traced: Mapping[Any, Kernels], shares: Mapping[str, float]) -> Predicted:
    speed = speed_of(case.gpu)
    assert speed is not None and case.gpu.bandwidth_bytes_per_s is not None
    return predict(case, traced[case.key], with_shares(speed, shares, case.gpu.bandwidth_bytes_per_s))


def loss(sources: Mapping[str, Sequence[Case]], traced: Mapping[Any, Kernels], shares: Mapping[str, float], pull: float) -> float:
    """Mean over sources of the mean |log| of their rows, and the pull to the round shares."""
    means = []
    for cases in sources.values():
        some = cases[:: max(1, len(cases) // ROWS_PER_SOURCE)]
        errors = [abs(math.log(predicted(case, traced, shares).samples_per_s / case.samples_per_s)) for case in some]
        means.append(sum(errors) / len(errors))
    return sum(means) / len(means) + pull * sum(math.log(share / START[name]) ** 2 for name, share in shares.items())


def fitted(sources: Mapping[str, Sequence[Case]], traced: Mapping[Any, Kernels], pull: float) -> dict[str, float]:
    shares = dict(START)
    best = loss(sources, traced, shares, pull)
    for step in STEPS:
        moved = True
        while moved:
            moved = False
            for name in shares:
                for factor in (step, 1 / step):
                    tried = {**shares, name: shares[name] * factor}
                    if name != "host" and tried[name] > 1:
                        continue
                    if (score := loss(sources, traced, tried, pull)) < best - 1e-4:
                        shares, best, moved = tried, score, True
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", nargs="?", type=Path, default=DATA)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--pull", type=float, default=PULL)
    options = parser.parse_args()
    cases, traced, _ = traced_cases(options.csv, options.traces)
    sources: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        sources[case.row["source"]].append(case)
    pooled: list[Predicted] = []
    for left_out, own in sources.items():
        shares = fitted({name: rows for name, rows in sources.items() if name != left_out}, traced, options.pull)
        found = [predicted(case, traced, shares) for case in own]
        pooled += found
        print(f"{left_out[:45]:45} {json.dumps(compare(found, lambda one: one.samples_per_s))}", flush=True)
        print("    fitted on the others: " + ", ".join(f"{name} {value:.2f}" for name, value in shares.items()), flush=True)
    untouched = [predicted(case, traced, START) for case in cases]
    print(f"nothing fitted at all: {json.dumps(compare(untouched, lambda one: one.samples_per_s))}")
    print(json.dumps({"folds": len(sources), **compare(pooled, lambda one: one.samples_per_s)}))


if __name__ == "__main__":
    main()
