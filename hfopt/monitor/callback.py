"""HFGpuMonitor: a TrainerCallback that says what holds the run back and which setting to change.

    Trainer(..., callbacks=[HFGpuMonitor()])

It adds no device sync and no collective; whatever fails inside it is said once and training goes on. Each train() is a session of its
own and belongs to its thread, so resuming, calling train() again and one monitor in two Trainers at once are safe. A copy or a pickle of
the callback carries its options only; a forked process watches nothing, for the run is its parent's.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from hfopt.monitor import metrics
from hfopt.monitor.fault_guard import Faults, switched_off_on_error, to_stderr
from hfopt.monitor.metrics import OnFinding, sender
from hfopt.monitor.model_inputs import flops_per_token
from hfopt.monitor.session import Options, Training, WatchSession
from hfopt.monitor.step_clock import Event

_PART = "the monitor"
_watching: weakref.WeakSet[HFGpuMonitor] = weakref.WeakSet()


def _passing_on(event: Event) -> Callable[..., None]:
    """A callback that only has it noted that it happened; it runs in every step, and there is nothing in it that can fail."""

    def callback(self: HFGpuMonitor, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        session = self._sessions.get(threading.get_ident())
        if session is not None:
            session.event(event)

    return callback


@functools.cache
def _mind_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget_in_fork)


def _forget_in_fork() -> None:
    """The threads are the parent's, and so are the locks that they may hold."""
    for monitor in list(_watching):
        sessions, monitor._sessions = monitor._sessions, {}
        for session in sessions.values():
            session.detach()


class HFGpuMonitor(TrainerCallback):  # type: ignore[misc]
    """Watches a Trainer.

    interval          seconds between two readings of the cards and the host
    warn_below        GPU utilization in % that is worth a warning even if no cause is found
    output            folder (or .jsonl file) of the log; default `<output_dir>/hfopt`
    live              status on the Trainer's progress bar
    csv               the windows also as a table
    report            metrics to what the Trainer reports to (TensorBoard, W&B, MLflow, trackio, ...)
    plan              an `hfopt.Plan`: advice then carries its values and its predicted gain
    on_finding        a function, a URL (POST, JSON) or a command (JSON on stdin) that gets each finding, on a thread of its own; W&B's and
                      Trackio's alerts get them anyway where the Trainer reports there
    flops_per_sample  FLOPs of one training sample, for MFU, where the count of the first step is not right
    """

    def __init__(
        self,
        interval: float = 1.0,
        warn_below: float = 30,
        output: str | Path | None = None,
        live: bool = True,
        *,
        csv: bool = False,
        report: bool = True,
        plan: Any = None,
        flops_per_sample: float | None = None,
        on_finding: OnFinding | None = None,
    ) -> None:
        if interval <= 0:
            raise ValueError(f"interval is {interval}, but must be positive seconds")
        if on_finding is not None:
            sender(on_finding)  # a bad one is said now, not in the run
        self._options = Options(
            interval_s=interval,
            warn_below=warn_below,
            output=Path(output) if output is not None else None,
            live=live,
            csv=csv,
            report=report,
            plan=plan,
            flops_per_sample=flops_per_sample,
            on_finding=on_finding,
        )
        self._fresh()

    def _fresh(self) -> None:
        self.faults = Faults(to_stderr, self._give_up)
        self._sessions: dict[int, WatchSession] = {}  # by the thread that trains
        self._flops_per_token: float | None = None
        self._folder: Path | None = None  # of the last run's log

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._fresh()

    @switched_off_on_error("stopping")
    def _give_up(self, part: str) -> None:
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            session.stop()

    @property
    def _session(self) -> WatchSession | None:
        return self._sessions.get(threading.get_ident())

    def _repr_html_(self) -> str:
        """What a notebook shows: the run it watches, or the last one, as `hfopt watch` shows it."""
        from hfopt.monitor.screen import live_html

        return "<pre>HFGpuMonitor: no train() yet</pre>" if self._folder is None else live_html(self._folder)

    def write(self, kind: str, **fields: Any) -> None:
        """A line of your own in the run's log; nothing happens outside of train()."""
        if self._session is not None:
            self._session.journal.write(kind, **fields)

    @switched_off_on_error(_PART)
    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._flops_per_token = flops_per_token(model)  # before the model is wrapped or sharded

    @switched_off_on_error(_PART)
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        _mind_forks()
        _watching.add(self)
        if self._session is not None:
            self._session.stop()  # the train() before did not come to its end
        handler, trainer = metrics.find_callers()
        if handler is not None:
            metrics.put_last(handler, self)
        if self._flops_per_token is None and model is not None:
            self._flops_per_token = flops_per_token(model)
        self._folder = self._options.log_path(args.output_dir, 0).parent
        training = Training(args=args, state=state, model=model, handler=handler, trainer=trainer, flops_per_token=self._flops_per_token)
        self._sessions[threading.get_ident()] = WatchSession(self._options, training)

    on_epoch_begin = _passing_on("epoch_begin")
    on_step_begin = _passing_on("step_begin")
    on_substep_end = _passing_on("substep_end")
    on_pre_optimizer_step = _passing_on("pre_optimizer")
    on_optimizer_step = _passing_on("optimizer")
    on_step_end = _passing_on("step_end")
    on_prediction_step = _passing_on("prediction")
    on_evaluate = _passing_on("evaluate")
    on_save = _passing_on("save")

    @switched_off_on_error(_PART)
    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._session is not None:
            self._session.log(args, state, control)

    @switched_off_on_error(_PART)
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._session is not None:
            self._session.epoch_end(state)

    @switched_off_on_error(_PART)
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._session is not None:
            self._session.end(args, state, control)
            self._sessions.pop(threading.get_ident(), None)
