"""The gradients of one optimizer step by the real Trainer, whole and in micro-batches, compared.

The Trainer sets seeds, environment variables and accelerate's global state; all of it is put back, because the caller may be in the
middle of a training script of their own.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import transformers

from hfopt.compat.transformers_patches import undisturbed
from hfopt.model.batch import with_decoder_inputs
from hfopt.model.losses import Pairs, loss_of
from hfopt.model.samples import Collated
from hfopt.model.trl_trainer import carried_trainer
from hfopt.schema import Workload

_SEED = 1
_OF_THE_BATCH = frozenset({"num_items_in_batch"})


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientRatio:
    norm_ratio: float  # in micro-batches over whole
    difference: float  # norm of the difference over the norm of the whole


def gradient_ratio(
    workload: Workload, *, samples: int, split: int, arguments: Mapping[str, Any], divide: bool = False
) -> GradientRatio | None:
    """`samples` × 1 against (samples / split) × split. divide: with model_accepts_loss_kwargs = False. None: no gradient to compare."""
    with undisturbed():
        torch.manual_seed(_SEED)
        model = workload.build_model()
        data = _data(workload, model, samples, smoothed=bool(arguments.get("label_smoothing_factor")))
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        found = []
        for accumulation in (1, split):
            model.load_state_dict(weights)
            found.append(_gradient(workload, model, data, samples // accumulation, accumulation, arguments, divide))
    whole, pieces = found
    norm = whole.norm().item()
    if not norm or not numpy.isfinite(norm):
        return None
    return GradientRatio(norm_ratio=pieces.norm().item() / norm, difference=(pieces - whole).norm().item() / norm)


def _gradient(
    workload: Workload,
    model: Any,
    data: _Data,
    micro: int,
    accumulation: int,
    arguments: Mapping[str, Any],
    divide: bool,
) -> torch.Tensor:
    kept: list[torch.Tensor] = []

    class Keep(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            kept.extend(parameter.grad.flatten().clone() for parameter in model.parameters() if parameter.grad is not None)

    with tempfile.TemporaryDirectory(prefix="hfopt-") as folder:
        args = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            optim="sgd",
            max_grad_norm=0,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            remove_unused_columns=False,
            **arguments,
        )
        kind = _trainer_class(workload, model, accumulation)
        trainer = kind(model=model, args=args, train_dataset=data.rows, data_collator=data.collate, callbacks=[Keep()])
        trainer.remove_callback(transformers.PrinterCallback)
        if (own := carried_trainer(model)) is not None:
            trainer.model_accepts_loss_kwargs = own.model_accepts_loss_kwargs
        if divide or isinstance(workload.make_batch, Pairs):  # a mean over pairs, which LLaMA-Factory's trainers have divided
            trainer.model_accepts_loss_kwargs = False
        trainer.train()
    return torch.cat(kept) if kept else torch.zeros(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Data:
    """Samples that differ from each other and are equally long, and what makes a batch of them."""

    rows: list[dict[str, Any]]
    collate: Any


def _data(workload: Workload, model: Any, samples: int, *, smoothed: bool) -> _Data:
    config = getattr(model, "config", None)
    made = workload.make_batch
    if isinstance(made, Collated):
        return _Data(rows=[_varied_sample(made.samples.longest, config, index) for index in range(samples)], collate=made.collate)
    batch = {name: _varied(name, tensor, config) for name, tensor in made(samples).items()}
    if isinstance(made, Pairs):
        return _Data(rows=[_pair(batch, index, samples) for index in range(samples)], collate=_side_by_side)
    if "old_logps" in batch:  # of a policy that knows nothing: others would make the ratio of the two vanish
        batch["old_logps"] = torch.full((samples,), -math.log(_vocabulary(config)) * batch["completion_ids"].shape[1])
    if smoothed:
        batch = with_decoder_inputs(batch, model)
    return _Data(rows=[{name: _row(value, index) for name, value in batch.items()} for index in range(samples)], collate=_stacked)


def _varied_sample(sample: Mapping[str, Any], config: Any, index: int) -> dict[str, Any]:
    """Other tokens, the same lengths; a judgement (KTO's label) changes from one to the next."""
    most = _vocabulary(config)

    def other(name: str, value: Any) -> Any:
        if isinstance(value, bool):
            return index % 2 == 0
        return torch.randint(2, most, (len(value),)).tolist() if name.endswith("ids") and isinstance(value, list) else value

    varied = {name: other(name, value) for name, value in sample.items()}
    return varied | ({"labels": list(varied["input_ids"])} if "labels" in varied and "input_ids" in varied else {})


def _trainer_class(workload: Workload, model: Any, accumulation: int) -> Any:
    """A Trainer with the workload's loss; the loss of a trainer of its own (TRL's) is told the items, and what it says of them counts."""
    own_loss, own = workload.compute_loss, carried_trainer(model)
    if own_loss is None:
        return transformers.Trainer
    if own is not None:
        own.current_gradient_accumulation_steps = accumulation
        if hasattr(own.args, "steps_per_generation"):  # left to TRL, what is generated at once is one accumulation window
            own.args.steps_per_generation = accumulation

        class ItsOwn(transformers.Trainer):  # type: ignore[misc]
            loss_is_scaled_for_ga = getattr(own, "loss_is_scaled_for_ga", None)

            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
                return loss_of(own, model, inputs, **options)

        return ItsOwn

    class OwnLoss(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            assert own_loss is not None
            loss = own_loss(model, inputs)
            return (loss, {"loss": loss}) if return_outputs else loss

    return OwnLoss


def _pair(batch: Mapping[str, Any], index: int, samples: int) -> dict[str, Any]:
    """One sample of a batch whose first half was chosen and whose second was rejected."""
    return {name: torch.stack((value[index], value[samples + index])) for name, value in batch.items() if isinstance(value, torch.Tensor)}


def _side_by_side(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """All that were chosen, then all that were rejected."""
    return {name: torch.cat([torch.stack([row[name][half] for row in rows]) for half in (0, 1)]) for name in rows[0]}


def _row(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, torch.Tensor) and value.dim() else value


def _stacked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A number of the whole batch (GRPO's items) stays what it is."""

    def together(name: str, value: Any) -> Any:
        whole = not isinstance(value, torch.Tensor) or name in _OF_THE_BATCH
        return value if whole else torch.stack([row[name] for row in rows])

    return {name: together(name, value) for name, value in rows[0].items()}


def _varied(name: str, tensor: Any, config: Any) -> Any:
    """Samples that differ from each other and are equally long."""
    if not isinstance(tensor, torch.Tensor):  # a flag such as return_loss
        return tensor
    if name in _OF_THE_BATCH:
        return tensor
    if "mask" in name:
        return torch.ones_like(tensor)
    if tensor.is_floating_point():
        return torch.rand_like(tensor) if "labels" in name else torch.randn_like(tensor)
    if "positions" in name or "token_type_ids" in name:
        return tensor
    classes = int(getattr(config, "num_labels", 2))
    is_classes = name == "labels" and not tensor.gt(0).any()
    return torch.randint(0, classes, tensor.shape) if is_classes else torch.randint(2, _vocabulary(config), tensor.shape)


def _vocabulary(config: Any) -> int:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return max(3, int(getattr(text, "vocab_size", None) or 16))
