"""No argument is passed over in silence: what each does to the figures, and what to say of those the figures do not show.

The table `argument_effects.toml` classes every field of the trainers' arguments; the classes of the installed versions are read from their
sources, so that nothing is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from hfopt.facts.training_keys import Field, installed, trl_config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # the same module under its old name

Effect = Literal["modelled", "neutral", "named"]
EFFECTS: tuple[Effect, ...] = ("modelled", "neutral", "named")
TRL_CONFIGS = ("SFT", "DPO", "KTO", "GRPO", "RLOO", "Reward")


@dataclass(frozen=True, kw_only=True, slots=True)
class ArgumentEffect:
    effect: Effect
    why: str


@cache
def effects() -> dict[str, ArgumentEffect]:
    """By key. A key that stands twice is a fault of the table."""
    table: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    found: dict[str, ArgumentEffect] = {}
    for effect in EFFECTS:
        for group in table[effect]:
            for key in group["keys"]:
                assert key not in found, f"{key} stands twice in the table"
                found[key] = ArgumentEffect(effect=effect, why=group["why"])
    return found


def fields_of(trainer: str) -> Mapping[str, Field]:
    """Every argument that the trainer's config has, as it is installed."""
    present = installed()
    if trainer in TRL_CONFIGS:
        return {**present.fields, **trl_config(trainer)}
    return {**present.fields, **present.seq2seq} if trainer == "Seq2SeqTrainer" else present.fields


def unseen(args: Mapping[str, Any], trainer: str) -> Iterator[str]:
    """A sentence for each argument that is set to something else than its default and that the figures do not show."""
    fields = fields_of(trainer)
    for key, value in args.items():
        found = effects().get(key)
        field = fields.get(key)
        if found is not None and found.effect == "named" and value not in (None, "", [], {}) and not _default(field, value):
            yield f"{key}: {_shown(value)} is set; {found.why}"


def _default(field: Field | None, value: Any) -> bool:
    """False is what an argument without a default of its own does when it is not set."""
    return bool(value == field.default or (field.default is None and value is False)) if field is not None else value is False


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
