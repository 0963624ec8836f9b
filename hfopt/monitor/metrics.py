"""How metrics and findings reach people elsewhere: TensorBoard, W&B, MLflow, Trackio, a command or webhook, the progress bar.

How the metrics reach TensorBoard, W&B, MLflow, trackio: through the Trainer's own reporting callbacks. A callback is not given the Trainer,
and Trainer puts the reporters before the user's callbacks, so adding keys to `logs` in on_log comes too late for them. The handler that
calls us stands on the stack, with the list of all callbacks: the reporters among them get an on_log of their own.

One line that says how the machine is doing, and where to show it: the Trainer's progress bar, in a terminal or a notebook.
HFGpuMonitor(on_finding="https://hooks.example.org/training") # POST, JSON HFGpuMonitor(on_finding="notify-send 'training'") # a command,
JSON on its stdin HFGpuMonitor(on_finding=lambda finding: print(finding["sentence"]))

All of it runs on a thread of its own, so no alert ever holds a step up; each has a time limit, the same cause is sent again only after a
while, and there is a most for a run. What fails is said once, and that way is switched off.
"""

from __future__ import annotations

import contextvars
import json
import queue
import shlex
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import FrameType
from typing import Any

from hfopt.errors import ConfigError
from hfopt.monitor.fault_guard import Faults
from hfopt.redact import said, scrub
from hfopt.schema import Finding, Sample, Window
from hfopt.units import GIB

PREFIX = "hfopt/"
_MOST_FRAMES = 12


def find_callers() -> tuple[Any | None, Any | None]:
    """The CallbackHandler whose event is being handled and the Trainer it belongs to, from the stack."""
    from transformers.trainer_callback import CallbackHandler

    handler: Any | None = None
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        owner = frame.f_locals.get("self")
        if handler is None and isinstance(owner, CallbackHandler):
            handler = owner
        elif handler is not None and getattr(owner, "callback_handler", None) is handler:
            return handler, owner
        frame = frame.f_back
    return handler, None


def put_last(handler: Any, callback: Any) -> None:
    """So that its clock counts the other callbacks as part of the step. The list is replaced: the handler may be walking it."""
    handler.callbacks = [*(other for other in handler.callbacks if other is not callback), callback]


def reporters(handler: Any) -> list[Any]:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    kinds = tuple(INTEGRATION_TO_CALLBACK.values())
    return [callback for callback in handler.callbacks if isinstance(callback, kinds)]


def report(handler: Any, args: Any, state: Any, control: Any, metrics: Mapping[str, float]) -> None:
    for callback in reporters(handler):
        callback.on_log(
            args,
            state,
            control,
            logs=dict(metrics),
            model=handler.model,
            processing_class=getattr(handler, "processing_class", None),
            optimizer=handler.optimizer,
            lr_scheduler=handler.lr_scheduler,
            train_dataloader=handler.train_dataloader,
            eval_dataloader=handler.eval_dataloader,
        )


Get = Callable[[Window], float | None]


def _cards(get: Callable[[Any], float | None], join: Callable[[list[float]], float]) -> Get:
    """A figure of each card of this process, joined to one."""

    def joined(window: Window) -> float | None:
        values = [value for gpu in window.gpus if (value := get(gpu)) is not None]
        return join(values) if values else None

    return joined


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _per_step(name: str) -> Get:
    return lambda window: getattr(window.phases, name) / window.steps if window.steps else None


def _share(name: str, of: str) -> Get:
    return lambda window: getattr(window.phases, name) / whole if (whole := getattr(window.phases, of)) else None


def _percent(share: float | None) -> float | None:
    return 100 * share if share is not None else None


def _gib(size: int | None) -> float | None:
    return size / GIB if size is not None else None


KEYS: dict[str, tuple[Get, str]] = {
    "gpu_util": (_cards(lambda gpu: gpu.sm_util and 100 * gpu.sm_util.mean, _mean), "% of the time a kernel ran (NVML), mean"),
    "gpu_util_min": (_cards(lambda gpu: gpu.sm_util and 100 * gpu.sm_util.low, min), "%, lowest reading"),
    "gpu_util_max": (_cards(lambda gpu: gpu.sm_util and 100 * gpu.sm_util.high, max), "%, highest reading"),
    "gpu_memory_util": (
        _cards(lambda gpu: gpu.memory_util and 100 * gpu.memory_util.mean, _mean),
        "% of the time memory was read or written",
    ),
    "gpu_memory_used_gib": (_cards(lambda gpu: _gib(gpu.used_bytes), max), "GiB in use on the card, all processes, peak"),
    "memory_allocated_gib": (
        lambda window: _gib(window.allocated_peak_bytes),
        "GiB, torch's peak of allocated memory since the process began",
    ),
    "memory_reserved_gib": (
        lambda window: _gib(window.reserved_peak_bytes),
        "GiB, torch's peak of reserved memory since the process began",
    ),
    "gpu_power_w": (_cards(lambda gpu: gpu.power_w and gpu.power_w.mean, sum), "W, mean, cards of this process added up"),
    "gpu_temperature_c": (_cards(lambda gpu: gpu.temperature_c and gpu.temperature_c.high, max), "°C, highest"),
    "energy_j": (lambda window: window.energy_j, "J used by the cards of this process in the window"),
    "samples_per_s": (lambda window: window.per_second(window.samples), "samples/s, all ranks"),
    "tokens_per_s": (lambda window: window.per_second(window.tokens), "tokens/s with padding, all ranks"),
    "mfu": (lambda window: window.mfu, "share of the device's peak FLOPs reached while training (0..1)"),
    "data_wait": (_share("data_wait_s", "train_s"), "share of the training time spent waiting for data (0..1)"),
    "step_s": (lambda window: window.step_s, "s per optimizer step without logging, evaluation and saving"),
    "forward_backward_s": (_per_step("forward_backward_s"), "s per step"),
    "optimizer_s": (_per_step("optimizer_s"), "s per step"),
    "other_s": (_per_step("other_s"), "s per step: scheduler, zeroing gradients, callbacks"),
    "eval_share": (_share("eval_s", "total_s"), "share of the wall clock (0..1)"),
    "logging_share": (_share("logging_s", "total_s"), "share of the wall clock (0..1)"),
    "save_share": (_share("save_s", "total_s"), "share of the wall clock (0..1)"),
    "padding": (lambda window: window.padding_share, "share of the tokens that are padding, of the batches looked at (0..1)"),
    "alloc_retries": (lambda window: window.alloc_retries, "times the allocator had to flush its cache in the window"),
    "cpu_util": (
        lambda window: 100 * window.cpu_util.mean if window.cpu_util else None,
        "% of the usable cores, this process and its loader workers",
    ),
    "main_thread_util": (lambda window: _percent(window.main_thread_util), "% of one core, the training thread"),
    "core_wait": (lambda window: window.core_wait, "share of the time the training thread wanted to run and had no core (0..1)"),
    "ram_used_gib": (lambda window: _gib(window.ram_used_bytes), "GiB in use on the machine, peak"),
    "disk_read_mib_per_s": (
        lambda window: window.disk_read_bytes_per_s / (1 << 20) if window.disk_read_bytes_per_s is not None else None,
        "MiB/s read by this process and its workers",
    ),
}
"""Every key that is reported: how it is computed, and its unit and meaning. docs/monitor.md shows this table."""


def metrics(window: Window) -> dict[str, float]:
    """The known ones, under their full names."""
    found = {PREFIX + name: get(window) for name, (get, _meaning) in KEYS.items()}
    return {name: float(value) for name, value in found.items() if value is not None}


def status_line(sample: Sample, data_wait_share: float | None) -> str:
    """GPU: 85% | VRAM: 12.3/24.0GiB (51.2%) | CPU: 45.2% | RAM: 18.4/64.0GiB (28.8%) | data wait 3% ; what is unknown is left out."""
    parts: list[str] = []
    utils = [gpu.sm_util for gpu in sample.gpus if gpu.sm_util is not None and "sm_util" not in gpu.suspect]
    if utils:
        parts.append(f"GPU: {100 * sum(utils) / len(utils):.0f}%")
    memory = [(gpu.used_bytes, gpu.total_bytes) for gpu in sample.gpus if gpu.used_bytes is not None and gpu.total_bytes]
    if memory:
        parts.append(f"VRAM: {_of(sum(used for used, _ in memory), sum(total for _, total in memory))}")
    if sample.cpu_util is not None:
        parts.append(f"CPU: {100 * sample.cpu_util:.1f}%")
    if sample.ram_used_bytes is not None and sample.ram_total_bytes:
        parts.append(f"RAM: {_of(sample.ram_used_bytes, sample.ram_total_bytes)}")
    if data_wait_share is not None:
        parts.append(f"data wait {100 * data_wait_share:.0f}%")
    return " | ".join(parts)


def _of(used: int, total: int) -> str:
    percent = round(100 * used / total, 4)  # a byte below 28.75 % is not 28.7 %
    return f"{used / GIB:.1f}/{total / GIB:.1f}GiB ({percent:.1f}%)"


def show(callbacks: Sequence[Any], text: str) -> None:
    """On the bar of ProgressCallback (drawn with its next refresh) or before the one of NotebookProgressCallback."""
    for callback in callbacks:
        if (bar := getattr(callback, "training_bar", None)) is not None and hasattr(bar, "set_postfix_str"):
            bar.set_postfix_str(text, refresh=False)
        elif (tracker := getattr(callback, "training_tracker", None)) is not None:
            tracker.prefix = text


def say(callbacks: Sequence[Any], text: str) -> None:
    """A line for people on stderr; above the bar if there is one, so that neither breaks the other."""
    text = said(text)
    for callback in callbacks:
        bar = getattr(callback, "training_bar", None)
        if bar is not None and hasattr(bar, "write"):
            bar.write(text, file=sys.stderr)
            return
    sys.stderr.write(f"{text}\n")


OnFinding = Callable[[Mapping[str, Any]], object] | str
Send = Callable[[Mapping[str, Any]], object]
EACH_S, MOST = 600.0, 50  # between two alerts of one cause; of a run
WEBHOOK_S, COMMAND_S, CLOSING_S = 5.0, 30.0, 3.0
_FAILURES = 3  # in a row, after which a way is switched off: a hook may be out of reach for a moment
_OF_A_SHELL = frozenset({"|", "||", "&&", "&", ";", ">", ">>", "<", "2>&1"})
_WAITING = 16  # alerts that may wait to be sent; more are dropped


def sender(wish: OnFinding) -> tuple[str, Send]:
    """(what it is called in messages, what sends). A text that is neither a URL nor a command is refused at once."""
    if callable(wish):
        return "on_finding (function)", wish
    if not isinstance(wish, str) or not wish.strip():
        raise ConfigError("on_finding is a function, a URL or a command", hint="for example on_finding='https://hooks.example.org/x'")
    if wish.startswith(("http://", "https://")):
        return "on_finding (webhook)", lambda alert: _post(wish, alert)
    try:
        words = shlex.split(wish)
    except ValueError as error:
        raise ConfigError(f"on_finding: {wish!r} is not a command: {error}") from error
    if (operator := next((word for word in words if word in _OF_A_SHELL), None)) is not None:
        raise ConfigError(f"on_finding runs without a shell: {operator!r} would be an argument", hint=f"sh -c {shlex.quote(wish)}")
    return "on_finding (command)", lambda alert: _run(words, alert)


def tracker_senders(reporters: list[Any]) -> list[tuple[str, Send]]:
    """Of the trackers that the Trainer reports to and that have alerts."""
    kinds = {type(reporter).__name__ for reporter in reporters}
    found: list[tuple[str, Send]] = []
    if "WandbCallback" in kinds:
        found.append(("W&B alerts", _wandb))
    if "TrackioCallback" in kinds:
        found.append(("Trackio alerts", _trackio))
    return found


def alert_of(finding: Finding, *, sentence: str, step: int, log: str) -> dict[str, Any]:
    """What is sent: a JSON-able mapping without credentials."""
    whole = asdict(finding) | {"sentence": sentence, "step": step, "log": log, "time": time.time()}
    return {key: scrub(value, key) for key, value in whole.items()}


class Alerts:
    """Takes findings on the training thread and sends them on its own."""

    def __init__(self, senders: list[tuple[str, Send]], faults: Faults, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._senders, self._faults, self._clock = senders, faults, clock
        self._sent_s: dict[str, float] = {}
        self._count = 0
        self._waiting: queue.Queue[tuple[contextvars.Context, Mapping[str, Any]] | None] = queue.Queue(maxsize=_WAITING)
        self._thread: threading.Thread | None = None

    def send(self, cause: str, alert: Callable[[], Mapping[str, Any]]) -> bool:
        """Never waits: False where the rate limit holds it back or too many wait already. `alert` is asked only where it is sent."""
        now_s = self._clock()
        if not self._senders or self._count >= MOST or now_s - self._sent_s.get(cause, -EACH_S) < EACH_S:
            return False
        try:
            # Trackio finds its run by a context variable, which a thread of ours would not have
            self._waiting.put_nowait((contextvars.copy_context(), alert()))
        except queue.Full:
            return False
        self._sent_s[cause], self._count = now_s, self._count + 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="hfopt-alerts", daemon=True)
            self._thread.start()
        return True

    def close(self) -> None:
        """Gives what waits a little time, and no more."""
        if self._thread is None:
            return
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(CLOSING_S)

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            context, alert = item
            for name, send in self._senders:
                if name in self._faults.off:
                    continue
                try:
                    context.run(send, alert)
                except Exception as error:  # noqa: BLE001 - the user's own code and other people's services: the run goes on
                    self._faults.failed(name, error, most=_FAILURES)
                else:
                    self._faults.worked(name)


def _post(url: str, alert: Mapping[str, Any]) -> None:
    body = json.dumps({"text": alert["sentence"], **alert}, default=str).encode()  # Slack and Discord-like hooks show `text`
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=WEBHOOK_S):
        pass


def _run(words: list[str], alert: Mapping[str, Any]) -> None:
    done = subprocess.run(words, input=json.dumps(alert, default=str), text=True, capture_output=True, timeout=COMMAND_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{words[0]} ended with {done.returncode}: {done.stderr.strip()[-200:]}")


def _wandb(alert: Mapping[str, Any]) -> None:
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is not None:
        run.alert(title=f"hfopt: {alert['cause']}", text=_text(alert))


def _trackio(alert: Mapping[str, Any]) -> None:
    send = getattr(sys.modules.get("trackio"), "alert", None)
    if send is not None:  # since Trackio has alerts
        send(title=f"hfopt: {alert['cause']}", text=_text(alert))


def _text(alert: Mapping[str, Any]) -> str:
    """The sentence without the cause, which is the title."""
    return str(alert["sentence"]).removeprefix(f"{alert['cause']}: ")
