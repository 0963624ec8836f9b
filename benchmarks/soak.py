"""A long run under `hfopt run` with a fault every so often: does it end with all its steps, and is nothing left behind?

A tiny Trainer takes a step five times a second. At every `--every` seconds a fault is drawn: memory runs out in forward, in backward or in
evaluation (repeated in place), in the optimizer step (a restart; at most twice, for each halves the batch), a step hangs (a restart, by
`--restart-hung`), or the newest checkpoint is cut short before one of these. The weights at the end are compared with those of the
same run left alone; processes are looked for by a mark in their environment, files in a temporary folder of the run's own, and
the supervisor's memory is read each second.

The last line is JSON; the exit code is 1 where steps, weights, processes, files or memory are not as they should be.

usage: python benchmarks/soak.py [--minutes 240] [--every 60] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

STEPS_PER_S = 5
HANG_AFTER_S = 15
FAULTS = ("forward", "backward", "evaluation", "hang", "optimizer")
BATCH = 8  # halved twice, and two samples can still run out of memory
MOST_RESTARTS = 2  # for memory
MARK = "HFOPT_SOAK_MARK"
GROWTH_BYTES = 32 << 20  # of the supervisor, which holds no tensors


class Faults:
    """Drawn by the time, kept in a file so that a restarted process goes on with them."""

    __module__ = "torch"  # an instrument: what it counts is nothing that a script keeps

    def __init__(self, path: Path, every_s: float, seed: int) -> None:
        self.path, self.every_s, self.seed = path, every_s, seed
        self.started_s = time.time()
        self.state: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"due": time.time() + every_s, "seen": []}

    def due(self, *kinds: str) -> str | None:
        """The fault that is to happen now, when it is one of these."""
        seen: list[str] = self.state["seen"]
        if time.time() < max(self.state["due"], self.started_s + 3):
            return None
        kind = random.Random(f"{self.seed} {len(seen)}").choice(FAULTS)
        if kind == "optimizer" and seen.count("optimizer") >= MOST_RESTARTS:
            kind = "backward"
        if kind not in kinds:
            return None
        self.state = {"due": time.time() + self.every_s, "seen": [*seen, kind]}
        self.path.write_text(json.dumps(self.state))
        return kind


def worker(folder: Path, steps: int, every_s: float, seed: int) -> None:
    """The training script; `every_s` 0: left alone and as fast as it can."""
    import torch
    from fault_configurations import Samples, fresh, trainer
    from transformers import TrainerCallback

    faults = Faults(folder / "faults.json", every_s, seed) if every_s else None

    class Paced(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            optimizer, step = more["optimizer"], more["optimizer"].step

            def short(*arguments: Any, **options: Any) -> Any:
                if faults is not None and faults.due("optimizer"):
                    cut_newest(Path(args.output_dir))
                    raise out_of_memory()
                return step(*arguments, **options)

            optimizer.step = short

        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if faults is not None:
                time.sleep(1 / STEPS_PER_S)
                if faults.due("hang"):
                    time.sleep(3600)

    def out_of_memory() -> BaseException:
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8.00 GiB")

    def hook(module: Any, args: Any, output: torch.Tensor) -> None:
        if faults is None or len(output) < 2:
            return
        if not module.training and faults.due("evaluation"):
            raise out_of_memory()
        kind = faults.due("forward", "backward") if output.requires_grad else None
        if kind == "forward":
            raise out_of_memory()
        if kind == "backward":
            output.register_hook(fail)

    def fail(gradient: torch.Tensor) -> None:
        raise out_of_memory()

    made = fresh(
        lambda out: trainer(
            out,
            dataset=Samples("causal", 4000),
            per_device_train_batch_size=BATCH,
            eval_dataset=Samples("causal", 4),
            max_steps=steps,
            callbacks=[Paced()],
            save_strategy="steps",
            save_steps=20,
            save_total_limit=2,
            eval_strategy="steps",
            eval_steps=10,
            logging_steps=10,
            lr_scheduler_type="constant",
            learning_rate=1e-4,
        ),
        folder / "out",
    )
    layer = next(module for module in made.model.modules() if isinstance(module, torch.nn.Linear))
    layer.register_forward_hook(hook)
    made.train()
    weights = torch.cat([parameter.detach().flatten() for parameter in made.model.parameters()])
    torch.save({"weights": weights, "step": made.state.global_step}, folder / "end.pt")


def cut_newest(folder: Path) -> None:
    """What a kill in the middle of a save leaves."""
    saved = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    if len(saved) > 1:
        optimizer = saved[-1] / "optimizer.pt"
        optimizer.write_bytes(optimizer.read_bytes()[:100])


def command(folder: Path, steps: int, every_s: float, seed: int) -> list[str]:
    return [str(Path(__file__).resolve()), "--worker", str(folder), str(steps), str(every_s), str(seed)]


def marked(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def resident_bytes(pid: int) -> int | None:
    try:
        line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    except (OSError, StopIteration):
        return None
    return int(line.split()[1]) << 10


def soak(minutes: float, every_s: float, seed: int) -> dict[str, Any]:
    import torch

    steps, mark = max(40, int(minutes * 60 * STEPS_PER_S)), uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as made:
        folder, scratch, alone = (Path(made) / name for name in ("run", "tmp", "alone"))
        for one in (folder, scratch, alone):
            one.mkdir()
        env = {**os.environ, MARK: mark, "TMPDIR": str(scratch), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        options = ["--no-plan", "--restarts", "1000", "--hang-after", str(HANG_AFTER_S), "--restart-hung"]
        began = time.monotonic()
        run = subprocess.Popen(
            [sys.executable, "-m", "hfopt", "run", *options, *command(folder, steps, every_s, seed)], env=env, stdout=subprocess.DEVNULL
        )
        sizes = []
        while run.poll() is None:
            sizes.append(resident_bytes(run.pid))
            time.sleep(1)
        seconds = time.monotonic() - began
        left = [path.name for path in scratch.iterdir() if not path.name.startswith("torch")]
        known = [size for size in sizes if size]
        subprocess.run([sys.executable, *command(alone, steps, 0, seed)], check=True, env=env, stdout=subprocess.DEVNULL)
        ends = [torch.load(where / "end.pt", weights_only=True) if (where / "end.pt").exists() else None for where in (folder, alone)]
        seen = json.loads((folder / "faults.json").read_text())["seen"] if (folder / "faults.json").exists() else []
    mine, theirs = ends
    apart = float((mine["weights"] - theirs["weights"]).norm() / theirs["weights"].norm()) if mine and theirs else None
    early = known[len(known) // 4 : len(known) // 2] or known
    return {
        "exit_code": run.returncode,
        "seconds": round(seconds),
        "steps": mine["step"] if mine else None,
        "asked": steps,
        "faults": {kind: seen.count(kind) for kind in FAULTS},
        "weights_apart": apart,
        "processes_left": marked(mark),
        "files_left": left,
        "supervisor_growth_bytes": known[-1] - max(early) if known else None,
    }


def holds(found: dict[str, Any]) -> bool:
    apart, growth = found["weights_apart"], found["supervisor_growth_bytes"]
    clean = not found["processes_left"] and not found["files_left"] and growth is not None and growth < GROWTH_BYTES
    return found["exit_code"] == 0 and found["steps"] == found["asked"] and apart is not None and apart < 1e-7 and clean


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        folder, steps, every_s, seed = sys.argv[2:]
        worker(Path(folder), int(steps), float(every_s), int(seed))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=240)
    parser.add_argument("--every", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    found = soak(asked.minutes, asked.every, asked.seed)
    print(json.dumps(found))
    return 0 if holds(found) else 1


if __name__ == "__main__":
    sys.exit(main())
