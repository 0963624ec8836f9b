"""TRL's trainers three ways: the estimate from a YAML, the estimate from the live trainer, and the trainer's own run on the virtual GPU.

usage: python benchmarks/trl_accuracy.py [--only TEXT] [--log FILE] [--minutes N] [--python PYTHON] [--steps N]

SFT (full, bfloat16 weights, without checkpointing, LoRA, packed, padding-free), DPO (full, LoRA, reference answers precomputed), KTO,
Reward, GRPO (with and without a KL term), RLOO and Seq2SeqTrainer, five small models each, and Phi-3 without checkpointing. What is
compared is torch.cuda.max_memory_allocated, how far the reserved memory of either estimate is under the run's, and under the least card
that would have run it (cached segments given back): below that the run ends out of memory. Nothing here was measured on a real card.
With --log the virtual runs are kept and a second run goes on where the first was stopped; after --minutes no further case is begun.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from trl_cases import TrlCase, cases, make_trainer, model_folder

from hfopt.config.read_job import load_bytes
from hfopt.config.settings import step_settings
from hfopt.errors import HfoptError
from hfopt.job.live_trainer import from_live
from hfopt.job.request import Request
from hfopt.job.subject import workload_of
from hfopt.memory.step_memory import estimate
from hfopt.schema import Gpu, MemoryPeak
from hfopt.units import GIB, MIB
from hfopt.virtual.environment import environment

HERE = Path(__file__).parent
CARD = Gpu(name="Virtual card", memory_bytes=200 * GIB, capability=(8, 6), sms=28)


class VirtualTrl:
    """Runs cases in one worker on the virtual GPU; a worker that dies takes its case with it and the next case starts another."""

    def __init__(self, python: str, log: Path | None, cache: Path) -> None:
        self._python, self._log, self._cache = python, log, cache
        self._known: dict[str, dict[str, Any]] = {}
        if log is not None and log.exists():
            self._known = {entry["case"]: entry["real"] for entry in map(json.loads, log.read_text().splitlines())}
        self._worker: subprocess.Popen[str] | None = None

    def run(self, case: TrlCase) -> dict[str, Any]:
        key = json.dumps(asdict(case), sort_keys=True)
        if key not in self._known:
            self._known[key] = self._ask(key)
            if self._log is not None:
                with self._log.open("a") as log:
                    log.write(json.dumps({"case": key, "real": self._known[key]}) + "\n")
        return self._known[key]

    def _ask(self, line: str) -> dict[str, Any]:
        if self._worker is None:
            env = environment(CARD, python=self._python)
            env |= {"PYTHONPATH": f"{HERE.parent}:{HERE}:{env['PYTHONPATH']}", "HF_HUB_OFFLINE": "1"}
            command = [self._python, str(HERE / "trl_worker.py"), str(self._cache)]
            self._worker = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        assert self._worker.stdin is not None and self._worker.stdout is not None
        self._worker.stdin.write(line + "\n")
        self._worker.stdin.flush()
        answer = self._worker.stdout.readline()
        if answer:
            return json.loads(answer)  # type: ignore[no-any-return]
        code, self._worker = self._worker.wait(), None
        return {"failed": f"the worker ended with {code}"}

    def close(self) -> None:
        if self._worker is not None:
            self._worker.communicate()


def from_yaml(case: TrlCase, folder: Path) -> MemoryPeak:
    job = load_bytes(yaml.safe_dump(case.arguments(folder)).encode(), "job.yaml").job
    assert job is not None
    assert job.trainer == case.kind, f"read as {job.trainer}"
    settings = step_settings(job.settings, accumulation=job.accumulation, capability=(8, 6), multiprocessors=28)
    return estimate(workload_of(job), settings).curve.peak(case.batch)


def from_trainer(case: TrlCase, folder: Path) -> MemoryPeak:
    """The trainer of a script that has no card; the precision is the one it would take on a card."""
    cuda = make_trainer(case, folder, use_cpu=True, bf16=False)
    subject = from_live(cuda, Request(gpu="a100-80gb"))
    job = load_bytes(yaml.safe_dump(case.arguments(folder)).encode(), "job.yaml").job
    assert job is not None
    settings = step_settings(job.settings, accumulation=job.accumulation, capability=(8, 6), multiprocessors=28)
    return estimate(subject.workload, settings).curve.peak(case.batch)


def compare(case: TrlCase, card: VirtualTrl, cache: Path) -> tuple[dict[str, float], str]:
    """Errors in per cent, by what is compared with what, and a line for people."""
    folder, real = model_folder(case, cache), card.run(case)
    peaks: dict[str, MemoryPeak] = {}
    said: list[str] = []
    for name, find in (("yaml", from_yaml), ("live", from_trainer)):
        try:
            peaks[name] = find(case, folder)
        except (HfoptError, AssertionError) as error:
            said.append(f"{name}: {error}")
    if "failed" in real:
        said.append(f"virtual: {real['failed']}")
    errors: dict[str, float] = {}
    for name, peak in peaks.items():
        said.append(f"{name} {peak.allocated_bytes / MIB:7.0f}")
        if "failed" not in real:
            errors[f"{name} to virtual"] = 100 * (peak.allocated_bytes / real["allocated"] - 1)
            errors[f"{name} to virtual, reserved"] = 100 * (peak.reserved_bytes / real["reserved"] - 1)
            errors[f"{name} to the least card"] = 100 * (peak.reserved_bytes / real["least"] - 1)
    if len(peaks) == 2:
        errors["yaml to live"] = 100 * (peaks["yaml"].allocated_bytes / peaks["live"].allocated_bytes - 1)
    if "failed" not in real:
        said.append(f"virtual {real['allocated'] / MIB:7.0f} MiB")
    return errors, "  ".join([*said, *(f"{name} {error:+.2f} %" for name, error in errors.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose title contains this")
    parser.add_argument("--python", default=sys.executable, help="a Python with the CUDA build of torch")
    parser.add_argument("--log", type=Path, help="virtual runs are kept here, one JSON object a line")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "hfopt-trl-models", help="where the small models are kept")
    parser.add_argument("--minutes", type=float, default=60.0, help="no further case is begun after so long")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps of a virtual run")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    began, found = time.monotonic(), {}
    card = VirtualTrl(arguments.python, arguments.log, arguments.cache)
    for case in (replace(case, steps=arguments.steps) for case in cases() if arguments.only in case.title):
        if time.monotonic() - began > 60 * arguments.minutes:
            print("the time is up", flush=True)
            break
        found[case.title], line = compare(case, card, arguments.cache)
        print(f"{case.title:28} {line}", flush=True)
    card.close()
    names = ("yaml to live", "yaml to virtual", "live to virtual")
    result: dict[str, Any] = {"n": len(found), "complete": sum(all(name in errors for name in names) for errors in found.values())}
    for name in names:
        errors = [abs(one[name]) for one in found.values() if name in one]
        result |= {f"{name}, within 2 %": sum(error <= 2 for error in errors), f"{name}, most %": round(max(errors, default=0.0), 2)}
    for name, kind in (("reserved", "reserved"), ("least card", "least card")):
        errors = [error for one in found.values() for title, error in one.items() if title.endswith(kind)]
        result[f"{name}, most under %"] = round(-min(errors, default=0.0), 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
