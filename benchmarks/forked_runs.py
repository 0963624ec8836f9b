"""Dry runs on the virtual GPU without an import each: one process imports torch and transformers, and forks once per run.

The child of each fork is the product's own worker (`hfopt.probe.dry_run_worker`), given the card by its environment before it
first asks for one.
`ForkedRuns` is the caller's side; `python forked_runs.py` is the process that forks, told one run per line on its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from hfopt.probe.dry_run import Extent, write_order
from hfopt.schema import Candidate, Gpu, TrainJob
from hfopt.virtual.environment import environment

EXTENT = Extent(steps=2)
_POLL_S = 0.05
# asked whether there is a card while importing, PyTorch looks at NVML alone: CUDA's own count would spoil every fork
_WITHOUT_THE_CARD = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONSAFEPATH": "1"}


class ForkedRuns:
    """Runs candidates one after the other; `close` ends the process that forks."""

    def __init__(self, gpu: Gpu) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hfopt-forked-")
        env = environment(gpu, state=Path(self._folder.name) / "board")
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=env | _WITHOUT_THE_CARD,
        )

    def run(self, job: TrainJob, candidate: Candidate, *, gpu: Gpu, context_bytes: int, timeout_s: float) -> dict[str, Any]:
        """What the worker writes, or how it died."""
        assert self._server.stdin is not None and self._server.stdout is not None
        with tempfile.TemporaryDirectory(dir=self._folder.name) as name:
            folder = Path(name)
            card = environment(gpu, context_bytes=context_bytes, state=folder / "board")
            told = {key: value for key, value in card.items() if key.startswith("HFOPT_VIRTUAL_")}
            with write_order(job, "virtual", EXTENT, folder, eager=False) as pipe:
                pipe.write(pickle.dumps((candidate, None)))
                self._server.stdin.write(json.dumps({"folder": name, "card": told, "timeout_s": timeout_s}) + "\n")
                self._server.stdin.flush()
                status = json.loads(self._server.stdout.readline())
            if status["timeout"]:
                return {"outcome": "timeout", "message": f"ended after {timeout_s:.0f} s"}
            try:
                facts: dict[str, Any] = json.loads((folder / "trial.json").read_text())
            except (OSError, ValueError):
                last = (folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
                return {"outcome": "error", "message": f"exit code {status['code']}: {' '.join(last)}"}
            return facts

    def close(self) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()
        self._folder.cleanup()

    def __enter__(self) -> ForkedRuns:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _child(order: dict[str, Any]) -> None:
    folder = Path(order["folder"])
    with (folder / "log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(order["card"], TMPDIR=str(folder))
    tempfile.tempdir = None
    import torch

    from hfopt.probe import dry_run_worker

    assert torch.cuda.get_device_name(0) == order["card"]["HFOPT_VIRTUAL_NAME"], "the card was asked for before the fork"
    dry_run_worker.main(folder)


def _ended(order: dict[str, Any]) -> int:
    """The exit code of a child, which must not come back to where it was forked."""
    try:
        _child(order)
    except (Exception, SystemExit):  # noqa: BLE001 - whatever it was, the log has it
        traceback.print_exc()
        return 1
    finally:
        sys.stderr.flush()
    return 0


def _wait(pid: int, timeout_s: float) -> dict[str, Any]:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return {"timeout": False, "code": os.waitstatus_to_exitcode(status)}
        time.sleep(_POLL_S)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return {"timeout": True, "code": -9}


def _serve() -> None:
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # peft imports it, it asks for the card at once; no draw needs it
    import transformers

    from hfopt.model.trl_trainer import trl_classes
    from hfopt.probe import dry_run_worker, training_steps

    assert training_steps and dry_run_worker and transformers.Trainer and transformers.TrainingArguments, "imported once, for every fork"
    for kind in ("SFT", "DPO", "KTO", "Reward"):
        trl_classes(kind)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os._exit(_ended(order))
        sys.stdout.write(json.dumps(_wait(pid, order["timeout_s"])) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # nobody is left to hear of the run
        _serve()
