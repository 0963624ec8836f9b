"""What compiling gains, published against predicted: the ratio of times and of memory, eager over compiled.

usage: python benchmarks/compiled_pairs.py [--only TEXT] [--rule] [--log FILE]

Pairs of others on real cards stand in data/compiled_pairs.csv with their sources: how many times as fast the same step is compiled, and how
many times as much memory it takes eager. Predicted twice: from the step as Inductor compiles it on the virtual GPU, as `hfopt plan` does
(some 50 CPU seconds a pair, of the installed torch: pairs of 2022 were compiled by its forerunner), and by the rule that stands in where
nothing is compiled (several cards). --rule: that alone. With --log a second run goes on where the first was stopped. Nothing was fitted to
these pairs but to torchtune's and torchtitan's (`speed.step_time`). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from hfopt.config.read_job import load
from hfopt.config.settings import step_settings
from hfopt.errors import HfoptError
from hfopt.hardware.catalog import find
from hfopt.memory.step_memory import Estimate, estimate
from hfopt.model.from_config import from_job
from hfopt.probe.compiled_step import compiled_step
from hfopt.schema import Gpu, TrainJob, Workload
from hfopt.speed.device_speed import speed_of
from hfopt.speed.step_time import RankTraffic, StepTimer

DATA = Path(__file__).parent / "data" / "compiled_pairs.csv"
MEASURES = ("faster", "smaller")
HALF = "bf16 weights"  # without autocast
Row = Mapping[str, str]


def predict(row: Row, *, rule_only: bool) -> dict[str, Any]:
    """Both ratios by the compiled step, where it is compiled, and the time's by the rule."""
    with tempfile.TemporaryDirectory() as folder:
        job, gpu, world = _job(row, folder)
        capability = gpu.capability or (8, 0)
        settings = step_settings(job.settings, capability=capability, multiprocessors=gpu.sms)
        settings = replace(settings, attn_implementation=row["attention"] or None)
        workload = from_job(job)
        eager = estimate(workload, settings)
        ranks, batch = _ranks(workload, eager, world), int(row["batch"])
        eager_s = _step_s(eager, gpu, row, ranks)
        found: dict[str, Any] = {"rule": {"faster": eager_s / _step_s(eager, gpu, row, ranks, by_rule=True)}}
        if rule_only or world > 1:
            return found
        made = compiled_step(job, gpu, workload, replace(settings, torch_compile=True), eager)
        smaller = eager.curve.replay(batch).allocated_bytes / made.curve.replay(batch).allocated_bytes
        return found | {"compiled": {"faster": eager_s / _step_s(made, gpu, row, ranks), "smaller": smaller}}


def _job(row: Row, folder: str) -> tuple[TrainJob, Gpu, int]:
    """(the job, one card, how many)."""
    stated = re.fullmatch(r"(?:(\d+) x )?(.+)", row["card"])
    assert stated is not None
    name = row["model"]
    if "/" not in name:  # a configuration class with its defaults
        AutoConfig.for_model(name).save_pretrained(folder)
        name = folder
    half = row["precision"] == HALF
    keys = {"model_name_or_path": name, "torch_dtype": "bfloat16" if half else "float32", "max_seq_length": int(row["length"])}
    keys |= {"per_device_train_batch_size": int(row["batch"]), "optim": row["optimizer"], "torch_compile": True}
    keys |= {"attn_implementation": row["attention"]} if row["attention"] else {}
    keys |= {} if half else {row["precision"]: True}
    path = Path(folder) / "train.yaml"
    path.write_text(json.dumps(keys))
    job = load(path).job
    assert job is not None, "a pair is a job"
    task: Any = row["task"]
    return replace(job, model=replace(job.model, task=task)), find(stated[2]), int(stated[1] or 1)


def _ranks(workload: Workload, eager: Estimate, world: int) -> RankTraffic:
    """Sharded weights, gathered for forward and backward, and their gradients, in bfloat16."""
    share = (world - 1) / world
    return RankTraffic(world_size=world, micro_batch_bytes=3 * 2 * workload.parameters * share)


def _step_s(made: Estimate, gpu: Gpu, row: Row, ranks: RankTraffic, *, by_rule: bool = False) -> float:
    speed = speed_of(gpu)
    assert speed is not None
    precision: Any = "fp32" if row["precision"] == HALF else row["precision"]
    return StepTimer(made.ops, speed, precision, ranks=ranks, compiled=by_rule).at(int(row["batch"])).step_s


def rows(only: str) -> Iterator[tuple[str, Row]]:
    with DATA.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            name = row["model"].rpartition("/")[2]
            title = f"{name} {row['task']} {row['batch']} x {row['length']} {row['precision']} ({row['source'][:24]})"
            if only.lower() in title.lower():
                yield title, row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="pairs whose title contains this")
    parser.add_argument("--rule", action="store_true", help="nothing is compiled")
    parser.add_argument("--log", type=Path, help="predictions are kept here, one JSON object a line")
    options = parser.parse_args()
    known: dict[str, Any] = {}
    if options.log is not None and options.log.exists():
        known = dict(json.loads(line) for line in options.log.read_text().splitlines())
    errors: dict[str, list[float]] = {}
    for title, row in rows(options.only):
        key = f"{title} {options.rule}"
        if key not in known:
            try:
                known[key] = predict(row, rule_only=options.rule)
            except HfoptError as error:
                known[key] = {"failed": str(error)}
            if options.log is not None:
                with options.log.open("a") as log:
                    log.write(json.dumps([key, known[key]]) + "\n")
        print(f"{title:96}{_words(row, known[key], errors)}", flush=True)
    print(json.dumps({name: {"n": len(off), "median_pct": 100 * statistics.median(map(abs, off))} for name, off in errors.items()}))


def _words(row: Row, found: Mapping[str, Any], errors: dict[str, list[float]]) -> str:
    """The pair's figures, its errors added to those before."""
    if "failed" in found:
        return f"  failed: {found['failed']}"
    parts = []
    for measure in (one for one in MEASURES if row[one]):
        measured = float(row[measure])
        parts.append(f"  {measure} × {measured:.2f}:")
        for way, ratios in found.items():
            if measure in ratios:
                error = ratios[measure] / measured - 1
                errors.setdefault(f"{measure}, {way}", []).append(error)
                parts.append(f" {way} × {ratios[measure]:.2f} ({error:+.1%})")
    return "".join(parts)


if __name__ == "__main__":
    main()
