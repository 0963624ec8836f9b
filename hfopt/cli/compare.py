"""`hfopt compare`: the same job planned for several cards from shared traces: which one to rent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfopt.cli.options import Allow, ConfigFile, Headroom, Like, Model, ModelFrom, Samples, allowed
from hfopt.cli.output import people, write_out
from hfopt.errors import ConfigError

if TYPE_CHECKING:
    from hfopt.planner.comparison import Row


def compare(
    config: ConfigFile,
    gpus: Annotated[str, typer.Option("--gpus", metavar="NAMES", help="Cards, separated by commas: t4,l4,4090,a100-80gb.")],
    prices: Annotated[Path | None, typer.Option("--prices", metavar="FILE", help="YAML or JSON: card name to price of an hour.")] = None,
    num_gpus: Annotated[int, typer.Option("--num-gpus", min=1, help="How many of each.")] = 1,
    model: Model = None,
    like: Like = None,
    model_from: ModelFrom = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len", min=1, help="Tokens per sample.")] = None,
    samples: Samples = None,
    headroom: Headroom = 0.06,
    allow: Allow = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout instead of the table.")] = False,
) -> None:
    """Plan the same job for several cards. Says which fits, how fast, and what the run costs where prices are given.

    \b
    Examples:
      hfopt compare train.yaml --gpus t4,l4,4090,a100-80gb
      hfopt compare train.yaml --gpus l4,h100-sxm --prices prices.yaml --samples 50000
      hfopt compare train.yaml --gpus 3090,4090 --num-gpus 4 --json
    """
    from hfopt.planner import Request
    from hfopt.planner.comparison import compare_cards

    names = [name.strip() for name in gpus.split(",") if name.strip()]
    if not names:
        raise ConfigError("--gpus names no card", hint="for example --gpus t4,l4,4090")
    request = Request(
        own_process=True,
        num_gpus=num_gpus,
        model=model,
        like=like,
        model_from=model_from,
        seq_len=seq_len,
        samples=samples,
        headroom=headroom,
        allow=allowed(allow),
        dry_run=False,
    )
    rows = compare_cards(config, names, request, prices=_prices(prices))
    if as_json:
        text = json.dumps([row.to_json() for row in rows], indent=2, ensure_ascii=False) + "\n"
        write_out(text.encode(), None)
    else:
        _table(rows)


def _prices(path: Path | None) -> dict[str, float]:
    if path is None:
        return {}
    import yaml

    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: the prices cannot be read: {error}") from error
    if not isinstance(data, dict) or not all(isinstance(price, int | float) and price >= 0 for price in data.values()):
        raise ConfigError(f"{path}: prices are a mapping of card names to numbers", hint="for example: t4: 0.35")
    return {str(name): float(price) for name, price in data.items()}


def _table(rows: tuple[Row, ...]) -> None:
    """The table is the answer, so it goes to stdout; remarks go to stderr."""
    from rich.console import Console
    from rich.table import Table

    from hfopt.planner.comparison import told_apart
    from hfopt.report.text import assumed_lines

    console = people()
    for line in assumed_lines(rows[0].assumed):
        console.print(line)
    table = Table(box=None, pad_edge=False)
    for title in ("card", "fits", "settings", "samples/s", "busy", "memory", "run", "cost"):
        table.add_column(
            title, justify="right" if title in ("samples/s", "busy", "memory", "run", "cost") else "left", no_wrap=title != "settings"
        )
    for row in rows:
        table.add_row(*row.cells())
    Console(file=sys.stdout, soft_wrap=False, highlight=False, width=None if sys.stdout.isatty() else 160).print(table)
    if (equal := told_apart(rows)) is not None:
        console.print(equal)
    for note in dict.fromkeys(note for row in rows for note in row.notes):
        console.print(note, style="dim")
