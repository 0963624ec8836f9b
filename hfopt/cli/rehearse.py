"""`hfopt rehearse`: the user's own training script on a card they do not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hfopt.cli.json_output import answer_json
from hfopt.cli.options import complete_gpu
from hfopt.cli.output import people

if TYPE_CHECKING:
    from hfopt.schema import Rehearsal, RehearsedTime

CONTEXT_SETTINGS = {"allow_interspersed_args": False}
_EXIT_CODES = {"fits": 0, "unsupported": 1, "oom": 3, "incomplete": 4, "timeout": 4, "failed": 4}


def rehearse(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="The training command: python train.py, torchrun ...", show_default=False)
    ],
    gpu: str = typer.Option(..., "--gpu", autocompletion=complete_gpu, help="The card to stand in for, as `hfopt gpus` lists them."),
    num_gpus: int = typer.Option(1, "--num-gpus", min=1, max=16, help="How many of them the machine has."),
    steps: int = typer.Option(3, "--steps", min=1, help="Optimizer steps to run before the evaluation and the checkpoint."),
    vram: str | None = typer.Option(None, "--vram", help="Memory of the card, when it is not the usual one: 24GiB."),
    timeout: float = typer.Option(600.0, "--timeout", min=1.0, help="Seconds after which the script is ended."),
    timed: bool = typer.Option(False, "--time", help="Also predict the step time from what the script launches; takes 4 steps or more."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON on stdout."),
) -> None:
    """Run a training script unmodified on a virtual GPU. Does it start, does it fit, where does it peak?

    Memory is counted by PyTorch's own CUDA allocator; kernels compute nothing, so losses and times shown by the script mean nothing.
    With --time hfopt prices every kernel, copy and collective that the steps launch, and the script's own clock shows it: a prediction,
    nothing is measured on a card.
    Nothing the Trainer writes reaches your folders. Exit code: 0 it fits, 1 the card lacks something it asks for, 3 out of memory,
    4 the rehearsal did not get through; a script that fails by itself passes its own code on.

    \b
    Examples:
      hfopt rehearse --gpu a100-80gb -- python train.py --bf16 true
      hfopt rehearse --gpu t4 --num-gpus 2 -- torchrun --nproc_per_node 2 train.py
      hfopt rehearse --gpu a100-80gb --time -- python train.py
      hfopt rehearse --gpu 3090 --vram 20GiB --steps 5 --json -- python train.py
    """
    from hfopt.errors import HardwareError
    from hfopt.hardware.detect import named
    from hfopt.memory.step_memory import context_bytes
    from hfopt.probe.rehearsal import rehearse as run
    from hfopt.units import parse_bytes

    try:
        memory_bytes = parse_bytes(vram, default_unit="g") if vram else None
    except ValueError as error:
        raise HardwareError(f"--vram: {error}") from error
    cards = named(gpu, memory_bytes=memory_bytes).gpus
    if not cards:
        raise HardwareError(f"--gpu {gpu} is not a card", hint="run the script itself on the CPU; `hfopt gpus` lists the cards")
    card = cards[0]
    seen = run(
        command,
        card,
        count=num_gpus,
        steps=steps,
        context_bytes=context_bytes(card.capability, multiprocessors=card.sms),
        timeout_s=timeout,
        timed=timed,
    )
    if as_json:
        answer_json("rehearse", seen)
    _show(seen)
    if timed:
        _show_time(seen)
    raise typer.Exit(_exit_code(seen))


def _exit_code(seen: Rehearsal) -> int:
    if seen.outcome == "failed" and seen.script_exit_code and seen.script_exit_code > 0:
        return seen.script_exit_code
    return _EXIT_CODES[seen.outcome]


def _show(seen: Rehearsal) -> None:
    from rich.table import Table

    from hfopt.units import format_bytes

    console = people()
    card = f"{seen.count} × {seen.gpu.name}" if seen.count > 1 else seen.gpu.name
    console.print(f"\nRehearsal on a virtual {card} ({format_bytes(seen.capacity_bytes)} for programs)")
    if seen.phases:
        table = Table("phase", "peak allocated", "peak reserved", "on the card", "", box=None, pad_edge=False)
        for column in table.columns[1:4]:
            column.justify = "right"
        for phase in seen.phases:
            where = f" ({phase.part})" if phase.part else ""
            table.add_row(
                phase.phase + where,
                format_bytes(phase.allocated_bytes),
                format_bytes(phase.reserved_bytes),
                format_bytes(phase.reserved_bytes + seen.context_bytes),
                "← peak" if phase is seen.peak else "",
            )
        console.print(table)
    for finding in seen.findings:
        console.print(f"not supported: {finding}.")
    for note in seen.notes:
        console.print(f"note: {note}")
    console.print(f"{seen.message}{_room(seen)}")
    if not seen.phases and seen.outcome == "unsupported":  # nothing was run
        return
    meant = "Losses and metrics" if seen.time is not None else "Losses, metrics and times"
    console.print(f"{meant} printed by the script mean nothing here: kernels of the virtual GPU compute nothing.")


def _room(seen: Rehearsal) -> str:
    from hfopt.units import format_bytes

    if seen.peak is None or seen.outcome not in ("fits", "unsupported"):
        return ""
    left = seen.capacity_bytes - seen.peak.reserved_bytes - seen.context_bytes
    return f"; {format_bytes(left)} of {format_bytes(seen.capacity_bytes)} stay free"


_CAUSES = {
    "input": "fetching data",
    "launch": "the host launches",
    "sync": "the host waits for a value",
    "python": "the script's own Python",
    "communication": "other ranks",
}


def _show_time(seen: Rehearsal) -> None:
    from rich.table import Table

    from hfopt.units import format_percent, format_seconds

    console, time = people(), seen.time
    if time is None:
        done = (
            f"only {seen.steps_done} steps were done" if seen.steps_done < 2 else f"the catalog does not know the speed of {seen.gpu.name}"
        )
        if any("time of compiled code" in note for note in seen.notes):
            done = "the code is compiled"
        console.print(f"no time predicted: {done}")
        return
    console.print(f"\nRehearsed time (predicted from what was launched; nothing was measured on a card): {_headline(time)}")
    table = Table("phase", "time", "of the step", "kernels run", "launches", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for phase in time.phases:
        share = format_percent(phase.wall_s / time.step_s)
        table.add_row(phase.phase, format_seconds(phase.wall_s), share, format_seconds(phase.busy_s), str(phase.launches))
    console.print(table)
    idle = [(cause, seconds) for cause, seconds in time.idle_s.items() if seconds >= 0.001 * time.step_s]
    gaps = ", ".join(f"{format_seconds(seconds)} {_CAUSES[cause]}" for cause, seconds in sorted(idle, key=lambda item: -item[1]))
    console.print(f"the card is idle for {format_percent(1 - time.busy_s / time.step_s)} of the step" + (f": {gaps}" if gaps else ""))
    kinds = ", ".join(f"{kind} {format_percent(share)}" for kind, share in time.shares.items() if share >= 0.01)
    console.print(f"kernels by kind: {kinds}")
    if time.host_scale is None:
        console.print("note: the script's own Python between launches was not timed: the run was too short")


def _headline(time: RehearsedTime) -> str:
    from hfopt.units import format_percent, format_rate, format_seconds

    words = f"{format_seconds(time.step_s)} per step"
    if time.samples_per_s is not None:
        words += f", {format_rate(time.samples_per_s, 'samples')}"
    if time.rate_error is not None:
        words += f"; eight of ten such predictions are within {format_percent(time.rate_error)}"
    return words
