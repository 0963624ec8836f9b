"""How long an answer takes, beside `python -c "import torch, transformers"` in the same run: first plans, and second ones from kept traces.

usage: python benchmarks/answer_time.py [--runs 2] [--only bert]

Every question is a fresh process, the store a folder of its own that begins empty. Processor seconds of the process and its children are
the figure, since a machine with other work stretches the wall time; the best of the runs counts (a first plan runs once a round, in an
empty store). The aims are those of an idle machine with two cores, in wall seconds. The last line is one JSON object.
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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMPORT = [sys.executable, "-c", "import torch, transformers"]
BERT, LLAMA = ROOT / "configs" / "bert_base_glue.yaml", ROOT / "configs" / "llama_3_1_8b_lora_24gb.yaml"
TWELVE = "3070,3080,3090,4070,4080,4090,a10g,a100-40gb,a100-80gb,l4,l40s,h100-sxm"
FULL = """\
model_name_or_path: meta-llama/Llama-3.1-8B
torch_dtype: bfloat16
task: causal-lm
max_seq_length: 1024
output_dir: out
per_device_train_batch_size: 1
gradient_accumulation_steps: 16
bf16: true
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    name: str
    arguments: tuple[str, ...]
    most_s: float  # beyond the import where `imports`, else in all
    imports: bool = False
    exit_code: int = 0


def questions(full: Path) -> dict[str, tuple[Question, ...]]:
    """In the order in which they are asked: the first of each group fills the store."""
    bert, llama = ("plan", str(BERT), "-q"), ("plan", str(LLAMA), "-q")
    nothing = ("plan", str(full), "--gpu", "rtx 4090", "-q")
    return {
        "bert": (
            Question(name="first plan, rehearsed", arguments=(*bert, "--gpu", "rtx 3090"), most_s=1.0, imports=True),
            Question(name="second, another card", arguments=(*bert, "--gpu", "rtx 4090"), most_s=1.0),
            Question(
                name="the same, compared on 12 cards once", arguments=("compare", str(BERT), "--gpus", TWELVE), most_s=8.0, imports=True
            ),
            Question(name="compared again", arguments=("compare", str(BERT), "--gpus", TWELVE), most_s=2.0),
        ),
        "llama": (
            Question(name="first plan, rehearsed", arguments=(*llama, "--gpu", "rtx 4090"), most_s=8.0, imports=True),
            Question(name="second, another card", arguments=(*llama, "--gpu", "rtx 3090"), most_s=1.5),
            Question(name="second, another headroom", arguments=(*llama, "--gpu", "rtx 4090", "--headroom", "0.1"), most_s=1.5),
        ),
        "nothing": (
            Question(name="nothing fits, priced", arguments=nothing, most_s=3.0, exit_code=3),
            Question(name="nothing fits, again", arguments=nothing, most_s=3.0, exit_code=3),
        ),
    }


def seconds(command: list[str], env: dict[str, str], exit_code: int = 0) -> tuple[float, float]:
    """Wall and processor seconds of a process and its children."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT, env=env, check=False)
    after, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - started
    if ended.returncode != exit_code:
        raise SystemExit(f"{command} ended with {ended.returncode}: {ended.stderr.decode()}")
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--only", choices=("bert", "llama", "nothing"))
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory() as folder:
            full = Path(folder) / "full.yaml"
            full.write_text(FULL)
            env = {**os.environ, "XDG_CACHE_HOME": folder, "HFOPT_NO_CACHE": "0"}
            found.setdefault("import", []).append(seconds(IMPORT, env))
            for group, asked in questions(full).items():
                for one in asked if options.only in (None, group) else ():
                    command = [sys.executable, "-m", "hfopt", *one.arguments]
                    found.setdefault(f"{group}: {one.name}", []).append(seconds(command, env, one.exit_code))
    best = {name: (min(wall for wall, _ in runs), min(cpu for _, cpu in runs)) for name, runs in found.items()}
    import_cpu_s = best["import"][1]
    limits = {f"{group}: {one.name}": one for group, asked in questions(Path()).items() for one in asked}
    for name, (wall_s, cpu_s) in best.items():
        limit = limits.get(name)
        aim = "" if limit is None else f"   aim on an idle machine: {'import + ' if limit.imports else ''}{limit.most_s:g} s"
        print(f"{name:45} {wall_s:6.2f} s, CPU {cpu_s:6.2f} s = {cpu_s / import_cpu_s:5.2f} × import{aim}", flush=True)
    print(
        json.dumps(
            {
                name: {"wall_s": round(wall, 2), "cpu_s": round(cpu, 2), "ratio": round(cpu / import_cpu_s, 2)}
                for name, (wall, cpu) in best.items()
            }
        )
    )


if __name__ == "__main__":
    main()
