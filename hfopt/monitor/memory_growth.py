"""Memory that creeps up from step to step: a leak in the script, found before it ends the run, with what grows.

A healthy run holds as much after step 1,000 as after step 100. Looked at where a step has ended: torch's allocated bytes on the card, and
the process's own anonymous memory (files that are mapped, as datasets are, do not count). Growth is a finding when every third of the
stretch lies above the one before, by more than noise. Only then are the live objects counted, twice: the tensors or objects that became
more are what is kept.
"""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from hfopt.schema import Finding
from hfopt.units import MIB, format_bytes

_POINTS = 60  # thinned when full, so that hours are seen as well as minutes
_FEWEST_POINTS, _FEWEST_STEPS = 9, 30
_WARM_UP = 0.2  # of the points: caches and arenas fill
_NOISE = {"card": 16 * MIB, "process": 64 * MIB}
_NOISE_SHARE = 0.03
Point = tuple[int, int]  # step, bytes


@dataclass(slots=True)
class MemoryTrend:
    """One kind of memory over the run."""

    kind: str
    points: list[Point] = field(default_factory=list)
    _each: int = 1  # of the looks so many make a point
    _looks: int = 0

    def add(self, step: int, held_bytes: int) -> None:
        self._looks += 1
        if self._looks % self._each or (self.points and self.points[-1][0] >= step):
            return
        self.points.append((step, held_bytes))
        if len(self.points) > _POINTS:
            self.points, self._each = self.points[::2], 2 * self._each

    def bytes_per_step(self) -> float | None:
        """None unless it creeps."""
        seen = self.points[int(_WARM_UP * len(self.points)) :]
        if len(seen) < _FEWEST_POINTS or seen[-1][0] - seen[0][0] < _FEWEST_STEPS:
            return None
        third = len(seen) // 3
        parts = [[held for _, held in seen[start : start + third]] for start in (0, third, len(seen) - third)]
        rises = max(parts[0]) < min(parts[1]) and max(parts[1]) < min(parts[2])
        grown = median(parts[2]) - median(parts[0])
        if not rises or grown < max(_NOISE[self.kind], _NOISE_SHARE * median(parts[0])):
            return None
        return grown / (seen[len(seen) - third + third // 2][0] - seen[third // 2][0])


Census = Counter[str]


def census() -> Census:
    """How many live objects there are of each type, tensors also by their shape and whether they keep a graph."""
    found: Census = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, torch.Tensor) and not issubclass(kind, torch.nn.Parameter):
            graph = " with its graph" if thing.grad_fn is not None else ""
            found[f"tensor {str(thing.dtype).removeprefix('torch.')}{list(thing.shape)}{graph}"] += 1
        elif kind.__module__ != "builtins" or kind in (list, dict):
            found[f"{kind.__module__}.{kind.__qualname__}" if kind.__module__ != "builtins" else kind.__name__] += 1
    return found


def what_grows(before: Census, after: Census) -> str | None:
    """The tensors that became more, else the objects that did; None where nothing stands out."""
    more = after - before
    tensors = {name: count for name, count in more.items() if name.startswith("tensor ")}
    named = tensors or {name: count for name, count in more.items() if count >= 10}
    if not named:
        return None
    name, count = max(named.items(), key=lambda pair: pair[1])
    kept = (
        ": a loss or an output that is kept without .item() or .detach() keeps all activations" if name.endswith("with its graph") else ""
    )
    return f"{count} more of {name} since the last look{kept}"


class GrowthWatch:
    """`look` at each window; a finding once, with what grows, or None."""

    def __init__(self, devices: tuple[int, ...]) -> None:
        self._devices = devices
        self._growths = {kind: MemoryTrend(kind=kind) for kind in _NOISE}
        self._before: tuple[str, Census] | None = None
        self._done = False

    def look(self, step: int) -> Finding | None:
        if self._done:
            return None
        held = {"card": sum(torch.cuda.memory_allocated(device) for device in self._devices), "process": anonymous_bytes()}
        for kind, size in held.items():
            if size:
                self._growths[kind].add(step, size)
        if self._before is not None:
            kind, before = self._before
            self._done = True
            return self._finding(kind, what_grows(before, census()))
        creeping = next((kind for kind, growth in self._growths.items() if growth.bytes_per_step() is not None), None)
        if creeping is not None:
            self._before = (creeping, census())
        return None

    def _finding(self, kind: str, grows: str | None) -> Finding | None:
        each = self._growths[kind].bytes_per_step()
        if each is None:
            return None
        where = "the card's memory" if kind == "card" else "this process's memory"
        message = f"{where} grows by {format_bytes(round(each))} a step and is not given back"
        message += f"; {grows}" if grows else "; no kind of Python object stands out, so what grows is held by a library"
        return Finding(cause="memory_creep", confidence=0.9, evidence={"bytes_per_step": each}, message=message)


def anonymous_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """Of this process, without mapped files; None where the system does not say."""
    try:
        line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon:"))
    except (OSError, StopIteration):
        return None
    return int(line.split()[1]) * 1024
