"""`hfopt cache`: the traces that are kept on this disk, with their sizes, and how to clear them."""

from __future__ import annotations

from collections import defaultdict
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from hfopt.cli.json_output import answer_json
from hfopt.cli.output import answer, people
from hfopt.units import format_bytes

if TYPE_CHECKING:
    from hfopt.schema.run_outputs import CacheOutput
    from hfopt.store import Store, StoredEntry


class Action(str, Enum):
    LIST = "list"
    CLEAR = "clear"


def cache(
    action: Annotated[Action, typer.Argument(help="`clear` removes all traces.")] = Action.LIST,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show the traces kept on this disk, or clear them.

    A trace is kept so that the next question about the same job (another card, batch or headroom) is answered without importing torch.
    It holds sizes, shapes and kernels; never weights or data. A trace of other versions of torch, transformers, peft, TRL or hfopt is
    never used.

    \b
    Examples:
      hfopt cache                         what is kept, and how large it is
      hfopt cache clear                   remove it
      hfopt cache --json                  for a program

    HFOPT_NO_CACHE=1 in the environment plans without it.
    """
    from hfopt.files import location
    from hfopt.store import Store

    store = Store(location("traces"))
    if action is Action.CLEAR:
        entries = list(store.entries())
        removed = store.clear()
        people().print(f"{removed} traces removed ({format_bytes(sum(entry.size_bytes for entry in entries))}) from {store.folder}")
        return
    entries = list(store.entries())
    if as_json:
        answer_json("cache", _as_data(store, entries))
    else:
        _table(store, entries)


def _as_data(store: Store, entries: list[StoredEntry]) -> CacheOutput:
    return {
        "folder": str(store.folder),
        "most_bytes": store.most_bytes,
        "total_bytes": sum(entry.size_bytes for entry in entries),
        "entries": [
            {"label": entry.label, "size_bytes": entry.size_bytes, "used_s": entry.used_s, "file": entry.path.name} for entry in entries
        ],
    }


def _table(store: Store, entries: list[StoredEntry]) -> None:
    """Entries of one label in one line: a model has a handful of each."""
    from hfopt.store import OFF, age_words

    by_label: dict[str, list[StoredEntry]] = defaultdict(list)
    for entry in entries:
        by_label[entry.label or "not to be believed: removed when it is met"].append(entry)
    wide = max((len(label) for label in by_label), default=0)
    for label, alike in by_label.items():
        size = format_bytes(sum(entry.size_bytes for entry in alike))
        answer(f"{label:<{wide}}  {size:>10}  {len(alike):>3} × used {age_words(alike[0].used_s)}\n")
    total, most = format_bytes(sum(entry.size_bytes for entry in entries)), format_bytes(store.most_bytes)
    people().print(f"{len(entries)} traces, {total} of at most {most}, in {store.folder}; {OFF}=1 plans without them")
