"""Where a trace and PyTorch's own allocator part: the two lists of allocations side by side, for one case.

usage: python diff_allocations.py SNAPSHOT CASE_JSON      (SNAPSHOT from virtual_worker.py with HFOPT_HISTORY set)
"""

from __future__ import annotations

import difflib
import json
import pickle
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from cases import Case, estimated_curve

_LISTED = 60


def real_allocations(snapshot: Path) -> list[tuple[int, str]]:
    with snapshot.open("rb") as stream:
        entries = pickle.load(stream)["device_traces"][0]
    return [(entry["size"], _frames(entry)) for entry in entries if entry["action"] == "alloc"]


def _frames(entry: dict[str, Any]) -> str:
    names = [f"{Path(f['filename']).name}:{f['line']}:{f['name']}" for f in entry.get("frames", ())]
    return " < ".join([name for name in names if "values" not in name][:4])


def traced_allocations(case: Case) -> list[tuple[int, str]]:
    timeline = estimated_curve(case).timeline
    found = []
    for size, place in zip(timeline.sizes(case.batch), timeline.place_of.tolist(), strict=True):
        if size > 0:
            where = timeline.places[place]
            found.append((size, f"{where.phase} {where.module} {where.op}"))
    return found


def rounded(size: int) -> int:
    return -(-size // 512) * 512


def main() -> None:
    case = Case(**json.loads(sys.argv[2]))
    real = [item for item in real_allocations(Path(sys.argv[1])) if item[0] >= 4096]
    traced = [item for item in traced_allocations(case) if item[0] >= 4096]
    matcher = difflib.SequenceMatcher(None, [rounded(s) for s, _ in real], [rounded(s) for s, _ in traced], autojunk=False)
    only: Counter[str] = Counter()
    shown = 0
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            continue
        for size, where in real[a:b]:
            only[f"real   {size / 2**20:10.3f} MiB  {where}"] += 1
        for size, where in traced[c:d]:
            only[f"traced {size / 2**20:10.3f} MiB  {where}"] += 1
        if shown < _LISTED:
            shown += 1
            sys.stdout.write(f"--- real {a}:{b} traced {c}:{d}\n")
            for size, where in real[a:b][:12]:
                sys.stdout.write(f"  - {size / 2**20:10.3f} {where}\n")
            for size, where in traced[c:d][:12]:
                sys.stdout.write(f"  + {size / 2**20:10.3f} {where}\n")
    sys.stdout.write(f"real {len(real)}, traced {len(traced)}\n")
    for line, count in only.most_common(_LISTED):
        sys.stdout.write(f"{count:5d} {line}\n")


if __name__ == "__main__":
    main()
