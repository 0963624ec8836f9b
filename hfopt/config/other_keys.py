"""Keys beside those of the Trainer: what a file sets and no figure shows is said, and so is what nobody here knows.

What the reader asks for is read; what another tool's table knows changes nothing of a step, unless `other_keys.toml` says that it does. The
rest is a script's own, and may or may not matter: it is listed, but for names that say themselves what they are about (logs, paths, data).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from hfopt.config.lookup import Facts
from hfopt.config.training_arguments import ALIASES, GONE, NEWER, known_elsewhere
from hfopt.config.yaml_document import NodePath
from hfopt.facts.argument_effects import effects
from hfopt.facts.training_keys import installed

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # the same module under its old name

_MOST_LISTED = 8
_ABOUT_OTHERS = re.compile(
    r"wandb|log|report|track|mlflow|swanlab|tensorboard|path|dir|file|folder|name|seed|save|push|hub|token|key|project|run|tag|version|desc"
    r"|split|column|field|prompt|template|system|metric|patience|early|epoch|step|lr|rate|warm|decay|beta|eps|sched|proc|worker|cache|shuf"
    r"|test|val|eval|train|data|sample|size|ratio|label|class|task|lang|reward|weight|coef|temp|top_|penalty|num_beams|gen|comment|author"
    r"|date|debug|verbose|entity|group|url|api|user|email|config|mode|type|format|device|gpu|node|port|host|timeout|monitor|resume|check"
)
"""Words in the names of keys about anything but what a step holds."""


def unread(facts: Facts, sections: Iterable[NodePath]) -> Iterator[str]:
    """A sentence for the keys that another tool reads and no figure shows, by what is to say of them, and one for those nobody knows."""
    reasons, places = _reasons(), set(sections)
    named: dict[str, list[str]] = {}
    unknown: list[str] = []
    for path, value in facts.leaves():
        key = path[-1]
        if _is_unset(value):
            continue
        if key in reasons:
            named.setdefault(reasons[key], []).append(f"{key}: {_shown(value)}")
        elif (
            path[:-1] in places
            and not key.startswith("_")
            and not _is_known(key, facts.asked)
            and _ABOUT_OTHERS.search(key.lower()) is None
        ):
            unknown.append(key)
    for why, settings in named.items():
        yield f"{', '.join(settings)} {'is' if len(settings) == 1 else 'are'} set; {why}"
    if unknown:
        more = f" and {len(unknown) - _MOST_LISTED} more" if len(unknown) > _MOST_LISTED else ""
        yield f"not read, so in no figure: {', '.join(dict.fromkeys(unknown[:_MOST_LISTED]))}{more}"


def _is_unset(value: Any) -> bool:
    """Also one device, one shard, no block: nothing is changed."""
    if isinstance(value, bool) or value is None:
        return not value
    return value in ("", [], {}, "none", "None", "false", "no", 0, 1)


def _is_known(key: str, asked: Collection[str]) -> bool:
    present = installed()
    own = key in present.fields or key in present.seq2seq or key in ALIASES or key in GONE or key in NEWER or key in effects()
    return own or key.lower() in asked or key in known_elsewhere()


@cache
def _reasons() -> dict[str, str]:
    table: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {key: group["why"] for group in table["named"] for key in group["keys"]}


def _shown(value: Any) -> str:
    text = "true" if value is True else str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
