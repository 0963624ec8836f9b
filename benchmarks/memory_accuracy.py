"""How far the memory estimate is from real cards: rows of measured training runs, beside two published estimators on the same rows.

usage: python benchmarks/memory_accuracy.py [CSV] [--python PYTHON]
       python benchmarks/memory_accuracy.py --published   (the second part, see published_memory.py)

CSV has the columns of data/memory_fp32_loop.csv. The rows were measured with transformers 4.51.3, whose modelling code differs from later
versions, so a worker runs in an environment with it: --python names one, otherwise one is made once in the user's cache folder.
`measured_mib` is the allocator's reserved memory plus the kernels loaded on first use; rows with oom=1 only enter the verdicts.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
REQUIREMENTS = ("transformers==4.51.3", "torch>=2.6", "numpy", "typer", "pyyaml")
TOLERATED_SHARE = 0.02  # of the card: a verdict closer than that to the edge is not wrong


def environment() -> str:
    """The Python of an environment with transformers 4.51.3, made on first use."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hfopt" / "transformers-4.51.3"
    python = cache / "bin" / "python"
    if not python.exists():
        sys.stderr.write(f"making {cache} (once)\n")
        venv.create(cache, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *REQUIREMENTS], check=True)
    return str(python)


def estimates(rows: list[dict[str, str]], python: str) -> list[dict[str, Any]]:
    env = {**os.environ, "PYTHONPATH": str(HERE.parent), "HF_HUB_OFFLINE": "1"}
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    worker = subprocess.run([python, str(HERE / "loop_worker.py")], input=lines, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in worker.stdout.splitlines()]


def percentile(values: list[float], share: float) -> float:
    """Between the two nearest ranks."""
    ranked = sorted(values)
    at = share * (len(ranked) - 1)
    low = int(at)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (at - low) * (ranked[high] - ranked[low])


def error_pct(row: dict[str, str], value: str | float | None) -> float | None:
    if value in (None, "") or row["oom"] == "1":
        return None
    return 100 * (float(value) / float(row["measured_mib"]) - 1)  # type: ignore[arg-type]


def wrong_verdict(row: dict[str, str], found: dict[str, Any]) -> bool:
    """Says fits where the run died, or the other way, and not within 2 % of the card."""
    if found["fits"] == (row["oom"] == "0"):
        return False
    return bool(abs(found["reserved_mib"] - float(row["gpu_total_mib"])) > TOLERATED_SHARE * float(row["gpu_total_mib"]))


def print_rows(rows: list[dict[str, str]], found: list[dict[str, Any]]) -> None:
    for row, one in zip(rows, found, strict=True):
        ours = error_pct(row, one["used_mib"])
        theirs = error_pct(row, row["xmem_mib"])
        shown = "out of memory" if row["oom"] == "1" else f"{ours:+7.2f} %"
        other = f"xMem {theirs:+7.2f} %" if theirs is not None else ""
        title = f"{row['model']:20} {row['gpu']:16} {row['batch_size']:>3} {row['optimizer']:9} {row['zero_grad']:15}"
        verdict = "fits" if one["fits"] else "does not fit"
        print(f"{title} measured {float(row['measured_mib']):7.0f}  estimated {one['used_mib']:7.0f} MiB {shown:>14} {verdict:12} {other}")


def summary(rows: list[dict[str, str]], found: list[dict[str, Any]]) -> dict[str, Any]:
    pairs = [(row, one) for row, one in zip(rows, found, strict=True) if row["oom"] == "0"]
    errors = [error_pct(row, one["used_mib"]) or 0.0 for row, one in pairs]
    against = [(abs(e), abs(x)) for (row, _), e in zip(pairs, errors, strict=True) if (x := error_pct(row, row["xmem_mib"])) is not None]
    result: dict[str, Any] = {"n": len(errors), **_spread("", errors)}
    result["under_2pct_share"] = sum(error < -2 for error in errors) / len(errors)
    full = [error_pct(row, one["full_mib"]) or 0.0 for row, one in pairs]
    result |= {**_spread("full_batches_", full), "full_batches_under_2pct_share": sum(error < -2 for error in full) / len(full)}
    result["wrong_oom"] = sum(wrong_verdict(row, one) for row, one in zip(rows, found, strict=True))
    result["closer_than_xmem_share"] = sum(ours < theirs for ours, theirs in against) / len(against) if against else None
    for peer in ("xmem", "dnnmem"):
        peers = [error for row, _ in pairs if (error := error_pct(row, row.get(f"{peer}_mib"))) is not None]
        if peers:
            result |= _spread(f"{peer}_", peers)
    result["seconds"] = sum(one["seconds"] for one in found)
    result["seconds_per_estimate"] = median(one["seconds"] for one in found)
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()}


def _spread(prefix: str, errors: list[float]) -> dict[str, float]:
    sizes = [abs(error) for error in errors]
    return {f"{prefix}median_pct": median(sizes), f"{prefix}p90_pct": percentile(sizes, 0.9), f"{prefix}max_pct": max(sizes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", nargs="?", type=Path, default=HERE / "data" / "memory_fp32_loop.csv")
    parser.add_argument("--python", help="a Python with transformers 4.51.3 and torch")
    parser.add_argument("--published", action="store_true", help="the second part: other published runs, with the installed transformers")
    arguments = parser.parse_args()
    if arguments.published:
        import published_memory

        published_memory.main()
        return
    with arguments.csv.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    found = estimates(rows, arguments.python or environment())
    print_rows(rows, found)
    print(json.dumps(summary(rows, found)))


if __name__ == "__main__":
    main()
