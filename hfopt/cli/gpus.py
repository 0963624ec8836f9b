"""`hfopt gpus`: the catalog as a table, or one card in full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from hfopt.cli.json_output import answer_json
from hfopt.cli.options import complete_gpu
from hfopt.cli.output import answer

_PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


def gpus(
    name: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", autocompletion=complete_gpu, help="A card by any usual name: rtx 4060 laptop, A100-80GB."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the cards hfopt knows, or show one in full.

    Peaks are dense, in TFLOP/s, with float32 accumulation: what PyTorch's matrix products can reach at most.

    \b
    Examples:
      hfopt gpus                              every card
      hfopt gpus 3070                         one card in full, with its source and public prices
      hfopt gpus a100                         all that go by that name
      hfopt gpus rtx 4060 laptop --json       for a program
    """
    from hfopt.hardware.catalog import entries, matching

    found = [entry.figures for entry in (matching(" ".join(name)) if name else entries())]
    if as_json:
        answer_json("gpus", found)
    elif name and len(found) == 1:
        answer(_in_full(found[0]))
    else:
        answer(_table(found))


def _table(cards: list[Mapping[str, Any]]) -> str:
    """Within 80 columns; the rest is in the full view and in the JSON."""
    width = max(len(card["name"]) for card in cards)
    lines = [f"{'':{width}}{'GiB':>6}{'GB/s':>6}{'cap.':>5}" + "".join(f"{precision:>7}" for precision in _PRECISIONS)]
    for card in cards:
        peaks = "".join(f"{_tflops(card, precision):>7}" for precision in _PRECISIONS)
        memory, bandwidth = card["memory_bytes"] / 2**30, card["bandwidth_bytes_per_s"] / 1e9
        lines.append(f"{card['name']:{width}}{memory:>6.1f}{bandwidth:>6.0f}{_capability(card):>5}{peaks}")
    return "\n".join(lines) + "\npeaks in TFLOP/s, dense, float32 accumulation; cap. is the compute capability\n"


def _in_full(card: Mapping[str, Any]) -> str:
    from hfopt.hardware.prices import of_card, public_offers
    from hfopt.units import format_bytes

    rented = [
        f"{offer.usd_per_hour:.2f} USD/h{f' for {offer.cards}' if offer.cards > 1 else ''}, {offer.words} ({offer.date}, {offer.source})"
        for offer in of_card(public_offers(), card["name"])
    ]
    usable, nvlink = card["usable_bytes"], card["nvlink_bytes_per_s"]
    rows = [
        ("memory", f"{format_bytes(card['memory_bytes'])} ({card['memory_bytes'] >> 20} MiB) as the driver reports it"),
        ("usable", f"{format_bytes(usable)} ({usable >> 20} MiB) as CUDA shows it to a program"),
        ("bandwidth", f"{card['bandwidth_bytes_per_s'] / 1e9:,.0f} GB/s"),
        ("SMs", str(card["sms"])),
        ("capability", _capability(card)),
        *((f"peak {precision}", f"{_tflops(card, precision)} TFLOP/s") for precision in card["peak_flops"]),
        ("power", f"{card['power_limit_w']:.0f} W"),
        ("PCIe", f"{card['pcie_bytes_per_s'] / 1e9:.1f} GB/s each way"),
        ("NVLink", f"{nvlink / 1e9:.0f} GB/s each way" if nvlink else None),
        ("source", card["source"]),
        *(("rented at" if place == 0 else "", words) for place, words in enumerate(rented)),
    ]
    return f"{card['name']}\n" + "".join(f"  {label:<11} {value}\n" for label, value in rows if value is not None)


def _tflops(card: Mapping[str, Any], precision: str) -> str:
    peak = card["peak_flops"].get(precision)
    return "-" if peak is None else f"{peak / 1e12:.1f}" if peak < 1e15 else f"{peak / 1e12:.0f}"


def _capability(card: Mapping[str, Any]) -> str:
    return "{}.{}".format(*card["capability"])
