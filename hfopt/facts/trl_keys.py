"""The keys that the installed TRL's parser takes, read from its source as transformers' are: no import of TRL (seconds).

`trl sft --config FILE` and its scripts parse a YAML into three classes: the script's arguments, the trainer's config (a TrainingArguments)
and the model's (trl/scripts/sft.py, `make_parser`). A key that none of them has is refused (trl/scripts/utils.py, TrlParser).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from hfopt.compat.versions import source_folder
from hfopt.facts.training_keys import fields_of, installed, trl_config

TRAINERS = ("SFT", "DPO", "KTO", "GRPO", "RLOO", "Reward")
_BESIDE = (
    ("trainer/model_config.py", "ModelConfig"),
    ("scripts/utils.py", "ScriptArguments"),
    ("scripts/utils.py", "DatasetMixtureConfig"),
)
_SCRIPT_KEYS: Mapping[str, frozenset[str]] = {
    "GRPO": frozenset({"reward_model_name_or_path", "reward_funcs"}),  # trl/scripts/grpo.py
    "RLOO": frozenset({"reward_model_name_or_path", "reward_funcs"}),  # trl/scripts/rloo.py
}
_ALWAYS = frozenset({"env"})  # TrlParser itself

# Old name -> new name, by comparing the fields of TRL's configs over its versions.
RENAMED: dict[str, str] = {
    "max_seq_length": "max_length",
    "torch_dtype": "dtype",
    "use_liger": "use_liger_kernel",
    "vllm_max_model_len": "vllm_max_model_length",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "wandb_log_unique_prompts": "log_unique_prompts",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrlKeys:
    """What one trainer's parser takes."""

    version: str
    keys: frozenset[str]


@cache
def trl_parser_keys(trainer: str) -> TrlKeys | None:
    """None: TRL is not installed, keeps its configs elsewhere, or has no such trainer."""
    folder, config = source_folder("trl"), trl_config(trainer)
    if folder is None or trainer not in TRAINERS or not config:
        return None
    keys: set[str] = {*installed().fields, *config, *_SCRIPT_KEYS.get(trainer, ()), *_ALWAYS}
    for file, name in _BESIDE:
        path = folder / file
        found = fields_of(path.read_text(encoding="utf-8"), name) if path.is_file() else None
        if found is None:
            return None
        keys |= found.keys()
    return TrlKeys(version=metadata.version("trl"), keys=frozenset(keys))
