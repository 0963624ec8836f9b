"""`hfopt gpus`: the catalog as a table, or one card in full."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from hfopt.schema import Gpu

_PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")


def _complete(incomplete: str) -> list[str]:
    from hfopt.hardware import catalog

    return [gpu.name for gpu in catalog.cards() if incomplete.lower() in gpu.name.lower()]


def gpus(
    name: str | None = typer.Argument(None, autocompletion=_complete, help="A card, forgivingly: 3070, 'rtx 4060 laptop', A100-80GB."),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON list."),
) -> None:
    """List the cards hfopt knows, or show one in full.

    Peaks are dense, in TFLOP/s, with float32 accumulation: what PyTorch's matrix products can reach at most.

    \b
    Examples:
      hfopt gpus                              every card
      hfopt gpus 3070                         one card in full, with its source
      hfopt gpus a100                         all that go by that name
      hfopt gpus "rtx 4060 laptop" --json     for a program
    """
    from hfopt.hardware import catalog

    found = catalog.matching(name) if name is not None else catalog.cards()
    if as_json:
        sys.stdout.write(json.dumps([asdict(gpu) for gpu in found], indent=2) + "\n")
    elif name is not None and len(found) == 1:
        sys.stdout.write(_in_full(found[0]))
    else:
        sys.stdout.write(_table(found))


def _table(cards: tuple[Gpu, ...]) -> str:
    width = max(len(gpu.name) for gpu in cards)
    lines = [
        f"{'':{width}}  {'memory':>10}  {'GB/s':>5}  {'SMs':>4}  {'cap.':>4}  " + "  ".join(f"{p:>6}" for p in _PRECISIONS) + "    watts"
    ]
    for gpu in cards:
        peaks = "  ".join(f"{_tflops(gpu, precision):>6}" for precision in _PRECISIONS)
        lines.append(
            f"{gpu.name:{width}}  {gpu.memory_bytes / 2**20:>6,.0f} MiB  {(gpu.bandwidth_bytes_per_s or 0) / 1e9:>5.0f}  {gpu.sms or '':>4}"
            f"  {_capability(gpu):>4}  {peaks}  {gpu.power_limit_w or 0:>7.0f}"
        )
    return "\n".join(lines) + "\npeaks in TFLOP/s, dense, float32 accumulation\n"


def _in_full(gpu: Gpu) -> str:
    from hfopt.units import format_bytes

    rows = [
        ("memory", f"{format_bytes(gpu.memory_bytes)} as the driver reports it"),
        ("usable", f"{format_bytes(gpu.usable_bytes)} as CUDA shows it to a program" if gpu.usable_bytes else None),
        ("bandwidth", f"{gpu.bandwidth_bytes_per_s / 1e9:,.0f} GB/s" if gpu.bandwidth_bytes_per_s else None),
        ("SMs", str(gpu.sms)),
        ("capability", _capability(gpu)),
        *(
            (f"peak {precision}", f"{_tflops(gpu, precision)} TFLOP/s" if precision in gpu.peak_flops else "no")
            for precision in _PRECISIONS
        ),
        ("power", f"{gpu.power_limit_w:.0f} W" if gpu.power_limit_w else None),
        ("PCIe", f"{gpu.pcie_bytes_per_s / 1e9:.1f} GB/s each way" if gpu.pcie_bytes_per_s else None),
        ("NVLink", f"{gpu.nvlink_bytes_per_s / 1e9:.0f} GB/s each way" if gpu.nvlink_bytes_per_s else None),
        ("source", gpu.source),
    ]
    return f"{gpu.name}\n" + "".join(f"  {label:<11} {value}\n" for label, value in rows if value is not None)


def _tflops(gpu: Gpu, precision: str) -> str:
    peak = gpu.peak_flops.get(precision)
    return "-" if peak is None else f"{peak / 1e12:.1f}" if peak < 1e15 else f"{peak / 1e12:.0f}"


def _capability(gpu: Gpu) -> str:
    return f"{gpu.capability[0]}.{gpu.capability[1]}" if gpu.capability else "-"
