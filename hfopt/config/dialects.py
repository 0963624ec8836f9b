"""Tools that read TrainingArguments YAMLs in their own way: what they take differently, and under which key they take it.

Sources: llamafactory 0.9.5 (hparams/model_args.py, hparams/training_args.py, hparams/parser.py: OmegaConf reads the file) and
trl 1.16.0 (scripts/utils.py: TrlParser makes the YAML's values argparse defaults, and argparse converts default text by type).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hfopt.config.facts import Facts
from hfopt.config.values import Severity


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """How a tool says one argument: its key, and its value for each value of ours (None: the same value)."""

    key: str
    values: Mapping[Any, Any] | None = None

    def say(self, value: Any) -> Any:
        return value if self.values is None else self.values.get(value, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    name: str
    text_costs: Mapping[str, Severity] = field(default_factory=dict)  # by finding: text that the tool converts itself is no error
    still_takes: frozenset[str] = frozenset()  # keys gone from transformers that it keeps
    words: Mapping[str, Word] = field(default_factory=dict)


PLAIN = Dialect(name="HfArgumentParser")
TRL = Dialect(name="TrlParser", text_costs={"number_as_string": "warning", "bool_as_string": "warning"})
LLAMA_FACTORY = Dialect(
    name="LLaMA-Factory",
    text_costs={"number_as_string": "note"},
    still_takes=frozenset({"overwrite_output_dir"}),
    words={
        "gradient_checkpointing": Word(key="disable_gradient_checkpointing", values={True: False, False: True}),
        "use_liger_kernel": Word(key="enable_liger_kernel"),
        "attn_implementation": Word(key="flash_attn", values={"flash_attention_2": "fa2", "eager": "disabled"}),
    },
)


def is_llama_factory(facts: Facts) -> bool:
    return facts.has("finetuning_type") or (facts.has("template") and facts.has("stage", "cutoff_len"))


def dialect_of(facts: Facts, trainer: str) -> Dialect:
    if is_llama_factory(facts):
        return LLAMA_FACTORY
    return TRL if trainer in ("SFT", "DPO", "GRPO", "Reward", "KTO") else PLAIN


def implied(dialect: Dialect, facts: Facts, args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments in force that the file need not name."""
    if dialect is LLAMA_FACTORY:  # it checkpoints unless it is told not to
        if facts.true("disable_gradient_checkpointing"):
            return {"gradient_checkpointing": False}
        return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": not facts.false("use_reentrant_gc")}}
    return _trl_defaults(fp16=args.get("fp16") is True) if dialect is TRL else {}


def _trl_defaults(*, fp16: bool) -> dict[str, Any]:
    """What the installed TRL sets otherwise than TrainingArguments, from its source; without TRL here nothing is known."""
    spec = find_spec("trl")
    folder = Path(spec.origin).parent / "trainer" if spec is not None and spec.origin is not None else None
    sources = [path.read_text(encoding="utf-8") for name in ("base", "sft") if folder and (path := folder / f"{name}_config.py").is_file()]
    defaults: dict[str, Any] = {}
    if any(re.search(r"gradient_checkpointing: bool = field\(\s*default=True", source) for source in sources):
        defaults["gradient_checkpointing"] = True
    if not fp16 and any("self.bf16 = not (self.fp16)" in source for source in sources):
        defaults["bf16"] = True
    return defaults
