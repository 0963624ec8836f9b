"""What a dry run measures: the device's peak memory, the time of a step, the wait for its data."""

from __future__ import annotations

import gc
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

_FEW_STEPS = 4


class CudaMeter:
    """PyTorch's own counters; what the process holds beside them (context, other processes) is read from the driver."""

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def empty(self) -> None:
        """As if nothing had been on the device yet."""
        gc.collect()
        torch.cuda.empty_cache()
        self.reset()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def peaks(self) -> dict[str, int]:
        reserved = torch.cuda.max_memory_reserved()
        free, total = torch.cuda.mem_get_info()
        beside = max(0, total - free - torch.cuda.memory_reserved())
        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": reserved,
            "peak_device_bytes": reserved + beside,
        }


class CpuMeter:
    """Resident memory of this process; 'allocated' is what came on top of Python and its imports."""

    def __init__(self) -> None:
        self.reset()
        self._before = self._peak()

    def reset(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size
        except OSError:
            return

    def empty(self) -> None:
        gc.collect()
        self.reset()

    def synchronize(self) -> None:
        pass

    def peaks(self) -> dict[str, int]:
        peak = self._peak()
        return {"peak_allocated_bytes": max(0, peak - self._before), "peak_reserved_bytes": peak, "peak_device_bytes": peak}

    @staticmethod
    def _peak() -> int:
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
        except (OSError, StopIteration):
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else peak * 1024


class StepClock(transformers.TrainerCallback):  # type: ignore[misc]
    """When each optimizer step began and ended, with the device idle at its end; after `enough_s` and a few steps it ends the run."""

    def __init__(self, meter: CpuMeter | CudaMeter, *, enough_s: float | None = None) -> None:
        self._meter, self._enough_s = meter, enough_s
        self.step_s: list[float] = []
        self.cpu_s: list[float] = []
        self.wait_s: list[float] = []
        self._began = self._ended = time.perf_counter()
        self._cpu_began = time.process_time()

    @property
    def steps(self) -> int:
        return len(self.step_s)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._ended = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.perf_counter()
        self.wait_s.append(self._began - self._ended)
        self._cpu_began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._meter.synchronize()
        self._ended = time.perf_counter()
        self.step_s.append(self._ended - self._began)
        self.cpu_s.append(time.process_time() - self._cpu_began)
        if self._enough_s is not None and self.steps >= _FEW_STEPS and sum(self.step_s) >= self._enough_s:
            control.should_training_stop = True
