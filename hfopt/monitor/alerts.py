"""Findings that reach people elsewhere: W&B's and Trackio's alerts, and a function, command or webhook of the user's (`on_finding=`).

    HFGpuMonitor(on_finding="https://hooks.example.org/training")   # POST, JSON
    HFGpuMonitor(on_finding="notify-send 'training'")               # a command, JSON on its stdin
    HFGpuMonitor(on_finding=lambda finding: print(finding["sentence"]))

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
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from hfopt.errors import ConfigError
from hfopt.monitor.fault_guard import Faults
from hfopt.redact import scrub
from hfopt.schema import Finding

OnFinding = Callable[[Mapping[str, Any]], object] | str
Send = Callable[[Mapping[str, Any]], object]
EACH_S, MOST = 600.0, 50  # between two alerts of one cause; of a run
WEBHOOK_S, COMMAND_S, CLOSING_S = 5.0, 30.0, 3.0
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
                    self._faults.report(name, error)


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
        run.alert(title=f"hfopt: {alert['cause']}", text=alert["sentence"])


def _trackio(alert: Mapping[str, Any]) -> None:
    send = getattr(sys.modules.get("trackio"), "alert", None)
    if send is not None:  # since Trackio has alerts
        send(title=f"hfopt: {alert['cause']}", text=alert["sentence"])
