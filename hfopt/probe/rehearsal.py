"""Runs an unmodified training script on a card that is not there, and says whether it starts, fits, and what the card lacks.

The script's processes report from the inside (hfopt/virtual/site/hfopt_rehearsal.py); this module starts them, ends them, and judges.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from hfopt.compat.versions import TorchBuild, missing_kernels
from hfopt.errors import VirtualGpuError
from hfopt.files import write_whole
from hfopt.probe.rehearsed_time import rehearsed_time, step_clock
from hfopt.process import child_process
from hfopt.redact import said
from hfopt.schema import Gpu, PhasePeak, Rehearsal
from hfopt.units import format_bytes, format_seconds
from hfopt.virtual.build import find_toolchain
from hfopt.virtual.environment import environment

_ORDER = (
    "model load",
    "step 1: forward and backward",
    "step 1: forward",
    "step 1: backward",
    "step 1: optimizer",
    "later steps",
    "evaluation",
    "saving",
)
FEWEST_TIMED_STEPS = 6
_POLL_S = 0.02
_QUIET = {"WANDB_MODE": "disabled", "MLFLOW_TRACKING_URI": "", "COMET_MODE": "DISABLED", "TOKENIZERS_PARALLELISM": "false"}


def rehearse(
    command: Sequence[str],
    gpu: Gpu,
    *,
    count: int = 1,
    steps: int = 3,
    context_bytes: int = 0,
    timeout_s: float = 600.0,
    timed: bool = False,
) -> Rehearsal:
    """Runs the command for `steps` optimizer steps, one evaluation and one checkpoint on `count` virtual cards.

    timed: also price what the steps launch, which takes six of them: one to warm up, then in turn one for the kernels and one for the host;
    the fourth and later ones go by the clock that follows from those before."""
    steps = max(steps, FEWEST_TIMED_STEPS) if timed else steps
    words = normal_command(command)
    built = find_toolchain(_interpreter(words)).torch
    missing = missing_kernels(gpu, TorchBuild(version=built.version, cuda=built.cuda))
    if missing is not None:
        return replace(Rehearsal(**_frame(gpu, count, context_bytes, ())), outcome="unsupported", message=f"not run: {missing}")
    with child_process.scratch_folder() as folder:
        env = environment(gpu, count=count, context_bytes=context_bytes, state=folder / "board", python=_interpreter(words))
        env |= _QUIET | {"HFOPT_REHEARSAL": str(folder), "HFOPT_REHEARSAL_STEPS": str(steps), "HFOPT_VIRTUAL_STRICT": "1"}
        if timed:
            env["HFOPT_VIRTUAL_JOURNAL"] = str(folder)
        with _clocks(folder, gpu) if timed else nullcontext():
            ended = child_process.run(words, folder=folder, timeout_s=timeout_s, env=env)
        reports = _read_reports(folder)
        time = rehearsed_time(folder, gpu, reports) if timed else None
    frame = Rehearsal(**_frame(gpu, count, context_bytes, reports), wall_s=ended.wall_s, time=time)
    return _judge(ended, reports, frame, steps, timeout_s)


@contextmanager
def _clocks(folder: Path, gpu: Gpu) -> Iterator[None]:
    """Meanwhile each process of the script that asks is sent the times of its step (hfopt/virtual/site/hfopt_rehearsal_clock.py)."""
    over = threading.Event()

    def answer() -> None:
        while not over.wait(_POLL_S):
            for wanted in folder.glob("clock-wanted-*"):
                pid, found = wanted.name.rpartition("-")[2], None
                wanted.unlink()
                try:
                    found = step_clock(folder, pid, gpu)
                finally:  # the process waits for it
                    write_whole(folder / f"clock-{pid}.json", json.dumps(found))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def normal_command(command: Sequence[str]) -> list[str]:
    """`train.py ...` and `-m module ...` get this interpreter in front; anything else is a command of its own."""
    words = list(command)
    if not words:
        raise VirtualGpuError("no script to rehearse", hint="for example: hfopt rehearse --gpu T4 -- python train.py")
    if words[0] == "-m" or words[0].endswith(".py"):
        words = [sys.executable, *words]
    found = shutil.which(words[0])
    if found is None:
        raise VirtualGpuError(f"cannot run {words[0]}: no such command")
    script = words[1] if len(words) > 1 and words[1].endswith(".py") else None
    if script is not None and not Path(script).exists():
        raise VirtualGpuError(f"no such script: {script}")
    return words


def _interpreter(words: Sequence[str]) -> str | None:
    """Whose torch runs: the command's own Python, or that of an entry point such as torchrun, by its first line. None: this one."""
    found = shutil.which(words[0])
    assert found is not None
    if Path(found).name.startswith("python"):
        return found
    with Path(found).open("rb") as stream:
        first = stream.readline(512)
    interpreter = first.removeprefix(b"#!").decode(errors="replace").strip()
    return interpreter if first.startswith(b"#!/") and Path(interpreter).name.startswith("python") else None


def _read_reports(folder: Path) -> list[dict[str, Any]]:
    reports = []
    for path in sorted(folder.glob("report-*.json")):
        try:
            reports.append(json.loads(path.read_text()))
        except ValueError:
            continue
    return reports


def _frame(gpu: Gpu, count: int, context_bytes: int, reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All of a Rehearsal but its verdict."""
    notes = [note for report in reports for note in report["notes"]]
    if survived := max((report["survived_ooms"] for report in reports), default=0):
        notes.append(f"memory ran out {survived} time(s) and the script carried on by itself")
    return {
        "outcome": "fits",
        "gpu": gpu,
        "count": count,
        "context_bytes": context_bytes,
        "phases": _phases(reports),
        "steps_done": max((report["steps_done"] for report in reports), default=0),
        "script_exit_code": None,
        "message": "",
        "ranks": max((report["world_size"] for report in reports), default=1),
        "findings": _findings(gpu, reports),
        "notes": tuple(dict.fromkeys(notes)),
    }


def _phases(reports: Sequence[Mapping[str, Any]]) -> tuple[PhasePeak, ...]:
    """Each phase on the rank that reserved most in it."""
    worst: dict[str, PhasePeak] = {}
    for report in reports:
        for name, seen in report["phases"].items():
            peak = PhasePeak(phase=name, allocated_bytes=seen["allocated"], reserved_bytes=seen["reserved"], part=seen["part"] or None)
            if name not in worst or worst[name].reserved_bytes < peak.reserved_bytes:
                worst[name] = peak
    return tuple(worst[name] for name in _ORDER if name in worst)


def _findings(gpu: Gpu, reports: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    asks = {ask for report in reports for ask in report["asks"]}
    capability = "compute capability {}.{}".format(*gpu.capability) if gpu.capability else "unknown compute capability"
    found = []
    for ask in ("bf16", "bf16 weights"):
        if ask in asks and not gpu.supports("bf16"):
            found.append(
                f"{ask}: {gpu.name} ({capability}) has no bf16 tensor cores; torch emulates it there, slower than fp16 and without the "
                "flash and memory-efficient attention kernels. Use fp16"
            )
    if "fp16" in asks and gpu.capability is not None and gpu.capability < (7, 0):
        found.append(f"fp16: {gpu.name} ({capability}) has no fp16 tensor cores; it saves memory but no time")
    return tuple(found)


def _judge(ended: child_process.Ended, reports: Sequence[Mapping[str, Any]], frame: Rehearsal, steps: int, timeout_s: float) -> Rehearsal:
    done = bool(reports) and any(report["done"] for report in reports)
    oom = next((report["oom"] for report in reports if report["oom"]), None)
    code = None if done and ended.returncode == 0 else ended.returncode
    frame = replace(frame, script_exit_code=code)
    if oom is not None:
        where = oom["phase"] + (f" ({oom['part']})" if oom["part"] else "")
        when = f"at step {oom['step']}, {where.removeprefix('step 1: ')}" if oom["step"] else f"in {where}"
        message = f"out of memory {when}: {said(oom['message'])}"
        return replace(frame, outcome="oom", message=message, oom_step=oom["step"], oom_phase=oom["phase"])
    if ended.reason == "timeout":
        return replace(
            frame, outcome="timeout", message=f"still running after {format_seconds(timeout_s)} at step {frame.steps_done}; ended"
        )
    if not done:
        return replace(frame, **_unfinished(ended, reports, frame.steps_done, steps))
    if not frame.phases:
        message = "the script trained on the CPU and never used the card; look for use_cpu, no_cuda or CUDA_VISIBLE_DEVICES in it"
        return replace(frame, outcome="incomplete", message=message)
    if too_much := _evaluation_beyond_card(reports, frame):
        return replace(frame, outcome="oom", message=too_much, oom_phase="evaluation")
    if frame.findings:
        return replace(
            frame, outcome="unsupported", message=f"it runs and fits, but {frame.gpu.name} does not support all that it asks for"
        )
    return replace(frame, outcome="fits", message=f"fits: {frame.steps_done} steps rehearsed")


def _unfinished(ended: child_process.Ended, reports: Sequence[Mapping[str, Any]], steps_done: int, steps: int) -> dict[str, Any]:
    error = next((report["error"] for report in reports if report["error"]), None)
    if ended.reason == "killed" or ended.returncode < 0:
        message = f"the script was ended by signal {-ended.returncode}, not by hfopt"
    elif ended.returncode:
        message = f"the script itself failed with exit code {ended.returncode}" + (f": {said(error)}" if error else "")
    else:
        before = "before its first optimizer step" if not steps_done else f"after {steps_done} of {steps} optimizer steps"
        return {"outcome": "incomplete", "message": f"the script ended by itself {before}"}
    return {"outcome": "failed", "message": message}


def _evaluation_beyond_card(reports: Sequence[Mapping[str, Any]], frame: Rehearsal) -> str | None:
    """A few batches of the evaluation fit; do all of them?"""
    whole = max((report["evaluation"] for report in reports if "evaluation" in report), key=lambda seen: seen["allocated"], default=None)
    if whole is None or whole["allocated"] + frame.context_bytes <= frame.capacity_bytes:
        return None
    return (
        f"out of memory in the evaluation: each batch leaves {format_bytes(whole['growth'])} of gathered predictions on the card, "
        f"{format_bytes(whole['allocated'])} by the last of {whole['batches']} (predicted from {whole['run']}); set eval_accumulation_steps"
    )
