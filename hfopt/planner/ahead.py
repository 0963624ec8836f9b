"""Two traces at once: what will surely be asked next is traced in a forked child while this process traces something else.

A fork needs no second import of torch and transformers, which cost more than a trace. It is left out where it would not help or not be
safe: one core, no fork on this system, another thread at work (a spinner may turn).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from hfopt.errors import HfoptError
from hfopt.estimate.memory import Estimate
from hfopt.schema import StepSettings, Workload

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
Estimator = Callable[[Workload, StepSettings], Estimate]


class Ahead:
    """An estimator with a `start`: called for settings that were started, it waits for the child's answer."""

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._pending: dict[StepSettings, tuple[Any, Connection]] = {}

    def start(self, workload: Workload, settings: StepSettings) -> None:
        if settings in self._pending or not _can_fork():
            return
        context = multiprocessing.get_context("fork")
        receiving, sending = context.Pipe(duplex=False)
        child = context.Process(target=_trace, args=(self._estimator, workload, settings, receiving, sending), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forking beside threads; there is a spinner at most
            child.start()
        sending.close()
        self._pending[settings] = (child, receiving)

    def __call__(self, workload: Workload, settings: StepSettings) -> Estimate:
        if settings not in self._pending:
            return self._estimator(workload, settings)
        child, receiving = self._pending.pop(settings)
        try:
            made = receiving.recv()
        except EOFError:
            made = None
        finally:
            receiving.close()
            child.join()
        return made if isinstance(made, Estimate) else self._estimator(workload, settings)

    def close(self) -> None:
        """Ends what was started and never asked for."""
        for child, receiving in self._pending.values():
            receiving.close()
            child.terminate()
            child.join()
        self._pending.clear()


def _trace(estimator: Estimator, workload: Workload, settings: StepSettings, receiving: Connection, sending: Connection) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it holds copies of the parent's pipes: it must not outlive it
    receiving.close()  # so that a parent that is gone breaks the pipe instead of blocking it
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the parent meets the same error and says it
    try:
        sending.send(estimator(workload, settings))
    except HfoptError:
        sending.send(None)
    sending.close()


def _can_fork() -> bool:
    if "fork" not in multiprocessing.get_all_start_methods() or sys.platform == "darwin":
        return False
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores > 1 and all(thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())
