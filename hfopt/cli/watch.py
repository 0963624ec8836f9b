"""`hfopt watch`: a live run in a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hfopt.cli.output import answer, people


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The output_dir of a run; else the newest below here.")] = Path(),
    pid: Annotated[int | None, typer.Option(help="Any training process instead; without the monitor its steps are not known.")] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print once to stdout and exit, as happens without a terminal.")] = False,
) -> None:
    """Watch a live run, and what holds it back. Loss, ETA, utilization, memory, data wait.

    \b
    Examples:
      hfopt watch out            a run with HFGpuMonitor
      hfopt watch --pid 12345    any process
      hfopt watch out --once     one look, for a script
    """
    from hfopt.monitor import screen

    if pid is not None:
        look: Callable[[], Mapping[str, Any]] = screen.ProcessWatcher(pid, first_wait_s=min(interval, 0.5)).look
        title = f"process {pid}"
    else:
        path = screen.find_live(run)
        look, title = (lambda: screen.read_live(path)), str(path.parent)
    if once or not sys.stderr.isatty():
        live = look()
        answer("\n".join(screen.lines(live, 100)) + "\n")
        return
    _show(look, title, interval)


def _show(look: Callable[[], Mapping[str, Any]], title: str, interval: float) -> None:
    from rich.live import Live

    from hfopt.monitor import screen

    console = people()
    live = look()
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as after:  # Ctrl-C is how it is meant to be ended
        after.callback(console.show_cursor)  # also if it comes while the screen is being set up
        shown = after.enter_context(Live(screen.render(live, title, console.width), console=console, auto_refresh=False))
        while screen.condition(live) == "running":
            time.sleep(interval)
            live = look()
            shown.update(screen.render(live, title, console.width), refresh=True)
