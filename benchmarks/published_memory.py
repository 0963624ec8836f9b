"""The memory estimate against what others published of whole runs: PEFT's MetaMathQA runs on an L40S, transformers' BERT on a V100.

usage: python benchmarks/published_memory.py [CSV]   (or memory_accuracy.py --published)

PEFT publishes the 99th percentile of the reserved memory after each step, not how long the padded batches of that step were: at most 768
tokens. The estimate at 768 is therefore a bound. To test more than the bound, the length is read off the first adapter row (where the
estimate meets the published figure) and the other rows are estimated at that one length; the row it was read off is not counted.
The V100 rows state everything but their transformers of 2022: they are estimated with the installed one and with the published context.
The last line is one JSON object.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from hfopt.memory.curve import MemoryCurve
from hfopt.memory.step_memory import estimate
from hfopt.model.from_config import from_spec
from hfopt.schema import DataSpec, Lora, ModelSpec, StepSettings
from hfopt.units import MIB

ROWS = Path(__file__).parent / "data" / "published_memory.csv"
LONGEST = 768  # tokens, PEFT's max_seq_length
STEP = 8  # tokens between the lengths that are tried
L40S = {"capability": (8, 9), "multiprocessors": 142}
V100 = {"capability": (7, 0), "multiprocessors": 80}
Row = dict[str, str]


@cache
def adapted(lora: str, length: int) -> MemoryCurve:
    match = re.match(r"LORA r=(\d+) targets=\[(.*?)\]", lora)
    adapter = Lora(r=int(match[1]), target_modules=tuple(re.findall(r"\w+", match[2]))) if match else None
    workload = from_spec(ModelSpec(name="meta-llama/Llama-3.2-3B", lora=adapter), DataSpec(max_length=length))
    settings: dict[str, Any] = {"precision": "fp32", "optim": "adamw_torch", **L40S}  # bfloat16 weights, no autocast
    return estimate(workload, StepSettings(**settings)).curve


def reserved_mib(row: Row, length: int) -> float:
    return adapted(row["lora"], length).peak(int(row["per_device_batch"])).reserved_bytes / MIB


def length_of(row: Row) -> int:
    """The length at which the estimate meets the row, by bisection."""
    low, high = STEP, LONGEST
    while high - low > STEP:
        middle = (low + high) // 2 // STEP * STEP
        if reserved_mib(row, middle) < float(row["value"]):
            low = middle
        else:
            high = middle
    return high


def bert_mib(row: Row, context_mib: float) -> float:
    model = ModelSpec(name="bert-large-uncased", task="sequence_classification", attn_implementation="eager", weights_dtype="float32")
    settings: dict[str, Any] = {
        "precision": row["precision"].split()[0],
        "accumulation": int(row["grad_accum"]),
        "optim": "adamw_torch",
        "attn_implementation": "eager",
        **V100,
    }
    curve = estimate(from_spec(model, DataSpec(max_length=int(row["seq_len"]))), StepSettings(**settings)).curve
    return curve.peak(int(row["per_device_batch"])).reserved_bytes / MIB + context_mib


def error_pct(row: Row, estimated_mib: float) -> float:
    return 100 * (estimated_mib / float(row["value"]) - 1)


def shown(row: Row, what: str, estimated_mib: float) -> float:
    title = row["lora"].partition(" trainable")[0] or f"{row['model']} {row['precision']} {row['per_device_batch']}x{row['grad_accum']}"
    error = error_pct(row, estimated_mib)
    figures = f"published {float(row['value']):7.0f}  estimated {estimated_mib:7.0f} MiB {error:+6.1f} %"
    print(f"{title:58} {row['torch_version'][:6]:6} {what:16} {figures}")
    return error


def summary(errors: dict[str, list[float]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for kind, values in errors.items():
        sizes = [abs(value) for value in values]
        result[kind] = {"n": len(values), "median_pct": round(median(sizes), 2), "max_pct": round(max(sizes), 2)}
    result["bound_held"] = sum(value >= 0 for value in errors["at_768"])
    return result


def main(path: Path = ROWS) -> None:
    with path.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    peft = [row for row in rows if row["metric_kind"] == "reserved_p99_after_step"]
    reference = next(row for row in peft if row["lora"].startswith("LORA"))
    length = length_of(reference)
    print(f"length read off {reference['lora'].partition(' trainable')[0]}: {length} tokens")
    context_mib = next(float(row["value"]) for row in rows if row["metric_kind"] == "nvml_context")
    errors: dict[str, list[float]] = {"at_768": [], "at_common_length": [], "v100_bert_large": []}
    for row in peft:
        errors["at_768"].append(shown(row, f"at {LONGEST}", reserved_mib(row, LONGEST)))
        if row["lora"] != reference["lora"]:
            errors["at_common_length"].append(shown(row, f"at {length}", reserved_mib(row, length)))
    for row in rows:
        if row["metric_kind"] == "nvml_used":
            errors["v100_bert_large"].append(shown(row, "with context", bert_mib(row, context_mib)))
    print(json.dumps(summary(errors)))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
