"""The installed TRL's own trainer around a model, so that a step is traced as it computes it: its loss, its fused head, its reference.

The trainer's whole constructor runs (about a tenth of a second): it puts the adapter on, switches dropout off, loads a reference (here a
second model without weights), patches the model's head, prepares the samples and chooses the collator. What it would do besides is kept
from it: moving the model, downloads, telemetry, asking the reference about every sample. Its arguments are those of the config that are
TRL's own; the rest (batch, precision, schedule) belongs to the step and is set there.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import nn

from hfopt.compat.transformers_patches import quietly, undisturbed
from hfopt.errors import WorkloadError
from hfopt.facts.training_keys import as_spelled
from hfopt.model.loading import mark_loaded
from hfopt.model.losses import Alone, apart, carry, loss_of
from hfopt.model.trl_samples import SampleSize, rows, tokenizer
from hfopt.schema import GENERATING

CARRIED_TRAINER = "_hfopt_trainer"
"""On a model that a trainer was made around: that trainer. A plain attribute, no part of the model."""

_PLACES: Mapping[str, tuple[str, ...]] = {
    "SFT": ("trl",),
    "DPO": ("trl",),
    "KTO": ("trl", "trl.experimental.kto"),
    "Reward": ("trl",),
    "GRPO": ("trl",),
    "RLOO": ("trl",),
    "ORPO": ("trl", "trl.experimental.orpo"),
    "CPO": ("trl", "trl.experimental.cpo"),
}
"""Where TRL keeps the trainer of a kind, and has kept it."""

_NOT_OF_THE_STEP = frozenset(
    {
        *("activation_offloading", "assistant_only_loss", "completion_only_loss"),  # said in a note
        *("chat_template_path", "eos_token", "pad_token", "dataset_text_field", "dataset_kwargs", "dataset_num_proc", "eval_packing"),
        *("model_init_kwargs", "ref_model_init_kwargs", "trust_remote_code", "sync_ref_model", "shuffle_dataset"),
        *("generation_batch_size", "steps_per_generation", "use_vllm", "use_transformers_paged", "chat_template_kwargs", "tools"),
        *("reward_weights", "reward_model_path", "reward_funcs", "max_length", "max_prompt_length", "max_completion_length"),
    }
)
"""TRL's own arguments that concern data, loading or generation; lengths are given by the samples."""
_ALSO = ("label_smoothing_factor", "neftune_noise_alpha")
_REFERENCE_COLUMNS = {"DPO": ("ref_chosen_logps", "ref_rejected_logps"), "KTO": ("ref_logps", "ref_KL_logps")}
_REFUSALS = (ValueError, TypeError, NotImplementedError, KeyError, AttributeError, ImportError, RuntimeError)
"""What TRL's configs and constructors raise on arguments that do not go together, or that this version does not know."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrlClasses:
    trainer: Any
    config: Any

    @property
    def own_fields(self) -> frozenset[str]:
        """The arguments that TRL's config adds to TrainingArguments, or gives another meaning."""
        from transformers import TrainingArguments

        plain = {field.name for field in dataclasses.fields(TrainingArguments)}
        return frozenset(field.name for field in dataclasses.fields(self.config) if field.init and field.name not in plain)

    def default(self, name: str) -> Any:
        field = next((field for field in dataclasses.fields(self.config) if field.name == name), None)
        return None if field is None or field.default is dataclasses.MISSING else field.default


def trl_classes(kind: str) -> TrlClasses | None:
    """None where TRL is not installed, or this version has no trainer of that kind."""
    if kind not in _PLACES or find_spec("trl") is None:
        return None
    for place in _PLACES[kind]:
        try:
            with quietly():  # trl.experimental warns of itself
                module = importlib.import_module(place)
            return TrlClasses(trainer=getattr(module, f"{kind}Trainer"), config=getattr(module, f"{kind}Config"))
        except (ImportError, AttributeError):
            continue
    return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrlSetup:
    """All that a trainer of this kind is made of but the model."""

    kind: str
    classes: TrlClasses
    arguments: Mapping[str, Any]
    size: SampleSize

    def around(self, model: nn.Module, *, another: Callable[[], nn.Module], adapter: Any = None) -> nn.Module:
        """The model as this trainer trains it, with the trainer on it. `another` makes the reference; `adapter` is a peft config."""
        trainer = self._trainer(model, another, adapter)
        trained: nn.Module = trainer.model
        reference = getattr(trainer, "ref_model", None)
        if isinstance(reference, nn.Module):
            carry(trained, {"ref_model": reference})
        if "device_map" not in (self.arguments.get("model_init_kwargs") or {}):
            mark_loaded(trained)
        beside = apart(trainer)
        beside.accelerator = _OneDevice(beside)
        beside.callback_handler = None  # it holds the model, the data and the optimizer once more
        trained.__dict__[CARRIED_TRAINER] = beside
        return trained

    def _trainer(self, model: nn.Module, another: Callable[[], nn.Module], adapter: Any) -> Any:
        from datasets import Dataset

        kind: Any = _quiet(self.kind, self.classes.trainer)
        given: dict[str, Any] = {"reward_funcs": [_no_reward]} if self.kind in GENERATING else {}
        if adapter is not None:
            given["peft_config"] = adapter
        try:
            with undisturbed(), _nothing_loaded(self.classes.trainer, another), tempfile.TemporaryDirectory(prefix="hfopt-") as folder:
                args = self.classes.config(output_dir=folder, **self._arguments())
                data = Dataset.from_list(rows(self.kind, self.size))
                return kind(model=model, args=args, train_dataset=data, processing_class=tokenizer(), **given)
        except _REFUSALS as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise WorkloadError(
                f"TRL's {self.classes.trainer.__name__} does not take these arguments: {why}", hint="change what it names in the config"
            ) from error

    def _arguments(self) -> dict[str, Any]:
        fields = self.classes.own_fields
        chosen = {key: value for key, value in self.arguments.items() if key in fields and key not in _NOT_OF_THE_STEP}
        chosen |= {key: self.arguments[key] for key in _ALSO if key in self.arguments}
        chosen = {key: value for key, value in chosen.items() if not key.startswith("vllm_")}
        if "max_length" in fields:
            chosen["max_length"] = None if self._one_row_unpacked else self.size.length
        group = int(self.arguments.get("num_generations") or self.classes.default("num_generations") or 1)
        plain = {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "gradient_checkpointing": False}
        plain["remove_unused_columns"] = False  # as the trainers that collate raw columns ask for
        batch = max(group, 2)  # KTO takes no single sample
        plain |= {"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch}
        return self._as_lists(chosen) | as_spelled(plain, {field.name for field in dataclasses.fields(self.classes.config)})

    def _as_lists(self, chosen: dict[str, Any]) -> dict[str, Any]:
        """TRL's parser makes a list of a single word where the argument is one (DPO's loss_type)."""
        lists = {field.name for field in dataclasses.fields(self.classes.config) if str(field.type).startswith("list")}
        return {key: [value] if key in lists and not isinstance(value, list) else value for key, value in chosen.items()}

    @property
    def _one_row_unpacked(self) -> bool:
        """TRL refuses padding_free with a length but without packing: nothing would enforce it. The samples are cut already."""
        return self.arguments.get("padding_free") is True and self.arguments.get("packing") is not True


class _OneDevice(Alone):
    """What a loss asks of the accelerator, answered for one device: where the model is. accelerate's own state is the caller's again."""

    parallelism_config, distributed_type, sync_gradients, native_amp = None, "NO", True, False

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer.accelerator)
        self._trainer = trainer

    @property
    def device(self) -> torch.device:
        return next(self._trainer.model.parameters()).device

    def unwrap_model(self, model: Any, *_: Any, **__: Any) -> Any:
        return model

    def autocast(self, *_: Any, **__: Any) -> Any:
        return nullcontext()


def carried_trainer(model: Any) -> Any:
    """The trainer that was made around the model, None where there is none."""
    return vars(getattr(model, "module", model)).get(CARRIED_TRAINER)


def trl_loss(model: Any, batch: dict[str, Any]) -> Any:
    """`compute_loss` of the trainer around the model."""
    whole = getattr(model, "module", model)
    return loss_of(carried_trainer(whole), whole, batch)


def _no_reward(**_: Any) -> list[float]:
    raise AssertionError("nothing is generated here, so nothing is judged")


def _quiet(kind: str, trainer: Any) -> Any:
    """The trainer class without what reaches out of the process or runs the model."""

    def asked_before(self: Any, dataset: Any, *_: Any, **__: Any) -> Any:
        for column in _REFERENCE_COLUMNS.get(kind, ()):
            dataset = dataset.add_column(column, [0.0] * len(dataset))
        return dataset

    def nothing(self: Any, *_: Any, **__: Any) -> None:
        return None

    return type(trainer.__name__, (trainer,), {"_precompute_ref_logps": asked_before, "_send_telemetry": nothing})


@contextmanager
def _nothing_loaded(trainer: Any, another: Callable[[], nn.Module]) -> Iterator[None]:
    """Models stay where they are, a reference is built and not loaded, progress bars are not shown."""
    import datasets

    module = sys.modules[trainer.__module__]
    stand_ins: dict[str, Any] = {
        "create_model_from_path": lambda *_, **__: another(),
        "hash_module": lambda _: "",
    }
    bars_were_on = datasets.are_progress_bars_disabled() is False
    datasets.disable_progress_bars()
    try:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(nn.Module, "to", _stay))
            for name, stand_in in stand_ins.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, stand_in))
            yield
    finally:
        if bars_were_on:
            datasets.enable_progress_bars()


def _stay(self: nn.Module, *_: Any, **__: Any) -> nn.Module:
    return self
