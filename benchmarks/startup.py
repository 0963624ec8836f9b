"""How long the command line takes to answer, next to the least it could take: `python -c "import typer, rich"` in the same run.

    python benchmarks/startup.py [--rounds 15]

The commands take turns, so that a busy machine slows all of them alike. Wall-clock and processor time are medians over the
rounds, ratios are of medians. `hfopt check` reads a config of 200 lines; what it takes beyond the others is
PyYAML and reading the installed TrainingArguments.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BARE = "import typer, rich"
LIMITS = {"hfopt --help": 1.5, "hfopt gpus": 3.0, "hfopt check": 5.0}


def config_of_200_lines() -> str:
    """A plausible config: the arguments, and a long comment block as people keep in theirs."""
    arguments = [
        "model_name_or_path: gpt2",
        "max_seq_length: 512",
        "output_dir: out",
        "per_device_train_batch_size: 8",
        "gradient_accumulation_steps: 4",
        "learning_rate: 0.00005",
        "num_train_epochs: 3",
        "weight_decay: 0.01",
        "warmup_steps: 100",
        "logging_steps: 10",
        "save_steps: 500",
        "bf16: true",
        "seed: 42",
    ]
    notes = [f"# run {number}: loss {3.0 - number / 100:.2f} after {number * 100} steps" for number in range(200 - len(arguments))]
    return "\n".join(arguments + notes) + "\n"


def commands(config: Path) -> dict[str, list[str]]:
    hfopt = [sys.executable, "-c", "from hfopt.cli import main; main()"]  # as the console script does
    return {
        "bare": [sys.executable, "-c", BARE],
        "hfopt --help": [*hfopt, "--help"],
        "hfopt gpus": [*hfopt, "gpus"],
        "hfopt check": [*hfopt, "check", str(config)],
    }


def measure(command: list[str]) -> tuple[float, float]:
    """Wall-clock and processor seconds of one run."""
    before, started = os.times(), time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    wall_s, after = time.perf_counter() - started, os.times()
    return wall_s, after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(config_of_200_lines())
        todo = commands(config)
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in todo}
        for round_number in range(rounds + 1):
            for name, command in todo.items():
                run = measure(command)
                if round_number:  # the first warms the disk cache
                    runs[name].append(run)
    wall_s = {name: statistics.median(wall for wall, _ in values) for name, values in runs.items()}
    cpu_s = {name: statistics.median(cpu for _, cpu in values) for name, values in runs.items()}
    print(f'{rounds} rounds; bare is python -c "{BARE}"')
    print(f"{'':<14}{'wall':>10}{'ratio':>8}{'cpu':>12}{'ratio':>8}{'limit':>8}")
    for name in todo:
        limit = f"{LIMITS[name]:g}x" if name in LIMITS else ""
        wall, cpu = wall_s[name], cpu_s[name]
        print(f"{name:<14}{1e3 * wall:>7.0f} ms{wall / wall_s['bare']:>7.2f}x{1e3 * cpu:>9.0f} ms{cpu / cpu_s['bare']:>7.2f}x{limit:>8}")
    ratios = {name: round(wall_s[name] / wall_s["bare"], 3) for name in LIMITS}
    cpu_ratios = {name: round(cpu_s[name] / cpu_s["bare"], 3) for name in LIMITS}
    within = all(ratios[name] <= limit for name, limit in LIMITS.items())
    result = {"bare_s": round(wall_s["bare"], 4), "ratios": ratios, "cpu_ratios": cpu_ratios, "within_limits": within}
    print(json.dumps({"benchmark": "startup", "rounds": rounds, **result}))


if __name__ == "__main__":
    main()
