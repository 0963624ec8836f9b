"""Where the seconds of training go, and where ranks meet, from the times of the Trainer's callbacks alone.

transformers (4.51 and 5.x alike) fetches the whole accumulation window, then calls on_step_begin, so the time from the last event of the
step before (step end, log, evaluation, save) to on_step_begin is the wait for data. The first step of a train() (lazy allocations, worker
start, skipping to the place of a resume) is left out of every window.

A callback only notes what happened when: between two of them the processor has forgotten this code, and each line of it is slow. The notes
are added up many at a time, when somebody asks.

Known limit: times are the host's. By default Trainer reads the loss of each micro-batch (`logging_nan_inf_filter`), which waits for the
card, so they are honest; without it forward+backward is the time of launching.

Where ranks meet: the points just before they may wait for each other, marked so that the one that comes late can be told. They meet when
they count the tokens of the batch together (after fetching it), when DDP broadcasts buffers (before forward) and inside backward. The first
is marked by standing before `Trainer._get_num_items_in_batch` (transformers 5; without it on_step_begin has to do), the second by a hook on
the wrapped model. Only used with several ranks; both are taken away when training ends.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from hfopt.schema import Phases

Event = Literal[
    "train_begin",
    "epoch_begin",
    "fetched",
    "step_begin",
    "substep_end",
    "pre_optimizer",
    "optimizer",
    "step_end",
    "log",
    "prediction",
    "evaluate",
    "save",
    "end",
]
_PHASE: dict[Event, str] = {
    "train_begin": "other_s",
    "epoch_begin": "other_s",
    "fetched": "data_wait_s",  # only with several ranks, see marks.py
    "step_begin": "data_wait_s",
    "substep_end": "forward_backward_s",
    "pre_optimizer": "forward_backward_s",
    "optimizer": "optimizer_s",
    "step_end": "other_s",
    "log": "logging_s",
    "prediction": "eval_s",
    "evaluate": "eval_s",
    "save": "save_s",
    "end": "other_s",
}
_TRAINING = ("data_wait_s", "forward_backward_s", "optimizer_s", "other_s")
LONG_S = 5.0  # between two events: only then is it asked whether the process was stopped
_MOST_NOTES = 1024  # where nobody asks
STAMPS = 64  # steps of which a rank remembers when it came where
Mark = Literal["fetched", "begin", "forward_begin", "forward_end"]
Stamp = tuple[int, float, float, float, float]
"""A step, and the wall clock when its data was there, the forward began, the forward ended, the backward ended."""


class RunTime:
    """Seconds since 1970 as they were when the run began, going on by the monotonic clock: the system's clock may be set meanwhile."""

    def __init__(self) -> None:
        self._ahead_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._ahead_s + time.monotonic()


@dataclass(slots=True)
class Tally:
    """What has been counted since the last `take`."""

    began_s: float
    seconds: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    micro_batches: int = 0
    evals: int = 0
    saves: int = 0
    logs: int = 0
    stopped_s: float = 0.0  # in none of the phases: nobody trained
    counted_s: float = 0.0  # training of which the CPU time is known as well,
    counted_wait_s: float = 0.0  # the part of it that waited for data,
    cpu_s: float = 0.0  # and their CPU times
    wait_cpu_s: float = 0.0

    def free_wait(self) -> float | None:
        """The share of the wait for data as it would be if the thread never stood in the queue for a core; None where it was not counted.

        It queues in proportion to the CPU time it wants, so of the wait w = c + q·c/C + b and of all t = C + q + b, with CPU times c and C
        and the queue q, the time b for which it was truly blocked is (w - t·c/C) / (1 - c/C).
        """
        if self.cpu_s <= 0.0 or self.wait_cpu_s >= self.cpu_s:
            return None
        part = self.wait_cpu_s / self.cpu_s
        blocked_s = max(0.0, (self.counted_wait_s - part * self.counted_s) / (1.0 - part))
        return (blocked_s + self.wait_cpu_s) / (blocked_s + self.cpu_s)

    def phases(self) -> Phases:
        return Phases(**self.seconds)

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


class StepClock:
    """Fed with events in order by the training thread; each closes the stretch since the one before it and says what that was."""

    def __init__(self, now: Callable[[], float] | None = None, stopped: Callable[[float, float], float] | None = None) -> None:
        self._now, self._stopped = now or time.time, stopped
        self._warm = False
        self._evaluating = False
        self.warmup_s = 0.0
        self._last_s = self._began_s = time.monotonic()
        self._tally = Tally(began_s=self._last_s)
        self._fetched = False
        self.counts_cpu = True  # costs a call into the system for each event, so only where others use the machine
        self._last_cpu_s: float | None = None
        self._notes: deque[tuple[Event, float, float | None]] = deque()
        self._lock = threading.Lock()  # of those who ask; who notes needs none
        self._marks: dict[Mark, float] = {}
        self.stamps: deque[Stamp] = deque(maxlen=STAMPS)

    def event(self, event: Event) -> None:
        self._notes.append((event, time.monotonic(), time.thread_time() if self.counts_cpu else None))
        if len(self._notes) >= _MOST_NOTES:
            self._add_up()

    @property
    def warm(self) -> bool:
        """The first step is over."""
        self._add_up()
        return self._warm

    @property
    def evaluating(self) -> bool:
        self._add_up()
        return self._evaluating

    @property
    def tally(self) -> Tally:
        self._add_up()
        return self._tally

    def take(self) -> Tally:
        """The tally so far; counting starts anew."""
        self._add_up()
        with self._lock:
            taken, self._tally = self._tally, Tally(began_s=self._last_s)
        return taken

    def _add_up(self) -> None:
        with self._lock:
            while self._notes:
                self._happened(*self._notes.popleft())

    def _happened(self, event: Event, now_s: float, cpu_s: float | None) -> None:
        if self._warm:
            phase = _PHASE[event]
            if self._evaluating and event in ("log", "evaluate"):
                phase = "eval_s"
            elif event == "step_begin" and self._fetched:
                phase = "other_s"  # ranks count their tokens together, so the fast ones wait for the slow ones
            seconds, passed_s = self._tally.seconds, now_s - self._last_s
            if passed_s >= LONG_S and self._stopped is not None:
                stopped_s = self._stopped(self._last_s, now_s)
                self._tally.stopped_s += stopped_s
                passed_s -= stopped_s
            seconds[phase] = seconds.get(phase, 0.0) + passed_s
            if cpu_s is not None and self._last_cpu_s is not None and phase in _TRAINING:
                self._count_cpu(passed_s, cpu_s - self._last_cpu_s, waiting=phase == "data_wait_s")
            self._count(event)
        elif event == "step_end":
            self._warm = True
            self.warmup_s = now_s - self._began_s
            self._tally = Tally(began_s=now_s)
        if event == "prediction":
            self._evaluating = True
        elif event in ("evaluate", "step_begin"):
            self._evaluating = False
        self._fetched = event == "fetched"
        self._last_s, self._last_cpu_s = now_s, cpu_s

    def _count_cpu(self, wall_s: float, cpu_s: float, *, waiting: bool) -> None:
        tally = self._tally
        tally.counted_s += wall_s
        tally.cpu_s += cpu_s
        if waiting:
            tally.counted_wait_s += wall_s
            tally.wait_cpu_s += cpu_s

    def _count(self, event: Event) -> None:
        tally = self._tally
        if event == "substep_end":
            tally.micro_batches += 1
        elif event == "step_end":
            tally.steps += 1
            tally.micro_batches += 1
        elif event == "evaluate":
            tally.evals += 1
        elif event == "save":
            tally.saves += 1
        elif event == "log" and not self._evaluating:
            tally.logs += 1

    def mark(self, mark: Mark) -> None:
        self._marks[mark] = self._now()

    def finish_marks(self, step: int) -> None:
        """At the end of backward; a point that was not seen counts as the one before it."""
        begin = self._marks.get("begin", 0.0)
        fetched = self._marks.get("fetched", begin)
        entered = self._marks.get("forward_begin", begin)
        self.stamps.append((step, fetched, entered, self._marks.get("forward_end", entered), self._now()))
        self._marks.clear()


_COUNTING = "_get_num_items_in_batch"


class MeetingPoints:
    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._undo: list[Callable[[], Any]] = []

    def attach(self, trainer: Any) -> None:
        wrapped = getattr(trainer, "model_wrapped", None)
        if wrapped is not None and wrapped is not trainer.model:
            self._undo.append(wrapped.register_forward_pre_hook(self._before_forward).remove)
        if hasattr(trainer, _COUNTING) and _COUNTING not in vars(trainer):
            setattr(trainer, _COUNTING, self._marking(trainer, getattr(trainer, _COUNTING)))
            self._undo.append(lambda: vars(trainer).pop(_COUNTING, None))

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()

    def __reduce__(self) -> tuple[Callable[[], MeetingPoints], tuple[()]]:
        """A copied model takes its hooks along; there they mark a clock nobody reads."""
        return _inert, ()

    def _before_forward(self, module: Any, args: Any) -> None:
        self._clock.mark("forward_begin")

    def _marking(self, trainer: Any, count: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if trainer.model.training:  # evaluation counts too, but there nothing is fetched for a step
                self._clock.event("fetched")
                self._clock.mark("fetched")
            return count(*args, **kwargs)

        return counted


def _inert() -> MeetingPoints:
    return MeetingPoints(StepClock())
