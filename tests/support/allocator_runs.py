"""Random requests to PyTorch's own CUDA caching allocator on the virtual GPU, and what it then holds: what the simulation is compared with.

usage: python tests/support/allocator_runs.py VERSION > tests/memory/allocator_runs.json        PyTorch's, such as 2.15
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence

from hfopt.schema import Gpu
from hfopt.units import GIB, MIB

SETTINGS: tuple[tuple[str, int | None], ...] = (  # PYTORCH_CUDA_ALLOC_CONF, and the card's MiB where it is to run out
    ("", None),
    ("", 600),
    ("max_split_size_mb:64", None),
    ("max_split_size_mb:64", 600),
    ("max_split_size_mb:64", 300),
    ("expandable_segments:True", None),
    ("expandable_segments:True", 600),
    ("expandable_segments:True", 300),
    ("expandable_segments:True,max_split_size_mb:64", 600),
    ("roundup_power2_divisions:4", None),
    ("garbage_collection_threshold:0.5", 600),
)
RECORDED = (0, 1, 2, 3, 6, 7, 31, 121, 961)
"""Seeds. The later ones meet what the first do not: sizes at a limit to the byte, pages unmapped at the edge of a block."""
_EDGES = (1, 511, 512, 513, 2048, 2049, 3000, MIB - 512, MIB - 1, MIB, MIB + 1)
_SEGMENTS_MIB = (2, 5, 9, 10, 11, 12, 20, 30, 63, 64, 65, 84, 85, 100)
_RUN = """
import json, sys, torch
streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
found = []
for events in json.load(sys.stdin):
    torch.cuda.empty_cache()
    live, held = {}, []
    for number, size, stream in events:
        try:
            if size:
                live[number] = torch.cuda.caching_allocator_alloc(size, stream=streams[stream])
            else:
                torch.cuda.caching_allocator_delete(live.pop(number))
        except torch.OutOfMemoryError:
            break
        held.append([torch.cuda.memory_allocated(), torch.cuda.memory_reserved()])
    for pointer in live.values():
        torch.cuda.caching_allocator_delete(pointer)
    found.append(held)
print("FOUND", json.dumps(found))
"""
Event = tuple[int, int, int]
"""Number, size (0 frees it) and stream of a block."""


def requests(seed: int, events: int = 60) -> list[Event]:
    """The same for a seed in every version of Python: of its generator only random() is promised to stay."""
    draw = random.Random(seed).random
    live: list[tuple[int, int]] = []
    found: list[Event] = []
    for number in range(events):
        if live and draw() < 0.45:
            freed, stream = live.pop(int(draw() * len(live)))
            found.append((freed, 0, stream))
        else:
            live.append((number, int(draw() < 0.15)))
            found.append((number, _size(draw(), draw()), live[-1][1]))
    return found


def _size(kind: float, where: float) -> int:
    if kind < 0.15:
        return _EDGES[int(where * len(_EDGES))]
    if kind < 0.35:
        return 1 + int(where * MIB)
    if kind < 0.7:
        place, exactly = divmod(int(where * 3 * len(_SEGMENTS_MIB)), 3)
        return _SEGMENTS_MIB[place] * MIB + (0, 1, -1)[exactly]
    return MIB + int(where * 150 * MIB)


def held(runs: Sequence[Sequence[Event]], conf: str, capacity_mib: int | None) -> list[list[tuple[int, int]]]:
    """Bytes allocated and reserved after each event of each run; a run ends where memory does."""
    from hfopt.virtual.environment import environment

    card = Gpu(name="Virtual", memory_bytes=capacity_mib * MIB if capacity_mib else 64 * GIB, capability=(8, 6), sms=28)
    env = environment(card) | {"PYTORCH_CUDA_ALLOC_CONF": conf}
    done = subprocess.run([sys.executable, "-c", _RUN], input=json.dumps(runs), env=env, capture_output=True, text=True, check=True)
    return [[(allocated, reserved) for allocated, reserved in run] for run in json.loads(done.stdout.rpartition("FOUND")[2])]


def _record(version: str) -> None:
    """A line for each setting and seed: after each event, allocated in blocks of 512 bytes and reserved in MiB."""
    lines = []
    for conf, capacity_mib in SETTINGS:
        for seed, run in zip(RECORDED, held([requests(seed) for seed in RECORDED], conf, capacity_mib), strict=True):
            allocated, reserved = [one // 512 for one, _ in run], [one // MIB for _, one in run]
            row = {"conf": conf, "capacity_mib": capacity_mib, "seed": seed, "allocated": allocated, "reserved": reserved}
            lines.append(json.dumps(row, separators=(",", ":")))
    sys.stdout.write('{"torch":"' + version + '","runs":[\n' + ",\n".join(lines) + "\n]}\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _record(sys.argv[1])
