"""A workload from what the config says: the model by its configuration alone, with head, adapters, dtype and frozen parts, and its batches.

Weights are never loaded: memory and time depend on shapes and types, not on values.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from hfopt.errors import WorkloadError
from hfopt.schema import DataSpec, ModelSpec, Task, Workload
from hfopt.workload.batch import BatchMaker, accepted_inputs
from hfopt.workload.build import build_here, skeleton
from hfopt.workload.heads import Head, choose_head
from hfopt.workload.losses import loss_for, why_batch_dependent
from hfopt.workload.shapes import size_batch
from hfopt.workload.sources import ConfigSource, find_config

_TRANSFORMERS = int(transformers.__version__.split(".")[0])
_DTYPE_OPTION = "dtype" if _TRANSFORMERS >= 5 else "torch_dtype"


def from_spec(model: ModelSpec, data: DataSpec, *, trainer: str = "Trainer") -> Workload:
    """The workload of a model given by folder, config.json, hub id or a name of the bundled table."""
    if not model.name:
        raise WorkloadError(
            "which model is trained is not stated",
            hint="give --model (a hub id, a folder or a config.json), or model_name_or_path in the YAML",
        )
    source = find_config(model.name)
    config = _config(source, model)
    head = choose_head(config.model_type, config.to_dict(), model.task, trainer)
    _set_labels(config, head.task, model.num_labels)
    recipe = Recipe(spec=model, source=source, config=config, head=head)
    built = recipe.skeleton()
    sized = size_batch(config, built.main_input, head.task, data, trainer)
    maker = BatchMaker(
        task=head.task, shape=sized.shape, config=config, main_input=built.main_input, accepts=accepted_inputs(built.model_class)
    )
    return Workload(
        name=source.name,
        model_class=built.model_class.__name__,
        task=head.task,
        build_model=recipe,
        make_batch=maker,
        shape=sized.shape,
        compute_loss=loss_for(head.task),
        parameters=built.parameters,
        trainable_parameters=built.trainable_parameters,
        layers=built.layers,
        tokens_per_sample=sized.tokens,
        checkpointable=built.checkpointable,
        batch_dependent_loss=why_batch_dependent(built.model, head.task, maker.accepts),
        notes=(*((head.note,) if head.note else ()), *sized.notes),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """What is read off a skeleton."""

    model: nn.Module
    model_class: type
    main_input: str
    parameters: int
    trainable_parameters: int
    layers: int | None
    checkpointable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How the model is built; calling it builds it where the caller stands."""

    spec: ModelSpec
    source: ConfigSource
    config: Any
    head: Head

    def __call__(self) -> nn.Module:
        return build_here(self.assemble)

    def assemble(self) -> nn.Module:
        return self._bare()

    def skeleton(self) -> Built:
        model = skeleton(self.assemble)
        return Built(
            model=model,
            model_class=type(model),
            main_input=getattr(model, "main_input_name", "input_ids"),
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            trainable_parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
            layers=repeated_blocks(model),
            checkpointable=bool(getattr(model, "supports_gradient_checkpointing", False)),
        )

    def _bare(self) -> nn.Module:
        options: dict[str, Any] = {_DTYPE_OPTION: _dtype(self.spec, self.config)}
        if self.spec.attn_implementation is not None:
            options["attn_implementation"] = self.spec.attn_implementation
        with _quietly():
            try:
                model_class = getattr(transformers, self.head.class_name)
                model: nn.Module = model_class._from_config(copy.deepcopy(self.config), **options)
            except (ValueError, TypeError, ImportError, AttributeError, KeyError, RuntimeError) as error:
                raise WorkloadError(f"{self.head.class_name} cannot be built from the config of {self.source.name}: {error}") from error
        if self.source.fields.get("tie_word_embeddings") is False and self.source.has_checkpoint:
            _untie(model)
        return model


def _untie(model: Any) -> None:
    """transformers 5 ties every T5 until it sees that the checkpoint holds two different matrices; then it leaves them apart."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if outputs is not None and outputs.weight is inputs.weight:
        outputs.weight = nn.Parameter(outputs.weight.detach().clone())


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the model's own remarks about its configuration, which the user cannot act on here."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


def repeated_blocks(model: nn.Module) -> int | None:
    """How many blocks checkpointing works on: transformers' checkpointing layers, or the longest list of equal modules."""
    try:
        from transformers.modeling_layers import GradientCheckpointingLayer
    except ImportError:
        blocks = 0
    else:
        blocks = sum(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
    if blocks:
        return blocks
    lists = [
        (name, len(module))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(child) for child in module}) == 1
    ]
    outer = [(name, count) for name, count in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    return max((count for _, count in outer), default=None)


def _config(source: ConfigSource, spec: ModelSpec) -> Any:
    """transformers' config object with the YAML's overrides."""
    fields = {**source.fields, **spec.overrides}
    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        raise WorkloadError(f"the config of {source.name} ({source.where}) has no model_type", hint='add for example "model_type": "bert"')
    if model_type not in transformers.CONFIG_MAPPING:
        raise _unknown_type(source, model_type)
    try:
        with _quietly():
            return transformers.CONFIG_MAPPING[model_type].from_dict(fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WorkloadError(f"the config of {source.name} ({source.where}) is not a valid {model_type} config: {error}") from error


def _unknown_type(source: ConfigSource, model_type: str) -> WorkloadError:
    return WorkloadError(
        f"model type {model_type!r} of {source.name} is not known to transformers {transformers.__version__}",
        hint="install a newer transformers, or check the spelling of model_type in its config.json",
    )


def _set_labels(config: Any, task: Task, num_labels: int | None) -> None:
    if num_labels is not None:
        if num_labels < 1:
            raise WorkloadError(f"num_labels is {num_labels}; it must be at least 1")
        config.num_labels = num_labels
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if task == "sequence_classification" and getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = 0  # decoders find the last token by it
        config.pad_token_id = 0


def _dtype(spec: ModelSpec, config: Any) -> torch.dtype:
    """As from_pretrained does: the stated dtype; unstated or 'auto' is the checkpoint's from transformers 5 on, float32 before."""
    stated = spec.weights_dtype
    if stated is None and _TRANSFORMERS < 5:
        return torch.float32
    if stated in (None, "auto"):
        stated = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or "float32"
    if isinstance(stated, torch.dtype):
        return stated
    dtype = getattr(torch, _SHORT_DTYPES.get(str(stated), str(stated)), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise WorkloadError(f"{stated!r} is not a dtype for weights", hint="use float32, bfloat16, float16 or auto")
    return dtype


_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
