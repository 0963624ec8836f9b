"""How long `hfopt plan` takes, how much of it is importing torch and transformers, and how it grows with the candidates.

usage: python benchmarks/plan_latency.py [--runs 3]

Wall time of the whole command in a fresh process, the best of a few runs, with the rehearsal on the virtual GPU and without, beside a
process doing nothing but the imports the trace needs. The CPU time of all its processes is beside it: on a machine with other work that is
the steadier figure. The growth is measured in this process: one effective batch with 100 divisors, kept at one of them and free. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hfopt.planner import Request, plan

ROOT = Path(__file__).parent.parent
COMMANDS = {
    "bert_base": (ROOT / "configs" / "bert_base_glue.yaml", "t4", "BertForSequenceClassification", 8.0),
    "llama_8b_lora": (ROOT / "configs" / "llama_3_1_8b_lora_24gb.yaml", "rtx 4090", "LlamaForCausalLM", 25.0),
}
FRESH = {**os.environ, "HFOPT_NO_CACHE": "1"}  # a first plan each time; second ones are in answer_time.py
HUNDRED_DIVISORS = 45360


def _seconds(command: list[str], runs: int) -> tuple[float, float]:
    """(wall, CPU of the command and its children), each the best of the runs."""
    walls, used = [], []
    for _ in range(runs):
        started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT, env=FRESH)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        walls.append(time.perf_counter() - started)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(walls), min(used)


def _growth() -> tuple[float, float]:
    """CPU seconds of a plan, traces included, where the batch is kept (1 divisor) and where it is free (100 of them)."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "train.yaml"
        text = (ROOT / "configs" / "bert_base_glue.yaml").read_text().replace("per_device_train_batch_size: 32", "")
        config.write_text(f"{text}\nper_device_train_batch_size: 1\ngradient_accumulation_steps: {HUNDRED_DIVISORS}\n")
        for kept in ({"per_device_train_batch_size"}, {"per_device_train_batch_size"}, set[str]()):  # the first warms up
            started = time.process_time()
            plan(config, Request(gpu="rtx 3070", dry_run=False, keep=frozenset(kept), allow=frozenset({"accumulation"})))
            seconds.append(time.process_time() - started)
    return seconds[1], seconds[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    result: dict[str, float] = {}
    for name, (config, gpu, model_class, limit_s) in COMMANDS.items():
        command = [sys.executable, "-m", "hfopt", "plan", str(config), "--gpu", gpu, "--quiet"]
        bare_s, bare_cpu_s = _seconds([*command, "--no-dry-run"], runs)
        took_s, cpu_s = _seconds(command, runs)
        imports = f"import torch, transformers, torch._dynamo, torch._subclasses.fake_tensor; from transformers import {model_class}"
        imports_s, imports_cpu_s = _seconds([sys.executable, "-c", imports], runs)
        print(
            f"{name:16} {bare_s:6.2f} s without the rehearsal, {took_s:.2f} s with it (limit {limit_s:g} s), "
            f"CPU {bare_cpu_s:.1f} and {cpu_s:.1f} s; "
            f"imports {imports_s:.2f} s, CPU {imports_cpu_s:.1f} s: {100 * imports_s / bare_s:.0f} % of the first",
            flush=True,
        )
        result |= {f"{name}_no_dry_run_s": round(bare_s, 2), f"{name}_s": round(took_s, 2), f"{name}_imports_s": round(imports_s, 2)}
    few_s, many_s = _growth()
    print(f"growth           {few_s:6.2f} s of CPU with 1 divisor, {many_s:.2f} s with 100: {many_s / few_s:.2f} times")
    print(json.dumps({**result, "growth_100x": round(many_s / few_s, 2)}))


if __name__ == "__main__":
    main()
