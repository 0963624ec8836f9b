"""Two traces at once: what will surely be asked next is traced in a forked child while this process traces something else.

A fork needs no second import of torch and transformers, which cost more than a trace. It is left out where it would not help or not be
safe: one core, no fork on this system, another thread at work (a spinner may turn). Threads of a library do not live on in the child, which
would wait for them for ever: it computes with one thread, and one that stands still all the same is given up.
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from hfopt.errors import HfoptError
from hfopt.memory.step_memory import Estimate
from hfopt.memory.trace_store import TraceStore, before_tracing
from hfopt.process.child_guard import die_with_parent
from hfopt.schema import StepSettings, Workload
from hfopt.store import default_store

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


_LOOK_S = 0.5
_PATIENCE_S = 10.0
Estimator = Callable[[Workload, StepSettings], Estimate]
Asked = tuple[Workload, StepSettings]
KeyedTask = tuple[Hashable, Callable[[], Any]]


class ForkedTraces:
    """An estimator with a `start`: called for settings that were started, it waits for the child's answer."""

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._child: tuple[Any, Connection] | None = None
        self._expected: list[Hashable] = []  # of the child, in the order of its answers
        self._answers: dict[Hashable, Any] = {}

    def start(self, expected: Sequence[Asked], then: Sequence[KeyedTask] = ()) -> None:
        """One child traces them one after the other, one child at a time; what is known already is not traced again. Where there is a
        child, it goes on with `then`, whose answers are had by their keys."""
        if isinstance(self._estimator, TraceStore):
            if any(workload.remake is not None for workload, _ in expected):
                return  # its model may never have to be built: what is expected is not always asked for
            expected = [(workload, settings) for workload, settings in expected if self._estimator.known(workload, settings) is None]
        if self._child is not None or not expected or not _can_fork():
            return
        import multiprocessing

        context = multiprocessing.get_context("fork")
        receiving, sending = context.Pipe(duplex=False)
        tasks = [*((settings, partial(self._estimator, workload, settings)) for workload, settings in expected), *then]
        child = context.Process(target=_work, args=([task for _, task in tasks], receiving, sending), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forking beside threads; there is a spinner at most
            child.start()
        sending.close()
        self._child, self._expected = (child, receiving), [key for key, _ in tasks]

    def __call__(self, workload: Workload, settings: StepSettings) -> Estimate:
        made = self.made(settings)
        return made if isinstance(made, Estimate) else self._estimator(workload, settings)

    def made(self, key: Hashable) -> Any | None:
        """The child's answer, given once; None where it was not asked, or could not say."""
        while key in self._expected and self._child is not None:
            found = self._received(*self._child)
            if self._expected:
                self._answers[self._expected.pop(0)] = found
        return self._answers.pop(key, None)

    def close(self) -> None:
        """Ends what was started and never asked for."""
        if self._child is not None:
            child, receiving = self._child
            receiving.close()
            child.terminate()
            child.join()
        self._child = None
        self._expected.clear()

    def _received(self, child: Any, receiving: Connection) -> Any | None:
        """The next answer; None where the child could not trace it, is gone, or stands still."""
        if not _works(child.pid, receiving):
            self.close()
            return None
        try:
            return receiving.recv()
        except EOFError:
            return None


@contextmanager
def kept_traces(estimator: Estimator | None, *, in_child: bool, begin: Callable[[], None]) -> Iterator[Estimator]:
    """The estimator given, else traces as the disk keeps them; `begin` is called before one is made. `in_child`: a child may trace what
    will be asked next, which needs a process of our own."""
    with before_tracing(begin):
        if estimator is not None:
            yield estimator
        elif not in_child:
            yield TraceStore(default_store())
        else:
            with closing(ForkedTraces(TraceStore(default_store()))) as forked:
                yield forked


def _works(pid: int, receiving: Connection) -> bool:
    """Waits for an answer; False when the process has taken no processor time for a while."""
    import psutil

    used_s = idle_s = 0.0
    while not receiving.poll(_LOOK_S):
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.NoSuchProcess:
            return receiving.poll()
        now_s = times.user + times.system
        idle_s = 0.0 if now_s > used_s else idle_s + _LOOK_S
        used_s = now_s
        if idle_s >= _PATIENCE_S:
            return False
    return True


def _work(tasks: Sequence[Callable[[], Any]], receiving: Connection, sending: Connection) -> None:
    """What is not yet asked for waits in a queue: a pipe holds less than one trace, and the next would wait for its reader."""
    import torch

    torch.set_num_threads(1)
    die_with_parent()  # it holds copies of the parent's pipes: it must not outlive it
    receiving.close()  # so that a parent that is gone breaks the pipe instead of blocking it
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the parent meets the same error and says it
    done: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    sender = threading.Thread(target=_send, args=(done, sending))
    sender.start()
    try:
        for task in tasks:
            try:
                made = task()
            except HfoptError:
                made = None
            done.put(pickle.dumps(made))
    finally:  # whatever ends this process: a sender that waits would keep it, and the parent with it
        done.put(None)
        sender.join()


def _send(done: queue.SimpleQueue[bytes | None], sending: Connection) -> None:
    with sending:
        while (answer := done.get()) is not None:
            try:
                sending.send_bytes(answer)
            except BrokenPipeError:  # the parent is gone, or asks no more
                return


def _can_fork() -> bool:
    import multiprocessing

    if "fork" not in multiprocessing.get_all_start_methods() or sys.platform == "darwin":
        return False
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores > 1 and all(thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())
