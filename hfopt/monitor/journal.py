"""All that a session writes: the log, the table, the live file and the rank's note; each may fail alone."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hfopt.monitor.harmless import Faults, harmless
from hfopt.monitor.log import CsvLog, RunLog, finite
from hfopt.monitor.ranks import RankFile
from hfopt.monitor.reporters import metrics
from hfopt.monitor.steps import Stamp
from hfopt.schema import Finding, Sample, Window

LIVE = "live.json"
_POINTS = 120
_NOTE_EACH_S = 10.0


class Journal:
    def __init__(self, path: Path, *, rank: int, world_size: int, csv: bool, max_bytes: int, faults: Faults) -> None:
        self.faults, self.path, self.rank = faults, path, rank
        self._log = RunLog(path, max_bytes=max_bytes)
        self._csv = CsvLog(path.with_suffix(".csv")) if csv else None
        self._note = RankFile(path.parent, rank) if world_size > 1 else None
        self._noted_s = float("-inf")
        self._points: deque[str] = deque(maxlen=_POINTS)  # as JSON already: each is written a hundred times
        self.state: dict[str, Any] = {"pid": os.getpid(), "step": 0, "max_steps": 0, "findings": [], "ended": False}

    @harmless("the log file")
    def write(self, kind: str, **fields: Any) -> None:
        self._log.write(kind, **fields)

    def window(self, window: Window, **extra: Any) -> dict[str, float]:
        """Returns the metrics it wrote."""
        figures = finite(metrics(window))
        self.write("window", first_step=window.first_step, last_step=window.last_step, **extra, metrics=figures, window=window)
        self._row(window, figures)
        return figures

    def finding(self, finding: Finding, step: int) -> None:
        self.write("finding", step=step, **asdict(finding))

    @harmless("the CSV file")
    def _row(self, window: Window, figures: Mapping[str, float]) -> None:
        if self._csv is not None:
            from hfopt.monitor.reporters import KEYS, PREFIX

            times = {"time": round(time.time(), 3), "first_step": window.first_step, "last_step": window.last_step}
            self._csv.write({**times, **{name: figures.get(PREFIX + name) for name in KEYS}})

    @harmless("the live view")
    def live(self, sample: Sample | None, line: str, data_wait: float | None) -> None:
        """The file `hfopt watch` reads: replaced as a whole, so a reader never sees half of it."""
        if sample is not None:
            self._points.append(json.dumps(point(sample, data_wait)))
        head = json.dumps({"time": time.time(), **self.state, "status": line})
        target = self.path.with_name(LIVE if self.rank == 0 else f"live.rank{self.rank}.json")
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(f".{threading.get_ident()}.tmp")  # the sampler and the training thread may both be here
        temporary.write_text(f'{head[:-1]}, "points": [{", ".join(self._points)}]}}')
        temporary.replace(target)

    @harmless("the note for the first rank")
    def note(self, stamps: Sequence[Stamp], figures: Mapping[str, float], *, ended: bool = False) -> None:
        now_s = time.monotonic()
        if self._note is not None and (ended or now_s - self._noted_s >= _NOTE_EACH_S):
            self._noted_s = now_s
            self._note.write(stamps=stamps, summary=figures, ended=ended)

    @harmless("the log file")
    def close(self) -> None:
        self._log.close()


def point(sample: Sample, data_wait: float | None) -> dict[str, float | None]:
    """What the curves of `hfopt watch` are drawn from; shares, of the first card."""
    card = sample.gpus[0] if sample.gpus else None
    return {
        "gpu": card.sm_util if card else None,
        "vram": _share(card.used_bytes, card.total_bytes) if card else None,
        "cpu": sample.cpu_util,
        "ram": _share(sample.ram_used_bytes, sample.ram_total_bytes),
        "data_wait": data_wait,
    }


def _share(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None
