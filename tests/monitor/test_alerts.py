"""Findings reach people elsewhere, seldom enough, and nothing of it reaches the run."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from watched import facts, window

from hfopt.errors import ConfigError
from hfopt.monitor import metrics
from hfopt.monitor.callback import HFGpuMonitor
from hfopt.monitor.diagnose import diagnose, sentence
from hfopt.monitor.fault_guard import Faults
from hfopt.monitor.metrics import EACH_S, MOST, Alerts, alert_of, sender, tracker_senders
from hfopt.schema import Finding

FINDING = Finding(cause="data_bound", confidence=0.9, evidence={"wait": 0.5}, message="the loader is slow")  # type: ignore[arg-type]


def the_alert() -> dict[str, Any]:
    return alert_of(FINDING, sentence=sentence(FINDING), step=7, log="out/hfopt/monitor.jsonl")


class Inbox:
    def __init__(self) -> None:
        self.got: list[Mapping[str, Any]] = []
        self.said: list[str] = []

    def alerts(self, *more: tuple[str, Any], clock: Any = lambda: 0.0) -> Alerts:
        return Alerts([*more, ("inbox", self.got.append)], Faults(self.said.append), clock=clock)


def test_a_finding_is_sent_on_another_thread() -> None:
    inbox, threads = Inbox(), []
    sending = inbox.alerts(("thread", lambda alert: threads.append(threading.current_thread().name)))
    assert sending.send("data_bound", the_alert)
    sending.close()
    (alert,) = inbox.got
    assert alert["cause"] == "data_bound" and alert["step"] == 7 and alert["sentence"].startswith("data_bound: the loader is slow")
    assert threads == ["hfopt-alerts"] and json.dumps(alert)


def test_one_cause_is_sent_again_only_after_a_while_and_a_run_has_a_most() -> None:
    inbox, now = Inbox(), [0.0]
    sending = inbox.alerts(clock=lambda: now[0])
    assert sending.send("a", the_alert) and not sending.send("a", the_alert) and sending.send("b", the_alert)
    now[0] = EACH_S
    assert sending.send("a", the_alert)
    sending._count = MOST
    now[0] = 10 * EACH_S
    assert not sending.send("c", the_alert)
    sending.close()
    assert len(inbox.got) == 3


def test_a_way_that_fails_is_tried_again_and_switched_off_after_three_in_a_row() -> None:
    inbox, reachable = Inbox(), {"b"}

    def shaky(alert: Mapping[str, Any]) -> None:
        if alert["cause"] not in reachable:
            raise OSError("no network")

    sending = inbox.alerts(("shaky", shaky))
    for cause in "abcdefg":
        sending.send(cause, lambda cause=cause: {**the_alert(), "cause": cause})  # type: ignore[misc]
    sending.close()
    first, again, off = inbox.said
    assert "shaky failed (OSError: no network) and is tried again" in first and again == first, "once more after it had worked"
    assert "shaky is switched off (OSError: no network)" in off and len(inbox.got) == 7


def test_a_way_that_hangs_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "CLOSING_S", 0.05)
    hanging, inbox = threading.Event(), Inbox()
    sending = inbox.alerts(("hanging", lambda alert: hanging.wait()))
    sent = [sending.send(f"cause {number}", the_alert) for number in range(30)]
    sending.close()
    assert any(sent) and not all(sent), "what is too much is dropped, not waited for"
    hanging.set()


def test_nobody_asked_for_alerts() -> None:
    sending = Alerts([], Faults(lambda text: None))
    assert not sending.send("a", the_alert)
    sending.close()


def test_a_command_gets_the_finding_on_its_standard_input(tmp_path: Path) -> None:
    target = tmp_path / "got it.json"
    _, send = sender(f"{sys.executable} -c \"import sys; open(sys.argv[1], 'w').write(sys.stdin.read())\" '{target}'")
    send(the_alert())
    assert json.loads(target.read_text())["cause"] == "data_bound"
    with pytest.raises(RuntimeError, match="ended with 3"):
        sender(f"{sys.executable} -c 'raise SystemExit(3)'")[1](the_alert())


def test_a_webhook_gets_it_as_json() -> None:
    got: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hook)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    sender(f"http://127.0.0.1:{server.server_port}/x")[1](the_alert())
    thread.join()
    server.server_close()
    assert got[0]["text"] == got[0]["sentence"] and got[0]["step"] == 7


def test_trackers_that_the_trainer_reports_to(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, str]] = []

    def alert(title: str, text: str) -> None:
        sent.append((title, text))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=SimpleNamespace(alert=alert)))
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(alert=alert))
    wandb, trackio = type("WandbCallback", (), {})(), type("TrackioCallback", (), {})()
    found = tracker_senders([wandb, trackio, object()])
    assert [name for name, _ in found] == ["W&B alerts", "Trackio alerts"] and tracker_senders([object()]) == []
    for _, send in found:
        send(the_alert())
    assert len(sent) == 2 and sent[0] == ("hfopt: data_bound", the_alert()["sentence"].removeprefix("data_bound: "))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace())
    for _, send in found:
        send(the_alert())
    assert len(sent) == 2, "no run, or a Trackio without alerts"


@pytest.mark.parametrize("wish", ["", "  ", 3, "echo 'unclosed", "cat >> found.json", "cat | mail -s hfopt me@example.org"])
def test_a_bad_wish_is_said_when_the_monitor_is_made(wish: Any) -> None:
    with pytest.raises(ConfigError, match="on_finding"):
        HFGpuMonitor(on_finding=wish)


def test_the_names_of_the_reporters_are_those_of_transformers() -> None:
    from transformers.integrations import integration_utils

    assert {"WandbCallback", "TrackioCallback"} <= {kind.__name__ for kind in integration_utils.INTEGRATION_TO_CALLBACK.values()}


def test_the_judge_alerts_of_what_is_new() -> None:
    from hfopt.monitor.diagnose import Judge

    journal: Any = SimpleNamespace(finding=lambda *args: None, write=lambda *args, **more: None, state={})
    got: list[tuple[str, int]] = []
    judge = Judge(facts(), journal, lambda text: None, 30.0, lambda finding, step: got.append((finding.cause, step)))
    ill = window(times={"data_wait_s": 40.0})
    for _ in range(3):
        judge.add(ill)
        judge.recent(())
    causes = [finding.cause for finding in diagnose(ill, facts()) if finding.cause != "compute_bound"]
    assert causes and got == [(cause, ill.last_step) for cause in causes], "each once"
