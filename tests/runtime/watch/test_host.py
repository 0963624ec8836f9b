"""CPU shares are those of the work done, in the thread, the process and its children."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from hfopt.runtime.watch.host import HostProbe


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
