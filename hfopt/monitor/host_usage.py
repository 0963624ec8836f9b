"""What the host does for this run: CPU of the process tree with its loader workers, of the launching thread, RAM and disk reads.

CPU shares come from CPU-time counters, so they are exact over the time between two readings. The tree is walked through
/proc/<pid>/task/*/children where the kernel has it (microseconds); elsewhere psutil scans all processes, so that is done seldom.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_RESCAN_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReading:
    cpu_util: float | None = None
    main_thread_util: float | None = None
    worker_util: float | None = None
    worker_count: int | None = None
    ram_used_bytes: int | None = None
    ram_total_bytes: int | None = None
    disk_read_bytes_per_s: float | None = None
    core_wait: float | None = None


THIS_THREAD = Path("/proc/thread-self/schedstat")


def queued_s(schedstat: Path = THIS_THREAD) -> float | None:
    """Seconds a thread wanted to run and had no core, by the kernel's count so far; None where it does not count."""
    try:
        ran_ns, queued_ns = (int(word) for word in schedstat.read_text().split()[:2])
    except (OSError, ValueError):
        return None
    return queued_ns / 1e9 if ran_ns else None


def switches(thread: int | None = None) -> int | None:
    """How often a thread of this process (this one) gave its core away by waiting, so far; None where the system does not count."""
    place = "thread-self" if thread is None else f"self/task/{thread}"
    try:
        line = next(line for line in Path(f"/proc/{place}/status").read_text().splitlines() if line.startswith("voluntary_ctxt"))
    except (OSError, StopIteration):
        return None
    return int(line.split()[1])


class HostProbe:
    """Reads one process tree. Each reading covers the time since the one before; the first has no CPU shares."""

    def __init__(self, pid: int | None = None, thread: threading.Thread | None = None, *, cores: float) -> None:
        self._process = psutil.Process(pid)
        self._cores = cores
        self._thread_clock = _thread_clock(thread) if pid is None else None
        own = (thread or threading.main_thread()).native_id
        self._schedstat = Path(f"/proc/self/task/{own}/schedstat" if pid is None else f"/proc/{pid}/schedstat")
        self._children: dict[int, psutil.Process] = {}
        self._scanned_s = float("-inf")
        self._before: dict[str, float] = {}
        self._before_cpu_s: dict[int, float] = {}
        self._before_s: float | None = None

    def read(self) -> HostReading:
        now_s = time.monotonic()
        passed_s = now_s - self._before_s if self._before_s is not None else None
        self._before_s = now_s
        self._find_children(now_s)
        own_s, worker_s = self._cpu_times()
        memory = psutil.virtual_memory()
        used_s = self._grown(own_s | worker_s)
        workers = sum(used_s.get(pid, 0.0) for pid in worker_s)
        thread_s = self._since("thread", time.clock_gettime(self._thread_clock)) if self._thread_clock is not None else None
        read_bytes = self._since("disk", self._disk_bytes())
        waited_s = self._since("queue", queued_s(self._schedstat))
        if not passed_s or passed_s <= 0:
            return HostReading(worker_count=len(worker_s), ram_used_bytes=memory.total - memory.available, ram_total_bytes=memory.total)
        return HostReading(
            cpu_util=min(1.0, sum(used_s.values()) / passed_s / self._cores),
            main_thread_util=min(1.0, thread_s / passed_s) if thread_s is not None else None,
            worker_util=min(1.0, workers / passed_s / len(worker_s)) if worker_s else None,
            worker_count=len(worker_s),
            ram_used_bytes=memory.total - memory.available,
            ram_total_bytes=memory.total,
            disk_read_bytes_per_s=read_bytes / passed_s if read_bytes is not None else None,
            core_wait=min(1.0, waited_s / passed_s) if waited_s is not None else None,
        )

    def _cpu_times(self) -> tuple[dict[int, float], dict[int, float]]:
        """CPU seconds so far, of the process itself and of those below it; one that has ended is forgotten."""
        own = self._process.cpu_times()
        workers: dict[int, float] = {}
        for pid, child in list(self._children.items()):
            try:
                times = child.cpu_times()
                workers[pid] = times.user + times.system
            except psutil.Error:
                del self._children[pid]
        return {self._process.pid: own.user + own.system}, workers

    def _grown(self, cpu_s: dict[int, float]) -> dict[int, float]:
        before, self._before_cpu_s = self._before_cpu_s, cpu_s
        return {pid: max(0.0, total - before[pid]) for pid, total in cpu_s.items() if pid in before}

    def _since(self, name: str, value: float | None) -> float | None:
        before = self._before.get(name)
        if value is None:
            return None
        self._before[name] = value
        return max(0.0, value - before) if before is not None else None

    def _disk_bytes(self) -> float | None:
        total: float | None = None
        for process in (self._process, *self._children.values()):
            try:
                total = (total or 0.0) + process.io_counters().read_bytes
            except (psutil.Error, AttributeError, NotImplementedError):
                continue
        return total

    def _find_children(self, now_s: float) -> None:
        pids = _proc_children(self._process.pid)
        if pids is None:
            if now_s - self._scanned_s < _RESCAN_S:
                return
            self._scanned_s = now_s
            pids = {child.pid for child in self._process.children(recursive=True)}
        for pid in pids - self._children.keys():
            try:
                self._children[pid] = psutil.Process(pid)
            except psutil.Error:
                continue
        for pid in self._children.keys() - pids:
            del self._children[pid]


def _proc_children(pid: int) -> set[int] | None:
    """All processes below this one; None where the kernel does not list them."""
    found: set[int] = set()
    queue = [pid]
    while queue:
        current = queue.pop()
        tasks = Path(f"/proc/{current}/task")
        try:
            threads = list(tasks.iterdir())
        except OSError:
            if current == pid:
                return None
            continue
        for thread in threads:
            try:
                below = {int(word) for word in (thread / "children").read_text().split()}
            except FileNotFoundError:
                if current == pid and not (tasks / str(pid) / "children").exists():
                    return None
                continue
            except OSError:
                continue
            queue.extend(below - found)
            found |= below
    return found


def _thread_clock(thread: threading.Thread | None) -> int | None:
    ident = (thread or threading.main_thread()).ident
    if ident is None or not hasattr(time, "pthread_getcpuclockid"):
        return None
    return time.pthread_getcpuclockid(ident)
