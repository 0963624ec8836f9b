"""A few real optimizer steps of one candidate in a child process: the estimate is a promise, this keeps it.

The device is the real card, the CPU, or the virtual GPU for a card that is not here. The child cannot hurt the caller: it has a time
limit, its own memory, and a guard that ends it with everything it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from hfopt.errors import DryRunError
from hfopt.probe import child
from hfopt.probe.arguments import Device, Extent
from hfopt.redact import said
from hfopt.schema import Candidate, Gpu, TrainJob, Trial
from hfopt.units import format_seconds
from hfopt.virtual.launch import environment

_LONGEST_S = 3600.0  # a child nobody tells anything ends by itself
_PACKAGE_PARENT = Path(__file__).parents[2]


class Prepared:
    """A child that imports, reads the model and builds it on the device while the caller still thinks; then it is told the candidate.

    It serves one candidate. `close` ends it and leaves nothing, used or not.
    """

    def __init__(
        self,
        job: TrainJob,
        *,
        device: Device,
        gpu: Gpu | None = None,
        context_bytes: int = 0,
        extent: Extent | None = None,
    ) -> None:
        """gpu: the card to stand in for, with device 'virtual'. context_bytes: what the CUDA context takes there."""
        self._device: Device = device
        with contextlib.ExitStack() as stack:
            self._folder = stack.enter_context(child.scratch_folder())
            env = _environment(device, gpu, context_bytes, self._folder)
            self._order = stack.enter_context(_order(job, device, extent or Extent(), self._folder))
            self._log = self._folder / "log"
            with self._log.open("wb") as output:
                command = [sys.executable, "-m", "hfopt.probe.worker", str(self._folder)]
                self._running = child.start(command, folder=self._folder, timeout_s=_LONGEST_S, env=env, output=output)
            stack.callback(self._running.end)
            self._stack = stack.pop_all()

    def run(self, candidate: Candidate, *, eval_batch: int | None = None, timeout_s: float = 300.0) -> Trial:
        """Real optimizer steps with full accumulation windows of the longest batch, then one evaluation step where the job evaluates.

        eval_batch: what it evaluates with, when it is not the job's own.
        """
        self._order.write(pickle.dumps((candidate, eval_batch)))
        ended = self._running.wait(timeout_s)
        return Trial(device=self._device, candidate=candidate, **_facts(self._folder, ended, self._log, timeout_s))

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Prepared:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def dry_run(
    job: TrainJob,
    candidate: Candidate,
    *,
    device: Device,
    gpu: Gpu | None = None,
    context_bytes: int = 0,
    timeout_s: float = 300.0,
    steps: int = 3,
) -> Trial:
    """One candidate, now; the arguments are those of `Prepared`."""
    with Prepared(job, device=device, gpu=gpu, context_bytes=context_bytes, extent=Extent(steps=steps)) as prepared:
        return prepared.run(candidate, timeout_s=timeout_s)


def _environment(device: Device, gpu: Gpu | None, context_bytes: int, folder: Path) -> dict[str, str]:
    env = dict(os.environ)
    if device == "virtual":
        if gpu is None:
            raise DryRunError("a dry run on the virtual GPU needs to know which card it stands in for")
        env = environment(gpu, context_bytes=context_bytes, state=folder / "board")
    elif device == "cuda":
        env["CUDA_VISIBLE_DEVICES"] = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # several would be a DataParallel run
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # the child is a run of its own
        env.pop(name, None)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(_PACKAGE_PARENT))))
    return env | {"PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false", "TMPDIR": str(folder)}


def _order(job: TrainJob, device: Device, extent: Extent, folder: Path) -> IO[bytes]:
    """Writes what is known already, and returns where the candidate goes: a named pipe, open on both ends so that writing never blocks."""
    plain = replace(
        job, args=dict(job.args), model=replace(job.model, overrides=dict(job.model.overrides))
    )  # read-only views do not travel
    (folder / "job.pickle").write_bytes(pickle.dumps({"job": plain, "device": device, "extent": extent}))
    pipe = folder / "candidate"
    os.mkfifo(pipe)
    return os.fdopen(os.open(pipe, os.O_RDWR), "wb", buffering=0)


def _facts(folder: Path, ended: child.Ended, log: Path, timeout_s: float) -> Mapping[str, Any]:
    if ended.reason == "timeout":
        return {"outcome": "timeout", "message": f"the dry run was ended at its limit of {format_seconds(timeout_s)}"}
    try:
        facts: Mapping[str, Any] = json.loads((folder / "trial.json").read_text())
    except (OSError, ValueError):
        facts = {"outcome": "error", "message": _how_it_died(ended, log)}
    message = facts.get("message")
    return {**facts, "message": said(message)} if message else facts


def _how_it_died(ended: child.Ended, log: Path) -> str:
    if ended.returncode == -9:
        return "the dry run was killed (signal 9); if nobody did that, the kernel did, because the machine ran out of memory"
    if ended.returncode < 0:
        return f"the dry run was ended by signal {-ended.returncode}"
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    return f"the dry run ended with exit code {ended.returncode}" + (f": {last[0]}" if last else "")
