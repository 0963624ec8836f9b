"""`hfopt report`: what a finished or killed run did, or what changed between two."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hfopt.cli.json_output import answer_json
from hfopt.cli.output import answer, write_out
from hfopt.errors import ConfigError

if TYPE_CHECKING:
    from hfopt.monitor.history import History
    from hfopt.schema.run_outputs import ReportOutput


def report(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN_DIR", help="The output_dir of a run with HFGpuMonitor, or its log; else the newest below here."),
    ] = None,
    after: Annotated[Path | None, typer.Argument(metavar="RUN_DIR2", help="A second run: shows before and after.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For a program.")] = False,
    card: Annotated[bool, typer.Option("--model-card", help="A section for the model card, as Markdown.")] = False,
    rows: Annotated[bool, typer.Option("--rows", help="What was measured as CSV rows of benchmarks/data/trainer_runs.csv.")] = False,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write one page with charts there (- for stdout, instead).")
    ] = None,
) -> None:
    """Report how a run went and what held it back. Pace, where the time went, memory.

    \b
    Examples:
      hfopt report                       the newest run below this folder
      hfopt report out                   one run, finished, killed or live
      hfopt report out-before out-after  what a change of settings brought
      hfopt report out --html run.html   the same with charts, for a browser
      hfopt report out --json | jq .metrics
      hfopt report out --model-card
    """
    from hfopt.monitor import history, run_text

    first = history.load(history.newest_run(Path()) if run is None else run)
    second = history.load(after) if after is not None else None
    if card or rows:
        from hfopt.monitor.history import benchmark_rows, model_card

        if second is not None or as_json or html_file is not None or (card and rows):
            raise ConfigError("--model-card and --rows exclude each other and take one run")
        answer(model_card(first) if card else benchmark_rows(first))
        return
    if html_file is not None:
        write_out(_page(first, second), None if html_file == Path("-") else html_file)
        if html_file == Path("-"):
            return
    if as_json:
        answer_json("report", _facts(first, second))
    else:
        answer(run_text.report(first) if second is None else run_text.compare(first, second))


def _facts(first: History, second: History | None) -> ReportOutput:
    from hfopt.monitor import history, run_text

    facts = history.as_json(first)
    if second is None:
        return facts
    return {"before": facts, "after": history.as_json(second), "change": run_text.changes(first, second)}


def _page(first: History, second: History | None) -> bytes:
    from hfopt.monitor import run_text
    from hfopt.report import run_page

    if second is None:
        return run_page.run_page(run_text.view(first))
    figures, settings = run_text.differences(first, second), run_text.differing_settings(first, second)
    return run_page.comparison_page(run_text.view(first), run_text.view(second), figures, settings)
