"""CPU shares are those of the work done, in the thread, the process and its children."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hfopt.monitor import host_usage
from hfopt.monitor.host_usage import HostProbe
from hfopt.monitor.screen import CardsOfProcess
from hfopt.schema import GpuReading


def _work(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(1000))


def test_the_thread_and_its_process_are_told_apart() -> None:
    probe = HostProbe(thread=threading.current_thread(), cores=2.0)
    probe.read()
    began_s = time.monotonic()
    worker = threading.Thread(target=_work, args=(0.15,))
    worker.start()
    worker.join()
    passed_s = time.monotonic() - began_s
    reading = probe.read()
    assert reading.main_thread_util is not None and reading.cpu_util is not None
    assert reading.main_thread_util < 0.5 * 0.15 / passed_s + 0.1
    assert reading.cpu_util >= 0.5 * 0.15 / passed_s / 2


def test_children_count_and_their_end_is_no_error() -> None:
    probe = HostProbe(cores=2.0)
    child = subprocess.Popen([sys.executable, "-c", "import time\nwhile True: time.sleep(0.001)"])
    try:
        probe.read()
        time.sleep(0.2)
        during = probe.read()
        assert during.worker_count == 1 and during.worker_util is not None
    finally:
        child.kill()
        child.wait()
    assert probe.read().worker_count == 0


def test_the_first_reading_has_memory_but_no_shares() -> None:
    reading = HostProbe(cores=1.0).read()
    assert reading.cpu_util is None and reading.ram_total_bytes is not None and 0 < (reading.ram_used_bytes or 0) < reading.ram_total_bytes


def test_children_of_children_are_found_with_and_without_the_kernels_list(monkeypatch: pytest.MonkeyPatch) -> None:
    below = "[sys.executable, '-S', '-c', 'import sys; sys.stdin.read()']"
    code = f"import subprocess, sys\nwith subprocess.Popen({below}) as child:\n    print(child.pid, flush=True)\n"
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-S", "-c", code], text=True, **streams) as child:  # type: ignore[call-overload]
        both = {child.pid, int(child.stdout.readline())}
        for listed in (host_usage._proc_children, lambda pid: None):
            monkeypatch.setattr(host_usage, "_proc_children", listed)
            probe = HostProbe(cores=2.0)
            probe.read()
            assert both <= probe._children.keys()
            assert probe.read().worker_count == len(probe._children)  # looked for again only after a while
        child.stdin.close()
    assert not both & probe._cpu_times()[1].keys(), "those that have ended are forgotten"
    assert host_usage._proc_children(2**22 + 1) is None


def test_where_a_process_may_not_be_looked_into_there_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: psutil.Process) -> None:
        raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(psutil.Process, "io_counters", refused, raising=False)
    probe = HostProbe(cores=2.0)
    probe.read()
    assert probe.read().disk_read_bytes_per_s is None


def test_the_kernels_list_is_read_as_far_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def list_below(pid: int, text: str | None) -> None:
        thread = tmp_path / "proc" / str(pid) / "task" / str(pid)
        thread.mkdir(parents=True)
        if text is not None:
            (thread / "children").write_text(text)

    monkeypatch.setattr(host_usage, "Path", lambda place: tmp_path / place.lstrip("/"))
    assert host_usage._proc_children(1) is None, "no such process"
    list_below(1, "2 3 4")
    list_below(2, "5")  # 3 is gone, and of 4 nothing is listed
    list_below(4, None)
    list_below(5, "")
    assert host_usage._proc_children(1) == {2, 3, 4, 5}
    (tmp_path / "proc/5/task/5/children").unlink()
    (tmp_path / "proc/5/task/5/children").mkdir()  # unreadable
    assert host_usage._proc_children(1) == {2, 3, 4, 5}
    list_below(6, None)
    assert host_usage._proc_children(6) is None, "a kernel without the list"


def test_of_all_cards_those_that_the_process_uses_are_shown() -> None:
    def shown(*used: int | None) -> list[str]:
        readings = tuple(GpuReading(uuid=f"GPU-{number}", own_used_bytes=size) for number, size in enumerate(used))
        cards: Any = SimpleNamespace(read=lambda: readings)
        return [reading.uuid for reading in CardsOfProcess(cards).read()]

    assert shown(0, 5, None) == ["GPU-1"]
    assert shown(None, None) == ["GPU-0", "GPU-1"], "the driver does not tell"
