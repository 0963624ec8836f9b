"""How far a plan walks: the modules `hfopt plan --no-dry-run` passes through, and how often it enters each package.

usage: python benchmarks/plan_walk.py [CONFIG] [--gpu NAME] [--list]

Every call of a function of hfopt is seen by a profiler. A package is entered when control comes to it from the planner or the command
line; calls below that belong to the visit. Visits that follow one another without another package in between are one. The base
(errors, units, files, schema and the like) and facts are below all stages and not counted as visits.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hfopt"
COMPOSES = ("planner", "cli", "launch")


class Walk:
    """Modules seen, and the stage packages in the order of their visits."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.visits: list[str] = []
        self._parts: dict[str, tuple[str, str] | None] = {}

    def part(self, filename: str) -> tuple[str, str] | None:
        """The package of a file of ours (its own name where it stands at the top), and the file."""
        if filename not in self._parts:
            path = Path(filename)
            inside = path.is_relative_to(PACKAGE)
            relative = path.relative_to(PACKAGE) if inside else None
            self._parts[filename] = None if relative is None else (relative.parts[0], str(relative))
        return self._parts[filename]

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or frame.f_code.co_name == "<module>":
            return
        here = self.part(frame.f_code.co_filename)
        if here is None:
            return
        self.modules.add(here[1])
        package = here[0]
        if package in COMPOSES or package == "facts" or not (PACKAGE / package).is_dir() or package == "schema":
            return
        caller = self._caller(frame)
        if (caller is None or caller in COMPOSES) and (not self.visits or self.visits[-1] != package):
            self.visits.append(package)

    def _caller(self, frame: FrameType) -> str | None:
        """The nearest package of ours above this frame."""
        above = frame.f_back
        while above is not None:
            found = self.part(above.f_code.co_filename)
            if found is not None and (PACKAGE / found[0]).is_dir() and found[0] not in ("schema", "facts"):
                return found[0]
            above = above.f_back
        return None


def walk(config: Path, gpu: str) -> Walk:
    from hfopt.planner import Request
    from hfopt.planner.algorithm import make_plan

    seen = Walk()
    sys.setprofile(seen)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            make_plan(config, Request(gpu=gpu, dry_run=False, charts=False)).to_yaml()
    finally:
        sys.setprofile(None)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path, default=ROOT / "configs" / "bert_base_glue.yaml")
    parser.add_argument("--gpu", default="rtx 3070")
    parser.add_argument("--list", action="store_true", help="name the modules")
    options = parser.parse_args()
    seen = walk(options.config, options.gpu)
    print(f"{len(seen.modules)} modules, {len(seen.visits)} visits")
    for package, count in Counter(seen.visits).most_common():
        print(f"  {package:<10} entered {count} times")
    if options.list:
        print(*sorted(seen.modules), sep="\n")
        print(" > ".join(seen.visits))


if __name__ == "__main__":
    main()
