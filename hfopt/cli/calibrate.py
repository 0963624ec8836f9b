"""`hfopt calibrate`: one minute on the card that is here sets its figures for all later plans."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from hfopt.cli.json_output import answer_json
from hfopt.cli.output import answer, people
from hfopt.errors import ConfigError

if TYPE_CHECKING:
    from hfopt.speed.calibration import Calibration


def calibrate(
    show: Annotated[bool, typer.Option("--show", help="Show what was measured before, and measure nothing.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Forget all that was measured: plans use the tables again.")] = False,
    steps: Annotated[bool, typer.Option("--steps/--no-steps", help="Also a few steps of a real Trainer, for the cost of a launch.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout: a row that can be sent in.")] = False,
) -> None:
    """Measure this card or CPU; later plans use its figures.

    Matrix products by dtype, memory bandwidth, a reduction, tiny operations, and four steps of a real Trainer. Kept in the cache folder;
    used only for the same device under the same version of torch, and the plan says so.

    \b
    Examples:
      hfopt calibrate                  measure and keep
      hfopt calibrate --show           what is kept, and whether it is used here
      hfopt calibrate --json > me.json a row of this device
      hfopt calibrate --clear          back to the tables
    """
    if show and clear:
        raise ConfigError("--show and --clear exclude each other", hint="give one of them")
    if clear:
        _clear()
    elif show:
        _show(as_json=as_json)
    else:
        _measure(steps=steps, as_json=as_json)


def _measure(*, steps: bool, as_json: bool) -> None:
    from hfopt.planner.calibrate_device import calibrate_device
    from hfopt.speed.calibration import keep

    console = people()
    shown = console.status("measuring") if sys.stderr.isatty() else nullcontext()
    with shown as status:
        made, why_not = calibrate_device(trainer_steps=steps, progress=status.update if status is not None else console.print)
    try:
        path = keep(made)
    except OSError as error:
        raise ConfigError(f"the calibration cannot be kept: {error.strerror} ({error.filename})") from error
    if as_json:
        answer_json("calibrate", made)
    else:
        answer(_words(made))
    if why_not is not None:
        console.print(f"no steps of a Trainer: {why_not}; launches stay priced by the table")
    console.print(f"kept in {path}: plans for {made.device} use it while torch {made.torch} is installed")


def _show(*, as_json: bool) -> None:
    from hfopt.speed.calibration import folder, stored, unfit

    found = stored()
    if as_json:
        answer_json("calibrate", found)
        return
    for one in found:
        why_not = unfit(one)
        answer(f"{_words(one)}  {'used in plans for it' if why_not is None else f'not used: {why_not}'}\n")
    if not found:
        people().print(f"nothing is kept in {folder()}: plans use the tables; `hfopt calibrate` measures this device")


def _clear() -> None:
    from hfopt.speed.calibration import clear, folder

    try:
        count = clear()
    except OSError as error:
        raise ConfigError(f"cannot remove {error.filename}: {error.strerror}") from error
    people().print(f"{count} calibration{'' if count == 1 else 's'} removed from {folder()}: plans use the tables")


def _words(made: Calibration) -> str:
    from hfopt.units import format_seconds

    host = f"{made.cpu_name or 'unknown CPU'}, {made.cores:g} cores"
    lines = [f"{made.device} ({made.date}, torch {made.torch}, {host})"]
    lines += [f"  {name:<9} {rate / 1e12:8.3f} TFLOP/s in matrix products" for name, rate in made.matmul_flops.items()]
    lines += [f"  memory    {made.memory_bytes_per_s / 1e9:8.1f} GB/s copied, {made.reduction_bytes_per_s / 1e9:.1f} GB/s summed"]
    lines += [f"  operation {format_seconds(made.op_s):>11} each, tiny ones"]
    if made.trainer_step_s is not None and made.predicted_step_s is not None:
        step, before = format_seconds(made.trainer_step_s), format_seconds(made.predicted_step_s)
        lines += [f"  Trainer   {step:>11} a step measured, {before} predicted by these kernels ({made.measured_step})"]
    if made.launch_scale is not None:
        lines += [f"  launches  {made.launch_scale:8.2f} times the cost the table has for them"]
    if made.step_scale is not None:
        lines += [f"  steps     {made.step_scale:8.2f} times what these kernels predict"]
    return "\n".join(lines) + "\n"
