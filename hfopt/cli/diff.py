"""`hfopt diff`: two configs on the same cards: what changed, and what that costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hfopt.cli.json_output import answer_json
from hfopt.cli.options import HostName, Model
from hfopt.cli.output import answer, people
from hfopt.errors import ConfigError
from hfopt.redact import printable


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A TrainingArguments YAML.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The same job, changed.")],
    gpus: Annotated[str | None, typer.Option("--gpus", metavar="NAMES", help="Cards, separated by commas; else the one here.")] = None,
    num_gpus: Annotated[int | None, typer.Option("--num-gpus", min=1, help="How many of each.")] = None,
    host: HostName = None,
    model: Model = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len", min=1, help="Tokens per sample.")] = None,
    fail: Annotated[bool, typer.Option("--fail", help="Exit code 1 where the second no longer fits a card that the first fits.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Compare two configs: memory, fit and speed, by card.

    Both are priced as they are written; nothing is searched and no file is touched.

    \b
    Examples:
      hfopt diff train.yaml longer.yaml --gpus l4,4090
      hfopt diff old.yaml new.yaml --gpus a10g --fail      in CI: fails where it no longer fits
      hfopt diff old.yaml new.yaml --json                  for a program, on the card that is here
    """
    from hfopt.planner import Request
    from hfopt.planner.plan_diff import diff_configs

    names = [name.strip() for name in (gpus or "").split(",") if name.strip()] or _here()
    request = Request(num_gpus=num_gpus, host=host, model=model, seq_len=seq_len, dry_run=False, own_process=True, charts=False)
    found = diff_configs(first, second, names, request)
    if as_json:
        answer_json("diff", found.to_json())
    else:
        lines = [f"{key}: {_value(before)} → {_value(after)}" for key, before, after in found.keys]
        lines += [] if lines else ["the training arguments are the same"]
        before, after = found.effective_batches
        lines += [f"effective batch: {before} → {after}: this trains something else"] if before != after else []
        answer(printable("".join(f"{line}\n" for line in [*lines, *(one.words for one in found.cards)])))
        for note in found.notes:
            people().print(note, style="dim")
    if fail and any(one.first.fits and not one.second.fits for one in found.cards):
        raise typer.Exit(1)


def _here() -> list[str]:
    from hfopt.hardware.detect import detect

    gpus = detect().gpus
    if not gpus:
        raise ConfigError("no card is here to compare on", hint="name some: --gpus l4,4090 (or --gpus cpu)")
    return [gpus[0].name]


def _value(value: object) -> str:
    return "unset" if value is None else json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, str) else value
