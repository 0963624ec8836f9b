"""`hfopt report`: what a finished or killed run did, or what changed between two."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hfopt.cli.output import write_out

if TYPE_CHECKING:
    from hfopt.monitor.history import History


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The output_dir of a run with HFGpuMonitor, or its monitor.jsonl.")],
    after: Annotated[Path | None, typer.Argument(metavar="RUN_DIR2", help="A second run: shows before and after.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For a program.")] = False,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write one page with charts there (- for stdout, instead).")
    ] = None,
) -> None:
    """Tell how a run went and what held it back. Pace, where the time went, memory.

    \b
    Examples:
      hfopt report out                   one run, finished, killed or still going on
      hfopt report out-before out-after  what a change of settings brought
      hfopt report out --html run.html   the same with charts, for a browser
      hfopt report out --json | jq .metrics
    """
    from hfopt.monitor import history, run_text

    first = history.load(run)
    second = history.load(after) if after is not None else None
    if html_file is not None:
        write_out(_page(first, second), None if html_file == Path("-") else html_file)
        if html_file == Path("-"):
            return
    if as_json:
        facts = history.as_json(first)
        if second is not None:
            facts = {"before": facts, "after": history.as_json(second), "change": run_text.changes(first, second)}
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
    else:
        sys.stdout.write(run_text.report(first) if second is None else run_text.compare(first, second))


def _page(first: History, second: History | None) -> bytes:
    from hfopt.monitor import run_series, run_text
    from hfopt.report import run_page

    if second is None:
        return run_page.run_page(run_series.view(first))
    figures, settings = run_text.differences(first, second), run_text.differing_settings(first, second)
    return run_page.comparison_page(run_series.view(first), run_series.view(second), figures, settings)
