"""Tools that read TrainingArguments YAMLs in their own way: what they take differently, and under which key they take it.

Sources: llamafactory 0.9.5 (hparams/model_args.py, hparams/training_args.py, hparams/parser.py: OmegaConf reads the file) and
trl 1.16.0 (scripts/utils.py: TrlParser makes the YAML's values argparse defaults, and argparse converts default text by type).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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


def implied(dialect: Dialect, facts: Facts) -> dict[str, Any]:
    """Arguments in force that the file need not name: LLaMA-Factory checkpoints unless it is told not to."""
    if dialect is not LLAMA_FACTORY:
        return {}
    args: dict[str, Any] = {"gradient_checkpointing": not facts.true("disable_gradient_checkpointing")}
    if args["gradient_checkpointing"]:
        args["gradient_checkpointing_kwargs"] = {"use_reentrant": not facts.false("use_reentrant_gc")}
    return args
