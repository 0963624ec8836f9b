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
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hfopt"
COMPOSES = frozenset({"planner", "cli", "launch"})
STAGES = frozenset(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()) - {"schema", "facts", "compat", "process"}


class Walk:
    """Modules seen, and the stage packages in the order of their visits."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.visits: list[str] = []
        self._inside: list[str] = []  # the stages whose calls have not returned yet
        self._files: dict[str, str | None] = {}  # file -> its path in the package, None: another package's

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return"):
            return
        file = frame.f_code.co_filename
        if file not in self._files:
            path = Path(file)
            self._files[file] = str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else None
        module = self._files[file]
        if module is None or not frame.f_code.co_flags & CO_OPTIMIZED:  # a module or a class body: importing, not walking
            return
        stage = module.partition("/")[0]
        if event == "call":
            self.modules.add(module)
        if stage not in STAGES:
            return
        if event == "return":
            if self._inside:
                self._inside.pop()
            return
        caller = self._inside[-1] if self._inside else "cli"
        self._inside.append(stage)
        if stage not in COMPOSES and caller in COMPOSES and (not self.visits or self.visits[-1] != stage):
            self.visits.append(stage)


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
