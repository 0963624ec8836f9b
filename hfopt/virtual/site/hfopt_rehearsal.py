"""Inside the rehearsed script: measures memory phase by phase and ends the script after the steps that were asked for.

Installed by sitecustomize when HFOPT_REHEARSAL names the folder of the rehearsal. Each process that trains keeps its own report there
(report-PID.json), rewritten at every change of phase, so that it says where a killed process was. A script that uses
transformers' Trainer is followed by hfopt_rehearsal_trainer; any other is followed by its optimizer steps.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from hfopt_rehearsal_journal import journal  # type: ignore[import-not-found]
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

LOAD, OPTIMIZER, LATER, BETWEEN = "model load", "step 1: optimizer", "later steps", "between phases"
_WAIT_FOR_OTHERS_S = 30.0
_HFOPT = str(Path(__file__).parents[3])  # where hfopt lies; the script's own Python may not have it


def _borrowed() -> tuple[Any, Any]:
    """hfopt's `recognise` and `write_whole`: standard library only. The folder leaves the path again, for what else lies there is not
    the script's."""
    sys.path.append(_HFOPT)
    try:
        from hfopt.facts.oom_errors import recognise
        from hfopt.files import write_whole
    finally:
        sys.path.remove(_HFOPT)
    return recognise, write_whole


_recognise, _write_whole = _borrowed()


def is_oom(error: BaseException | None) -> bool:
    """Of the card: the memory of this machine is not what is rehearsed."""
    known = _recognise(error) if error is not None else None
    return known is not None and known.where != "host"


class RehearsalRecorder:
    """The report of this process. A phase is what the table shows; a part says where in it the peak was."""

    def __init__(self, folder: str, steps: int) -> None:
        self.folder = folder
        self.steps = steps
        self.by_trainer = False
        self.phase, self.part = LOAD, ""
        self.report: dict[str, Any] = {
            "pid": os.getpid(),
            "rank": int(os.environ.get("RANK", "0")),
            "world_size": int(os.environ.get("WORLD_SIZE", "1")),
            "phases": {},
            "steps_done": 0,
            "done": False,
            "asks": [],
            "notes": [],
            "oom": None,
            "survived_ooms": 0,
            "error": None,
        }

    def restart(self) -> None:
        """In a forked child: what the parent did is not the child's to tell."""
        self.report.update(pid=os.getpid(), phases={}, oom=None, error=None)

    def enter(self, phase: str, part: str = "") -> None:
        """Closes the current phase with its peaks and opens the next."""
        journal.phase("between" if phase == BETWEEN else part or phase)
        with journal.aside():
            self._close()
            self.phase, self.part = phase, part
            self.write()

    def _close(self) -> None:
        if not torch.cuda.is_initialized():
            return
        for device in range(torch.cuda.device_count()):
            allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
            torch.cuda.reset_peak_memory_stats(device)
            if not reserved or self.phase == BETWEEN:
                continue
            seen = self.report["phases"].setdefault(self.phase, {"allocated": 0, "reserved": 0, "device": device, "part": self.part})
            if allocated > seen["allocated"]:
                seen.update(allocated=allocated, device=device, part=self.part)
            seen["reserved"] = max(seen["reserved"], reserved)

    def note(self, text: str) -> None:
        if text not in self.report["notes"]:
            self.report["notes"].append(text)

    def tell(self, sentence: str) -> None:
        """At once, and again in the report."""
        self.note(sentence)
        sys.stderr.write(f"hfopt rehearse: {sentence}\n")

    def ran_out(self, error: BaseException) -> None:
        """Memory ran out here; whether the script survives it is not known yet."""
        if self.report["oom"] is not None:
            self.report["survived_ooms"] += 1
        self._close()
        started = bool(self.report["steps_done"]) or (self.by_trainer and self.phase != LOAD)
        self.report["oom"] = {
            "phase": self.phase if self.by_trainer or started else "model load or the first step",
            "part": self.part,
            "step": self.report["steps_done"] + (self.phase not in ("evaluation", "saving")) if started else None,
            "message": str(error).partition(" Including non-PyTorch")[0].partition("\n")[0] or type(error).__name__,
        }
        self.write()

    def survived(self) -> None:
        """A step completed: an out-of-memory error before it was dealt with by the script."""
        if self.report["oom"] is not None:
            self.report["oom"] = None
            self.report["survived_ooms"] += 1

    def write(self) -> None:
        try:
            _write_whole(Path(self.folder, f"report-{os.getpid()}.json"), json.dumps(self.report))
        except OSError:  # the folder is gone: hfopt was killed, and this process is about to be
            return

    def finish(self) -> None:
        """All that was asked for has run: tell, and leave before the script saves weights that mean nothing."""
        journal.end()
        self._close()
        self.report["done"] = True
        self.write()
        sys.stdout.flush()
        sys.stderr.flush()
        if self.report["rank"] == 0 and self.report["world_size"] > 1:
            self._wait_for_other_ranks()  # rank 0 holds their rendezvous
        os._exit(0)

    def _wait_for_other_ranks(self) -> None:
        end = time.monotonic() + _WAIT_FOR_OTHERS_S
        while time.monotonic() < end:
            done = 0
            for name in os.listdir(self.folder):  # noqa: PTH208
                if name.startswith("report-") and name.endswith(".json"):
                    with open(os.path.join(self.folder, name)) as stream:  # noqa: PTH118, PTH123
                        done += bool(json.load(stream)["done"])
            if done >= self.report["world_size"]:
                return
            time.sleep(0.05)

    def at_exit(self) -> None:
        """The script ended by itself: an uncaught error is in sys.last_value, whoever's excepthook showed it."""
        error = getattr(sys, "last_value", None)
        if error is not None and self.report["oom"] is None and is_oom(error):
            self.ran_out(error)
        if error is not None and not is_oom(error):
            self.report["error"] = f"{type(error).__name__}: {error}".strip()[:2000]
        self._close()
        if self.report["phases"] or error is not None:
            self.write()


def _follow_optimizer(recorder: RehearsalRecorder) -> None:
    """A script without a Trainer: its first optimizer's steps are the steps."""
    first: list[int] = []

    def before(optimizer: Any, *_: Any) -> None:
        if recorder.by_trainer or (first and first[0] != id(optimizer)):
            return
        first[:] = [id(optimizer)]
        journal.phase("optimizer")
        if not recorder.report["steps_done"]:
            recorder.phase = "step 1: forward and backward" if recorder.phase == LOAD else recorder.phase
            recorder.enter(OPTIMIZER)

    def after(optimizer: Any, *_: Any) -> None:
        if recorder.by_trainer or first[:1] != [id(optimizer)]:
            return
        recorder.survived()
        recorder.report["steps_done"] += 1
        recorder.enter(LATER)
        journal.step_done(recorder.report["steps_done"], "script")
        if recorder.report["steps_done"] >= recorder.steps:
            recorder.note("the script has no Trainer: its evaluation and saving were not rehearsed")
            recorder.finish()

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def install() -> RehearsalRecorder:
    recorder = RehearsalRecorder(os.environ["HFOPT_REHEARSAL"], int(os.environ["HFOPT_REHEARSAL_STEPS"]))
    _follow_optimizer(recorder)
    journal.tell = recorder.tell
    journal.follow_fetching()
    atexit.register(recorder.at_exit)
    os.register_at_fork(after_in_child=recorder.restart)
    return recorder
