"""What a user may set on HFGpuMonitor, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfopt.monitor.log import NAME


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    interval_s: float = 1.0
    warn_below: float = 30.0  # %, GPU utilization that is worth a word even if no cause is found
    output: Path | None = None
    live: bool = True
    csv: bool = False
    report: bool = True
    plan: Any = None
    flops_per_sample: float | None = None
    max_log_bytes: int = 16 << 20

    def log_path(self, output_dir: str | None, rank: int) -> Path:
        """`<output_dir>/hfopt/monitor.jsonl` unless told otherwise; a rank other than the first has its own file beside it."""
        target = self.output if self.output is not None else Path(output_dir or ".") / "hfopt"
        path = target if target.suffix == ".jsonl" else target / NAME
        return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
