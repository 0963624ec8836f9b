"""`hfopt run`: the user's own training command, unchanged: planned, watched, and made to survive running out of memory."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hfopt.cli.options import Allow, Headroom, Keep, allowed, known_keys
from hfopt.cli.output import people, write_out
from hfopt.errors import ConfigError, HfoptError

CONTEXT_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="train.py and its arguments, -m module, or a launcher: torchrun, accelerate.")
    ],
    nproc: Annotated[int | None, typer.Option("--nproc", metavar="N", min=1, help="Start N processes with torchrun.")] = None,
    plan_only: Annotated[bool, typer.Option("--plan-only", help="Plan at the first Trainer.train(), write it, and end.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan, take three real steps, say what they took, and end.")] = False,
    plan: Annotated[bool, typer.Option("--plan/--no-plan", help="Plan each Trainer, or leave its settings alone.")] = True,
    keep: Keep = None,
    allow: Allow = None,
    headroom: Headroom = 0.06,
    fallback: Annotated[bool, typer.Option("--fallback/--no-fallback", help="Survive running out of memory, or not.")] = True,
    restarts: Annotated[int, typer.Option("--restarts", min=0, help="How often to start again from the last checkpoint.")] = 3,
    hang_after: Annotated[
        float, typer.Option("--hang-after", metavar="SECONDS", min=0, help="Report a rank that has made no step for this long; 0: never.")
    ] = 1800.0,
    restart_hung: Annotated[bool, typer.Option("--restart-hung", help="Also end it, and resume from the last checkpoint.")] = False,
    config: Annotated[
        Path | None, typer.Option("--config", help="The YAML to keep re-planned settings beside; by default the command's own .yaml.")
    ] = None,
) -> None:
    """Run a training script unchanged: planned, watched, protected. It trains with the fastest settings that fit.

    At its first train() each Trainer is planned from its own model, data and loss; the effective batch stays. Plan, reasons, the
    configuration in force and the monitor's log go to OUTPUT_DIR/hfopt. Memory that runs out is met in smaller pieces, or by a restart
    from the last checkpoint. Signals, standard input and the exit code pass through.

    \b
    Examples:
      hfopt run train.py --learning_rate 1e-4            a script
      hfopt run --nproc 4 train.py                       the same on four devices, with torchrun
      hfopt run --plan-only -m package.train             only the plan, in OUTPUT_DIR/hfopt
      hfopt run --restarts 5 torchrun --nproc_per_node 4 train.py
    """
    from hfopt.launch.handoff import RunOptions
    from hfopt.launch.supervisor import supervise

    if plan_only and dry_run:
        raise HfoptError("--plan-only and --dry-run exclude each other", hint="--dry-run plans too, and takes a few steps")
    if not plan and (plan_only or dry_run):
        raise HfoptError("--no-plan leaves nothing to do for --plan-only or --dry-run")
    options = RunOptions(
        mode="plan_only" if plan_only else "dry_run" if dry_run else "train",
        plan=plan,
        fallback=fallback and not dry_run,
        keep=tuple(sorted(known_keys(keep or []))),
        allow=tuple(sorted(allowed(allow))),
        headroom=headroom,
        hang_after_s=0.0 if plan_only or dry_run else hang_after,
    )
    arguments = resolved(command, nproc=nproc)
    source = config or next((Path(word) for word in command[1:] if word.endswith((".yaml", ".yml")) and Path(word).is_file()), None)
    console = people()

    def replanned(changes: Mapping[str, Any], why: str) -> None:
        if source is not None:
            _write_beside(source, changes, why)

    def say(line: str) -> None:
        console.print(line, markup=False)

    attempts = restarts if fallback and options.mode == "train" else 0
    raise typer.Exit(supervise(arguments, attempts=attempts, say=say, replanned=replanned, options=options, restart_hung=restart_hung))


def resolved(command: Sequence[str], *, nproc: int | None = None) -> list[str]:
    """What to execute: a script and a module run on this Python (under torchrun with `nproc`), anything else is a program."""
    first = command[0]
    python = [sys.executable] if nproc is None else [sys.executable, *_TORCHRUN, "--nproc_per_node", str(nproc)]
    if first == "-m":
        if len(command) < 2:
            raise HfoptError("-m needs the name of a module", hint="hfopt run -m package.train --lr 1e-4")
        return [*python, *command]
    if first.startswith("-"):
        raise HfoptError(f"no such option: {first}", hint="options of hfopt stand before the command; `hfopt run --help` lists them")
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise HfoptError(f"{first}: no such script")
        return [*python, *command]
    if nproc is not None:
        raise HfoptError(f"--nproc starts a script or -m module, not {first}", hint=f"give {first} its own number of processes instead")
    program = shutil.which(first)
    if program is None:
        raise HfoptError(f"{first}: no such program", hint="give a script (train.py), -m module, or a launcher such as torchrun")
    return [program, *command[1:]]


_TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def _write_beside(source: Path, changes: Mapping[str, Any], why: str) -> None:
    """`config.yaml` -> `config_replanned.yaml`, with nothing but the values changed. A config that cannot be edited is left to the output
    folder.
    """
    from hfopt.config.read_job import load
    from hfopt.config.yaml_edit import edit
    from hfopt.schema import Change

    try:
        loaded = load(source)
        before = loaded.job.raw if loaded.job is not None else {}
        edited = edit(loaded, [Change(key=key, before=before.get(key), after=value, reason=why) for key, value in changes.items()])
        write_out(edited.data, source.with_name(f"{source.stem}_replanned{source.suffix}"), like=source)
    except ConfigError as error:
        people().print(f"hfopt: {error}", markup=False)
