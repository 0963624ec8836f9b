"""One train() call, watched: windows close at logging steps, are judged, written, reported and summed up.

What a user may set on HFGpuMonitor, as one value. Is train() still going on? Its frame is looked for on the training thread's stack, where
an error or Ctrl-C leaves none. A callback is not told when train() is left by an exception. Only code objects are compared: a frame that is
kept, or whose locals are read, would hold the user's tensors.

The work done for a log (writing, reporting, judging) is kept within two thousandths of the run's time: where it would take more, because
every step is logged, a window is joined with the next one.
"""

from __future__ import annotations

import atexit
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from hfopt.monitor import log as journal
from hfopt.monitor import metrics, run_setup, run_text
from hfopt.monitor.diagnose import Judge, sentence
from hfopt.monitor.evidence import GrowthWatch
from hfopt.monitor.fault_guard import Faults, switched_off_on_error
from hfopt.monitor.history import receipt_lines, receipt_of
from hfopt.monitor.host_usage import HostProbe
from hfopt.monitor.log import NAME, Journal
from hfopt.monitor.metrics import Alerts, OnFinding, Send, alert_of, sender, tracker_senders
from hfopt.monitor.model_inputs import InputWatch
from hfopt.monitor.run_setup import facts_of, find_place, growing_gradients, scale_of
from hfopt.monitor.sampler import Sampler
from hfopt.monitor.step_clock import Event, MeetingPoints, RunTime, StepClock
from hfopt.monitor.window import Meter, Total, data_share, merge
from hfopt.schema import Finding, RankLag, Sample, Window
from hfopt.units import format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    interval_s: float = 1.0
    warn_below: float = 30.0  # %, GPU utilization that is worth a word even if no cause is found
    output: Path | None = None
    live: bool = True
    csv: bool = False
    report: bool = True
    plan: Any = None
    flops_per_sample: float | None = None
    on_finding: OnFinding | None = None
    max_log_bytes: int = journal.MOST_BYTES

    def log_path(self, output_dir: str | None, rank: int) -> Path:
        """`<output_dir>/hfopt/monitor.jsonl` unless another is given; a rank other than the first has its own file beside it."""
        target = self.output if self.output is not None else Path(output_dir or ".") / "hfopt"
        path = target if target.suffix == ".jsonl" else target / NAME
        return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


_ENTRY = "train"


class TrainCall:
    """One call of train(): made inside it, asked from another thread whether it still runs."""

    def __init__(self, trainer: Any) -> None:
        self._thread = threading.get_ident()
        on_stack = set(_codes(sys._getframe(1)))
        self._entries = {number: code for number, code in _entries(trainer).items() if number in on_stack}

    def runs(self) -> bool:
        """True also where nobody can know."""
        if not self._entries:
            return True
        return any(number in self._entries for number in _codes(sys._current_frames().get(self._thread)))


def _codes(frame: FrameType | None) -> Iterator[int]:
    """By identity: code that torch.compile made may hold what cannot be hashed."""
    while frame is not None:
        yield id(frame.f_code)
        frame = frame.f_back


def _entries(trainer: Any) -> dict[int, CodeType]:
    """By identity, the code of every `train` that the class or one of its bases has, without what was wrapped around it."""
    found = (inspect.unwrap(vars(kind)[_ENTRY]) for kind in type(trainer).__mro__ if _ENTRY in vars(kind))
    return {id(function.__code__): function.__code__ for function in found if hasattr(function, "__code__")}


_BUDGET, _GRACE_S = 0.002, 0.005  # the latter is about ten windows: a short run is reported window by window
_LATEST = 100  # entries of the Trainer's own log
_RANKS_EACH_S, _WAIT_FOR_RANKS_S = 10.0, 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What on_train_begin knows; handler and trainer are None where the stack did not show them."""

    args: Any
    state: Any
    model: Any
    handler: Any
    trainer: Any
    flops_per_token: float | None


class WatchSession:
    def __init__(self, options: Options, training: Training) -> None:
        args, state = training.args, training.state
        self._options, self._handler, self._state = options, training.handler, state
        self._first = bool(state.is_world_process_zero)
        self.faults = Faults(self.say)
        self._rank, self._world = args.process_index, args.world_size
        self._pid = os.getpid()
        self._now = RunTime()
        self._began_s, self._began_time, self._spent_s, self._ranks_s = time.monotonic(), self._now(), 0.0, float("-inf")
        self._total, self._epoch = Total(), Total()
        self._unreported: list[Window] = []
        self._lags: tuple[RankLag, ...] = ()
        self._data_wait: float | None = None
        self._place = find_place(args)
        self.journal = self._open_journal(training)
        if self._place.why_no_cards:
            self.faults.report("GPU readings", RuntimeError(self._place.why_no_cards))
        if (fault := growing_gradients(training.trainer, options.plan)) is not None:
            self.say(f"hfopt: warning: {fault}")
        self.clock = StepClock(self._now, lambda began_s, ended_s: self._sampler.stopped_s(began_s, ended_s))
        host = HostProbe(thread=threading.current_thread(), cores=self._place.cores)
        self._call = TrainCall(training.trainer)
        self._sampler = Sampler(
            gpus=self._place.cards, host=host, faults=self.faults, interval_s=options.interval_s, each=self._live, over=self._is_over
        )
        self._meeting = MeetingPoints(self.clock)
        if self._world > 1 and training.trainer is not None:
            self._meeting.attach(training.trainer)
        self._inputs = InputWatch(
            self.faults,
            partial(self.clock.mark, "forward_end") if self._world > 1 else None,
            counts_flops=options.flops_per_sample is None and self._world == 1,  # what is sharded counts only its part
        )
        if training.model is not None and not args.torch_compile and not hasattr(training.model, "_orig_mod"):
            self._inputs.attach(training.model)
        scale = scale_of(args, self._place, flops_per_token=training.flops_per_token, flops_per_sample=options.flops_per_sample)
        self._meter = Meter(self.clock, self._sampler, self._inputs, scale)
        facts = facts_of(args, state, self._place, options.plan, training.model)
        self._alerts = Alerts(self._senders(), self.faults)
        self._judge = Judge(facts, self.journal, self.say, options.warn_below, self._alert)
        self._growth = GrowthWatch(scale.devices)
        self.event: Callable[[Event], None] = self._first_step  # the callbacks of every step; replaced by the least that does
        self._sampler.start()
        atexit.register(self._interrupted)
        self.clock.event("train_begin")

    def _open_journal(self, training: Training) -> Journal:
        args, state, place = training.args, training.state, self._place
        path = self._options.log_path(args.output_dir, self._rank)
        options, ranks = self._options, {"rank": self._rank, "world_size": self._world}
        journal = Journal(path, **ranks, csv=options.csv, max_bytes=options.max_log_bytes, faults=self.faults, now=self._now)
        journal.state.update(max_steps=state.max_steps, cores=place.cores)
        journal.write(
            "header",
            rank=self._rank,
            world_size=self._world,
            device=args.device.type,
            gpus=run_setup.cards(place.gpus, place.uuids),
            cores=place.cores,
            first_step=state.global_step,
            max_steps=state.max_steps,
            model=type(training.model).__name__,
            config=run_setup.config(args),
            versions=run_setup.versions(),
        )
        return journal

    def _senders(self) -> list[tuple[str, Send]]:
        """Of the first rank only: one alert of a finding is enough."""
        if not self._first:
            return []
        own = [] if self._options.on_finding is None else [sender(self._options.on_finding)]
        return [*own, *([("alerts of the trackers", self._to_trackers)] if self._options.report and self._handler is not None else [])]

    def _to_trackers(self, alert: Mapping[str, Any]) -> None:
        for _, send in tracker_senders(metrics.reporters(self._handler)):
            send(alert)

    def _alert(self, finding: Finding, step: int) -> None:
        log = str(self.journal.path)
        self._alerts.send(finding.cause, lambda: alert_of(finding, sentence=sentence(finding), step=step, log=log))

    def say(self, text: str) -> None:
        if self._first:
            metrics.say(self._handler.callbacks if self._handler is not None else (), text)

    def _first_step(self, event: Event) -> None:
        self._among_ranks(event)
        if event == "step_end":
            self._begin()
            self.event = self._among_ranks if self._world > 1 else self.clock.event

    @switched_off_on_error("the windows")
    def _begin(self) -> None:
        self._meter.begin(self._state)

    def _among_ranks(self, event: Event) -> None:
        self.clock.event(event)
        if event == "step_begin":
            self.clock.mark("begin")
        elif event == "pre_optimizer":
            self.clock.finish_marks(self._state.global_step)

    def log(self, args: Any, state: Any, control: Any) -> None:
        inside_evaluation = self.clock.evaluating
        self.clock.event("log")
        last = state.global_step >= state.max_steps
        if inside_evaluation or not (last or self._spent_s <= _GRACE_S + _BUDGET * (time.monotonic() - self._began_s)):
            return
        began_s = time.monotonic()
        self._close(state)
        self._flush(args, state, control)
        self._verdict()
        self._spent_s += time.monotonic() - began_s

    def epoch_end(self, state: Any) -> None:
        self.clock.event("end")
        self._close(state)
        if (epoch := self._epoch.window()) is not None:
            figures = metrics.metrics(epoch)
            self.journal.write("epoch", epoch=state.epoch, step=state.global_step, metrics=figures)
            self.say(f"hfopt: epoch {state.epoch:.4g}: {run_text.one_line(figures)}")
            self._epoch = Total()

    def end(self, args: Any, state: Any, control: Any) -> None:
        self.clock.event("end")
        self._inputs.detach()
        self._close(state)
        self._flush(args, state, control)
        self.stop()
        if (total := self._total.window()) is None:
            return
        figures = metrics.metrics(total)
        self.journal.note(list(self.clock.stamps), figures, ended=True)
        notes = self._notes(wait_s=_WAIT_FOR_RANKS_S) if self._first else {}
        findings = self._judge.whole(total, journal.lags_of_notes(notes, since=self._began_time)) if self._first else ()
        facts = {
            "step": state.global_step,
            "steps": total.steps,
            "seconds": total.seconds,
            "warmup_s": self.clock.warmup_s,
            "phases": total.phases,
            "metrics": figures,
            "findings": [finding.cause for finding in findings],
            "ranks": {str(rank): note["summary"] for rank, note in notes.items()},
            "off": self.faults.off,
        }
        receipt = receipt_of(self._options.plan, args, figures)
        if receipt is not None:
            self.journal.write("receipt", **asdict(receipt))
        self.journal.write("summary", **facts)
        self.journal.state.update(ended=True, step=state.global_step)
        self.journal.live(None, "", self._data_wait)
        self.journal.close()
        self.say(run_text.final_lines(total, figures, findings, self.journal.path))
        if receipt is not None:
            lines = receipt_lines(receipt, (finding.cause for finding in findings))
            self.say("\n".join(f"hfopt: plan for {receipt.planned_for}: {line}" for line in lines))
        self._alerts.close()

    def detach(self) -> None:
        """What it put into model and Trainer is taken out; no lock is asked for."""
        self._inputs.detach()
        self._meeting.detach()

    def stop(self) -> None:
        """Also for a session whose train() did not come to its end."""
        atexit.unregister(self._interrupted)
        ended = self._sampler.stop()
        self.detach()
        self.journal.close()
        if self._place.cards is not None and ended:  # a driver that hangs would hang here too
            self._place.cards.close()

    def _is_over(self) -> bool:
        if self._call.runs():
            return False
        self._interrupted()
        return True

    @switched_off_on_error("the note of the end")
    def _interrupted(self) -> None:
        """An error, Ctrl-C or sys.exit() left train(): nobody calls on_train_end any more. A fork that ends is not the run that ends."""
        if os.getpid() != self._pid:
            return
        self.journal.write("interrupted", step=self._state.global_step)
        self.journal.state.update(ended=True, step=self._state.global_step)
        self.journal.live(None, "", self._data_wait)
        self.stop()

    def _close(self, state: Any) -> None:
        window = self._meter.close(state)
        if window is None:
            return
        if window.stopped_s:
            text = f"the process stood still for {format_seconds(window.stopped_s)} (stopped or frozen); that time is not counted"
            self.journal.write("warning", step=state.global_step, message=text)
            self.say(f"hfopt: {text}")
        self._unreported.append(window)
        self.journal.state.update(s_per_step=window.seconds / window.steps, loss=_last_loss(state))
        self._data_wait = data_share(window)
        self._total.add(window)
        self._epoch.add(window)
        self._judge.add(window)

    def _flush(self, args: Any, state: Any, control: Any) -> None:
        if not self._unreported:
            return
        window = merge(self._unreported)
        self._unreported.clear()
        figures = self.journal.window(window, epoch=state.epoch)
        self.journal.state["pace"] = run_text.one_line(figures)
        if self._first and self._options.report and self._handler is not None:
            self._report(args, state, control, figures)

    @switched_off_on_error("reporting")
    def _report(self, args: Any, state: Any, control: Any, figures: dict[str, float]) -> None:
        metrics.report(self._handler, args, state, control, figures)

    @switched_off_on_error("diagnosis")
    def _verdict(self) -> None:
        self.journal.note(list(self.clock.stamps), {})
        now_s = time.monotonic()
        if self._first and self._world > 1 and now_s - self._ranks_s >= _RANKS_EACH_S:
            self._ranks_s = now_s
            self._lags = journal.lags_of_notes(self._notes(), since=self._began_time)
        self._judge.recent(self._lags)
        if (creep := self._growth.look(self._state.global_step)) is not None:
            self._judge.report(creep, self._state.global_step)

    def _notes(self, wait_s: float = 0.0) -> dict[int, dict[str, Any]]:
        """Of all ranks; waits a little for those that have not ended yet."""
        if self._world == 1:
            return {}
        until_s = time.monotonic() + wait_s
        while True:
            notes = journal.read_notes(self.journal.path.parent, self._world, since=self._began_time)
            done = len(notes) == self._world and all(note["ended"] for note in notes.values())
            if done or time.monotonic() >= until_s:
                return notes
            time.sleep(0.05)

    def _live(self, sample: Sample) -> None:
        """Each reading, on the sampler's thread: the training thread has better to do."""
        wait = self._current_wait()
        line = metrics.status_line(sample, wait)
        self.journal.state["step"] = self._state.global_step
        self.journal.live(sample, line, wait)
        self._show(line)

    @switched_off_on_error("the live status")
    def _show(self, line: str) -> None:
        if self._options.live and self._first and self._handler is not None:
            metrics.show(self._handler.callbacks, line)

    def _current_wait(self) -> float | None:
        tally = self.clock.tally
        if tally.steps < 3:
            return self._data_wait
        phases = tally.phases()
        return phases.data_wait_s / phases.train_s if phases.train_s else None


def _last_loss(state: Any) -> float | None:
    """The last one the Trainer logged; a script that logs none is not searched to its beginning at each window."""
    found = next((entry["loss"] for entry in islice(reversed(state.log_history), _LATEST) if "loss" in entry), None)
    return float(found) if isinstance(found, int | float) else None
