"""`hfopt explain`: a pasted traceback or a training log with an out-of-memory error: why, where, and what would have fitted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfopt.cli.json_output import answer_json
from hfopt.cli.options import Accelerate, Model, NumGpus, Section, Vram, complete_gpu
from hfopt.cli.output import people, remark
from hfopt.errors import LogError

if TYPE_CHECKING:
    from hfopt.facts.log_text import LogLine
    from hfopt.schema import Explanation, OomReport
    from hfopt.schema.outputs import NothingExplained, OomExplained

STYLES = {"title": "bold", "plain": "", "soft": "dim"}


def explain(
    log: Annotated[str, typer.Argument(metavar="LOG", help="A log or a pasted traceback; - for standard input.")],
    config: Annotated[str | None, typer.Option("--config", metavar="FILE", help="The run's config: its step is replayed.")] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME", autocompletion=complete_gpu, help="The card, where the log does not state its size."),
    ] = None,
    vram: Vram = None,
    num_gpus: NumGpus = None,
    accelerate: Accelerate = None,
    model: Model = None,
    section: Section = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Say why a run ran out of memory, and what would have fitted.

    What was asked for and what was free, the cause, the phase, whether it was fragmentation, and the smallest changes that help.

    Exit code 0: an out-of-memory error was found and is explained. 1: there is none in the log. 2: the log or the config cannot be read.

    \b
    Examples:
      hfopt explain train.log                             what the messages say
      hfopt explain train.log --config train.yaml         by the replay of its step, every change with its figure
      pbpaste | hfopt explain - --config train.yaml       a traceback from the clipboard
      hfopt explain train.log --json                      for a program
    """
    from hfopt.facts.log_text import is_text, read_lines
    from hfopt.facts.oom_log import read_oom

    raw = _read(log)
    if not is_text(raw):
        raise LogError(f"{'standard input' if log == '-' else log}: is not text", hint="give the log that the run printed")
    lines = read_lines(raw)
    report = read_oom(lines)
    if report is None:
        _tell_none(log, lines, as_json=as_json)
        raise typer.Exit(1)
    options = {"gpu": gpu, "vram_gib": vram, "num_gpus": num_gpus, "accelerate": accelerate, "model": model, "section": section}
    made = _explained(report, config, options)
    if as_json:
        answer_json("explain", _as_data(made))
        return
    _tell(made)


def _read(log: str) -> bytes:
    from hfopt.facts.log_text import MOST_BYTES

    if log == "-":
        return sys.stdin.buffer.read(4 * MOST_BYTES)[-MOST_BYTES:]
    try:
        with Path(log).open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - MOST_BYTES))
            return stream.read(MOST_BYTES)
    except FileNotFoundError:
        raise LogError(f"{log}: no such file", hint="give a log, or - and paste the traceback") from None
    except IsADirectoryError:
        raise LogError(f"{log}: is a directory", hint="name the log in it") from None
    except (OSError, ValueError) as error:
        raise LogError(f"{log}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _explained(report: OomReport, config: str | None, options: dict[str, Any]) -> Explanation:
    from hfopt.planner.explanation import explain as by_log
    from hfopt.planner.explanation import explain_with_config

    if config is None:
        return by_log(report)
    with people().status("replaying the step …"):
        from hfopt.compat.transformers_patches import quietly
        from hfopt.job.request import Request, launched

        with quietly():
            return explain_with_config(report, config, launched(Request(**options, own_process=True)))


def _tell(made: Explanation) -> None:
    from rich.text import Text

    from hfopt.report.memory_text import explanation_lines

    console = people()
    for style, text in explanation_lines(made):
        console.print(Text(text, style=STYLES[style]))


def _tell_none(log: str, lines: tuple[LogLine, ...], *, as_json: bool) -> None:
    from hfopt.facts.oom_log import fault_beside_memory

    other = fault_beside_memory(lines)
    if as_json:
        nothing: NothingExplained = {"found": False, "other_fault": other}
        answer_json("explain", nothing)
        return
    beside = "" if other is None else f"; what it shows is another fault: {other}"
    name = "standard input" if log == "-" else log
    if not any(line.text for line in lines):
        remark(f"{name}: is empty\n")
        return
    remark(f"{name}: no out-of-memory error in {len(lines)} line{'s' * (len(lines) != 1)}{beside}\n")


def _as_data(made: Explanation) -> OomExplained:
    report, figures = made.report, made.report.figures
    return {
        "found": True,
        "source": report.source,
        "cause": report.cause,
        "certain": report.certain,
        "fragmentation": report.cause == "fragmentation",
        "phase": report.phase,
        "evidence": report.evidence,
        "line": report.line,
        "text": report.text,
        "device": report.device,
        "ranks": report.ranks,
        "batch": report.batch,
        "accumulation": report.accumulation,
        "step": report.step,
        "went_on": report.went_on,
        "figures": {
            "requested_bytes": figures.requested_bytes,
            "total_bytes": figures.total_bytes,
            "free_bytes": figures.free_bytes,
            "allocated_bytes": figures.allocated_bytes,
            "reserved_bytes": figures.reserved_bytes,
            "process_bytes": figures.process_bytes,
            "others_bytes": figures.others_bytes,
            "limit_bytes": figures.limit_bytes,
            "unused_bytes": figures.unused_bytes,
        },
        "processes": report.processes,
        "vllm": report.vllm,
        "reasons": made.reasons,
        "replay": made.replay,
        "changes": made.changes,
        "notes": made.notes,
    }
