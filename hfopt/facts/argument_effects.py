"""What each argument does to the figures, and which versions of transformers know it: no argument is ignored silently.

Source of every row: `training_args.py`, `training_args_seq2seq.py` and `trainer_utils.py` of the last patch of each minor release from
4.40 to 5.23, read by `training_keys.read`. A key without a row is in all of them. Kinds and defaults of keys that exist today are taken
from the installed version; those of keys that are gone stand here.

The table `argument_effects.toml` classes every field of the trainers' arguments; the classes of the installed versions are read from their
sources, so that nothing is imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from hfopt.compat.versions import release
from hfopt.errors import ConfigError
from hfopt.facts.training_keys import NEW_SPELLINGS, Field, Installed, installed, trl_config

Minor = tuple[int, int]
OLDEST, NEWEST = "4.40", "5.23"


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The minor releases that have a key: from `since` (None: 4.40 has it) to `until` (None: 5.23 still has it)."""

    since: str | None = None
    until: str | None = None
    field: Field | None = None  # of a key that the newest version no longer has

    def covers(self, version: Minor) -> bool:
        return release(self.since or OLDEST) <= version and (self.until is None or version <= release(self.until))


def _until(last: str, kinds: str, default: object = None, *, since: str | None = None) -> Span:
    return Span(since=since, until=last, field=Field(kinds=frozenset(kinds.split()), default=default))


def _since(first: str) -> Span:
    return Span(since=first)


SPANS: dict[str, Span] = {
    **dict.fromkeys(NEW_SPELLINGS.values(), _since("5.23")),
    "adafactor": _until("4.57", "bool", False),
    "dispatch_batches": _until("4.50", "bool none"),
    "evaluation_strategy": _until("4.50", "str none"),
    "fp16_backend": _until("4.57", "str", "auto"),
    "fp16_opt_level": _until("4.57", "str", "O1"),
    "fsdp_min_num_params": _until("4.57", "int", 0),
    "fsdp_transformer_layer_cls_to_wrap": _until("4.57", "str none"),
    "group_by_length": _until("5.1", "bool", False),
    "half_precision_backend": _until("4.57", "str", "auto"),
    "include_inputs_for_metrics": _until("4.57", "bool", False),
    "include_tokens_per_second": _until("4.57", "bool", False),
    "jit_mode_eval": _until("4.57", "bool", False),
    "logging_dir": _until("5.14", "str none"),
    "mp_parameters": _until("4.57", "str", ""),
    "no_cuda": _until("4.57", "bool", False),
    "overwrite_output_dir": _until("4.57", "bool", False),
    "past_index": _until("4.57", "int", -1),
    "per_gpu_eval_batch_size": _until("4.57", "int none"),
    "per_gpu_train_batch_size": _until("4.57", "int none"),
    "push_to_hub_model_id": _until("4.57", "str none"),
    "push_to_hub_organization": _until("4.57", "str none"),
    "push_to_hub_token": _until("4.57", "str none"),
    "ray_scope": _until("4.57", "str none", "last"),
    "save_safetensors": _until("4.57", "bool", True),
    "split_batches": _until("4.50", "bool none"),
    "torchdynamo": _until("4.57", "str none"),
    "tp_size": _until("4.51", "int none", 0, since="4.50"),
    "tpu_metrics_debug": _until("4.57", "bool", False),
    "tpu_num_cores": _until("4.57", "int none"),
    "use_ipex": _until("4.56", "bool", False),
    "use_legacy_prediction_loop": _until("4.57", "bool", False),
    "use_mps_device": _until("4.57", "bool", False),
    "warmup_ratio": _until("5.14", "float int none", 0.0),
    "average_tokens_across_devices": _since("4.46"),
    "batch_eval_metrics": _since("4.41"),
    "dataloader_in_order": _since("5.15"),
    "dataloader_multiprocessing_context": _since("5.15"),
    "ddp_static_graph": _since("5.6"),
    "enable_jit_checkpoint": _since("5.0"),
    "eval_on_start": _since("4.42"),
    "eval_strategy": _since("4.41"),
    "eval_use_gather_object": _since("4.43"),
    "hub_revision": _since("4.53"),
    "include_for_metrics": _since("4.46"),
    "liger_kernel_config": _since("4.53"),
    "parallelism_config": _since("4.56"),
    "project": _since("4.57"),
    "restore_callback_states_from_checkpoint": _since("4.41"),
    "torch_empty_cache_steps": _since("4.43"),
    "trackio_bucket_id": _since("5.6"),
    "trackio_space_id": _since("4.57"),
    "trackio_static_space_id": _since("5.6"),
    "train_sampling_strategy": _since("5.2"),
    "use_cache": _since("5.0"),
    "use_liger_kernel": _since("4.45"),
}

OPTIMS: dict[str, Span] = {
    "adamw_hf": Span(until="4.49"),
    "adamw_apex_fused": Span(until="5.7"),
    **dict.fromkeys(("adalomo", "lomo"), _since("4.42")),
    **dict.fromkeys(("adamw_torch_4bit", "ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"), _since("4.45")),
    **dict.fromkeys(("grokadamw", "schedule_free_adamw", "schedule_free_sgd"), _since("4.45")),
    **dict.fromkeys(("adamw_torch_8bit", "apollo_adamw", "apollo_adamw_layerwise", "schedule_free_radam"), _since("4.49")),
    "stable_adamw": _since("4.54"),
}


def minor_of(text: str) -> Minor:
    """'4.57' or '4.57.1' as its minor release; one that is not known here is refused."""
    try:
        minor = release(text)
    except ValueError as error:
        raise ConfigError(f"--for-transformers {text} is no version", hint="give one such as 4.57") from error
    if not release(OLDEST) <= minor <= max(release(NEWEST), release(installed().version)):
        raise ConfigError(
            f"--for-transformers {text}: the keys of {OLDEST} to {NEWEST} are known", hint="install that version and plan there"
        )
    return minor


@cache
def as_of(text: str | None) -> Installed:
    """The keys of that version; None is the installed one."""
    present = installed()
    if text is None or (minor := minor_of(text)) == release(present.version):
        return present
    fields = {key: field for key, field in present.fields.items() if key not in SPANS or SPANS[key].covers(minor)}
    fields |= {key: span.field for key, span in SPANS.items() if span.field is not None and span.covers(minor)}
    choices = [name for name in fields["optim"].choices if name not in OPTIMS or OPTIMS[name].covers(minor)]
    choices += [name for name, span in OPTIMS.items() if span.covers(minor) and name not in choices]
    fields["optim"] = replace(fields["optim"], choices=tuple(choices))
    return Installed(version=text, fields=fields, seq2seq=present.seq2seq)


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


def not_modelled(args: Mapping[str, Any], trainer: str, *, ranks: int = 1) -> Iterator[str]:
    """A sentence for each argument that is set to something else than its default and that the figures do not show."""
    fields = fields_of(trainer)
    for key, value in args.items():
        found = effects().get(key)
        field = fields.get(key)
        set_otherwise = value not in (None, "", [], {}) and not _default(field, value)
        if found is not None and found.effect == "named" and set_otherwise and not _is_idle(key, args):
            yield f"{key}: {_shown(value)} is set; {found.why}"
    for key, options, why in _NAMED_OPTIONS:
        inside = args.get(key)
        if isinstance(inside, Mapping) and not (key == "fsdp_config" and ranks > 1):  # then it is in the figures
            yield from (f"{key}: {option} is set; {why}" for option in options if inside.get(option))


def _is_idle(key: str, args: Mapping[str, Any]) -> bool:
    """Only read where another argument is on, and that is off."""
    switch = "use_vllm" if key.startswith("vllm_") else "use_liger_kernel" if key == "liger_kernel_config" else None
    return switch is not None and args.get(switch) is not True


_NAMED_OPTIONS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "gradient_checkpointing_kwargs",
        ("offload",),
        "it moves checkpoints to the host, which no figure shows: less on the card, slower steps",
    ),
    (
        "fsdp_config",
        ("activation_checkpointing", "fsdp_activation_checkpointing"),
        "the figures are those without FSDP's own checkpointing: it takes less memory and more time",
    ),
)
"""Entries of arguments that hold a mapping."""


def _default(field: Field | None, value: Any) -> bool:
    """False is what an argument without a default of its own does when it is not set."""
    return bool(value == field.default or (field.default is None and value is False)) if field is not None else value is False


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


SMALLEST_8BIT, SMALLEST_PAGED, BLOCK_8BIT = 4096, 100_000, 256  # elements
TORCH_ADAM = ("adamw_torch", "adamw_torch_fused")
FOREACH_ADAM = "adamw_torch"
FUSED_ADAM = "adamw_torch_fused"
_BITSANDBYTES = re.compile(r"^(paged_)?(adamw|lion|rmsprop|ademamix)(_bnb)?(_8bit|_32bit)?$")
_STATES = {"adamw": 2, "lion": 1, "rmsprop": 1, "ademamix": 3}


@dataclass(frozen=True, kw_only=True, slots=True)
class BitsAndBytesStates:
    """What the name of one of bitsandbytes' optimizers says."""

    count: int
    eight_bit: bool
    paged: bool

    def element_bytes(self, elements: int, *, embedding: bool) -> int:
        """Of all states of one tensor, on the card."""
        eight = self.eight_bit and elements >= SMALLEST_8BIT and not embedding
        held = 0 if self.paged and elements >= SMALLEST_PAGED else elements * (1 if eight else 4)
        return self.count * (held + (4 * -(-elements // BLOCK_8BIT) if eight else 0))


def bitsandbytes_states(optim: str) -> BitsAndBytesStates | None:
    """None: not one of bitsandbytes'."""
    match = _BITSANDBYTES.match(optim)
    if match is None or not (match[1] or match[2] in ("lion", "ademamix") or match[3] or match[4]):
        return None
    return BitsAndBytesStates(count=_STATES[match[2]], eight_bit=match[4] == "_8bit", paged=match[1] is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class StandIn:
    """The optimizer that is planned in place of one that is not modelled."""

    optim: str
    why: str


_WHOLE = "AdamW's whole states are planned, which take more than projected ones"
_STAND_INS: tuple[tuple[str, StandIn], ...] = (
    (r"(galore|apollo)_adamw(_layerwise)?", StandIn(optim=FUSED_ADAM, why=_WHOLE)),
    (r"galore_adamw_8bit(_layerwise)?", StandIn(optim="adamw_bnb_8bit", why="whole 8-bit states are planned, which take more")),
    (r"galore_adafactor(_layerwise)?", StandIn(optim="adafactor", why="Adafactor's whole states are planned, which take more")),
    (r"lomo", StandIn(optim="sgd", why="SGD is planned, whose gradients are whole and take more")),
    (r"adalomo", StandIn(optim="adafactor", why="Adafactor is planned, whose gradients are whole and take more")),
    (r"grokadamw", StandIn(optim="ademamix", why="three states of float32 are planned, as many as it keeps")),
    (r"schedule_free_(radam|adamw|sgd)|stable_adamw|adamw_anyprecision", StandIn(optim=FUSED_ADAM, why="AdamW's two states are planned")),
    (r"adamw_torch_(8|4)bit", StandIn(optim="adamw_bnb_8bit", why="bitsandbytes' 8-bit states are planned")),
    (r"adamw_torch_(xla|npu_fused)", StandIn(optim=FUSED_ADAM, why="it is for other devices: AdamW for CUDA is planned")),
)
"""Values of `optim` whose packages' updates are not traced. Sources: the papers and packages that transformers' OptimizerNames refers to:
galore-torch, apollo-torch, lomo-optim, grokadamw (a moving average of gradients beside Adam's two), schedulefree, torch-optimi, torchao."""


def stand_in(optim: str) -> StandIn | None:
    """None: it is traced itself, or nothing is known of it."""
    return next((found for pattern, found in _STAND_INS if re.fullmatch(pattern, optim)), None)
