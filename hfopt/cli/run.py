"""`hfopt run`: the user's own training command, unchanged, made to survive running out of memory."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hfopt.cli.output import people, write_out
from hfopt.errors import ConfigError, HfoptError

CONTEXT_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="train.py and its arguments, -m module, or a launcher: torchrun, accelerate.")
    ],
    restarts: int = typer.Option(3, "--restarts", min=0, help="How often to start again from the last checkpoint."),
    config: Annotated[
        Path | None, typer.Option("--config", help="The YAML to keep re-planned settings beside; by default the command's own .yaml.")
    ] = None,
) -> None:
    """Run a training script unchanged; it survives out-of-memory. It goes on in smaller pieces at the same effective batch.

    Every Trainer the script makes is protected (see hfopt.protect). When a process cannot go on by itself, all ranks are ended and the
    command runs again from its last checkpoint. Signals, standard input and the exit code pass through.

    \b
    Examples:
      hfopt run train.py --learning_rate 1e-4            a script
      hfopt run --restarts 5 torchrun --nproc_per_node 4 train.py
      hfopt run --config train.yaml -m package.train     re-planned settings go beside train.yaml
    """
    from hfopt.runtime.launch import supervise

    arguments = resolved(command)
    source = config or next((Path(word) for word in command[1:] if word.endswith((".yaml", ".yml")) and Path(word).is_file()), None)
    console = people()

    def keep(changes: Mapping[str, Any], why: str) -> None:
        if source is not None:
            _write_beside(source, changes, why)

    def say(line: str) -> None:
        console.print(line, markup=False)

    raise typer.Exit(supervise(arguments, attempts=restarts, say=say, replanned=keep))


def resolved(command: Sequence[str]) -> list[str]:
    """What to execute: a script and a module run on this Python, anything else is a program."""
    first = command[0]
    if first == "-m":
        if len(command) < 2:
            raise HfoptError("-m needs the name of a module", hint="hfopt run -m package.train --lr 1e-4")
        return [sys.executable, *command]
    if first.startswith("-"):
        raise HfoptError(f"no such option: {first}", hint="options of hfopt stand before the command; `hfopt run --help` lists them")
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise HfoptError(f"{first}: no such script")
        return [sys.executable, *command]
    program = shutil.which(first)
    if program is None:
        raise HfoptError(f"{first}: no such program", hint="give a script (train.py), -m module, or a launcher such as torchrun")
    return [program, *command[1:]]


def _write_beside(source: Path, changes: Mapping[str, Any], why: str) -> None:
    """`config.yaml` -> `config_replanned.yaml`, with nothing but the values changed. A config that cannot be edited is left to the output
    folder.
    """
    from hfopt.config.edit import edit
    from hfopt.config.load import load
    from hfopt.schema import Change

    try:
        loaded = load(source)
        before = loaded.job.args if loaded.job is not None else {}
        edited = edit(loaded, [Change(key=key, before=before.get(key), after=value, reason=why) for key, value in changes.items()])
        write_out(edited.data, source.with_name(f"{source.stem}_replanned{source.suffix}"))
    except ConfigError as error:
        people().print(f"hfopt: {error}", markup=False)
