"""`hfopt report`: what a finished or killed run did, or what changed between two."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The output_dir of a run with HFGpuMonitor, or its monitor.jsonl.")],
    after: Annotated[Path | None, typer.Argument(metavar="[RUN_DIR2]", help="A second run: shows before and after.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For a program.")] = False,
) -> None:
    """Tell how a run went: pace, where the time went, memory, and what held it back.

    \b
    Examples:
      hfopt report out                   one run, finished, killed or still going on
      hfopt report out-before out-after  what a change of settings brought
      hfopt report out --json | jq .metrics
    """
    from hfopt.runtime.watch import history, report_text

    first = history.load(run)
    second = history.load(after) if after is not None else None
    if as_json:
        facts = history.as_json(first)
        if second is not None:
            facts = {"before": facts, "after": history.as_json(second), "change": report_text.changes(first, second)}
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
    else:
        sys.stdout.write(report_text.report(first) if second is None else report_text.compare(first, second))
