"""Whole runs of TRL's trainers on the virtual GPU: reads cases as JSON lines on stdin, prints what torch.cuda counted for each.

And the least card that would have run it: what the allocator noted, replayed at capacities. On a card of that size PyTorch gives cached
segments back and goes on; 2 MiB below it, it ends out of memory (tried with `set_per_process_memory_fraction` for two of the runs).
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from trl_cases import TrlCase, make_trainer, model_folder

from hfopt.memory.allocator import CachingAllocator, OutOfMemory
from hfopt.units import MIB

_UNIT = 2 * MIB  # segments are multiples of it


def run(case: TrlCase, cache: Path) -> dict[str, Any]:
    torch.cuda.memory._record_memory_history(max_entries=10_000_000, context=None, stacks="python")
    trainer = make_trainer(case, model_folder(case, cache))
    trainer.train()
    noted = [
        (entry["addr"], entry["size"] if entry["action"] == "alloc" else None)
        for entry in torch.cuda.memory._snapshot()["device_traces"][0]
        if entry["action"] in ("alloc", "free_completed")
    ]
    torch.cuda.memory._record_memory_history(enabled=None)
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"allocated": allocated, "reserved": reserved, "least": least_capacity(noted, allocated, reserved)}


def least_capacity(noted: list[tuple[int, int | None]], allocated: int, reserved: int) -> int:
    """Bytes; `noted` are addresses with the size that was taken, or None where it was freed."""
    low, high = allocated // _UNIT - 1, -(-reserved // _UNIT)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _runs(noted, middle * _UNIT) else (middle, high)
    return high * _UNIT


def _runs(noted: list[tuple[int, int | None]], capacity: int) -> bool:
    allocator, live = CachingAllocator(capacity_bytes=capacity), dict[int, int]()
    for number, (address, size) in enumerate(noted):
        if size is None:
            allocator.free(live.pop(address, -1))
            continue
        live[address] = number
        try:
            allocator.allocate(number, size)
        except OutOfMemory:
            return False
    return True


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the Trainer prints
    for line in sys.stdin:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            answer = run(TrlCase(**json.loads(line)), Path(sys.argv[1]))
        except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError, KeyError, AttributeError) as error:
            answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
