"""How a model is put together: configuration → class with its head → packed weights → frozen parts → adapters."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import huggingface_hub.errors
import torch
import transformers
from torch import nn

from hfopt.compat import quietly
from hfopt.errors import WorkloadError
from hfopt.model.adapters import add_lora, freeze
from hfopt.model.build import build_here, skeleton
from hfopt.model.heads import Head
from hfopt.model.preference import REFERENCE
from hfopt.model.quantize import quantize
from hfopt.model.sources import ConfigSource
from hfopt.schema import ModelSpec, Workload

_TRANSFORMERS = int(transformers.__version__.split(".")[0])
DTYPE_OPTION = "dtype" if _TRANSFORMERS >= 5 else "torch_dtype"
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_STRICT = getattr(huggingface_hub.errors, "StrictDataclassError", ValueError)  # what configs of transformers 5 are checked with
FAILURES = (
    ValueError,
    TypeError,
    ImportError,
    AttributeError,
    KeyError,
    IndexError,
    RuntimeError,
    ZeroDivisionError,
    AssertionError,
    _STRICT,
)
"""What a config or a model's constructor may raise on values that do not fit together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Calling it builds the model, in training mode, in the form of the calling context (see build.py)."""

    spec: ModelSpec
    source: ConfigSource
    config: Any
    head: Head
    reference: bool = False  # a frozen copy beside the model (DPO, KTO); with an adapter the model is its own reference

    def __call__(self) -> nn.Module:
        return build_here(self._assemble)

    def facts(self) -> ModelFacts:
        """Of the model that trains, without a reference beside it."""
        model = skeleton(replace(self, reference=False)._assemble)
        bare = model if self.spec.quantization is None and self.spec.lora is None else skeleton(self._bare)
        return ModelFacts(
            model=model,
            model_class=type(bare),
            main_input=getattr(bare, "main_input_name", "input_ids"),
            parameters=sum(parameter.numel() for parameter in model.parameters()) + _packed_away(bare, model),
            trainable_parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
            layers=repeated_blocks(bare),
            checkpointable=bool(getattr(bare, "supports_gradient_checkpointing", False)),
        )

    def _assemble(self) -> nn.Module:
        if self.spec.quantization is not None and self.spec.lora is not None and self.spec.lora.use_dora:
            raise WorkloadError("DoRA on packed weights is not modelled", hint="use LoRA on packed weights, or DoRA on unpacked ones")
        model = self._bare()
        if self.spec.quantization is not None:
            model = quantize(model, self.spec.quantization)
        freeze(model, self.spec.frozen)
        if self.spec.lora is not None:
            return add_lora(model, self.spec.lora, self.head.task)
        if self.reference:
            model.add_module(REFERENCE, self._bare().requires_grad_(False))
        return model

    def _bare(self) -> nn.Module:
        options: dict[str, Any] = {DTYPE_OPTION: weights_dtype(self.spec, self.config)}
        if self.spec.attn_implementation is not None:
            options["attn_implementation"] = "sdpa" if uses_flash(self.spec) else self.spec.attn_implementation
        with quietly():
            try:
                model_class = self.head.model_class or getattr(transformers, self.head.class_name)
                model: nn.Module = model_class._from_config(copy.deepcopy(self.config), **options)
            except FAILURES as error:
                raise WorkloadError(f"{self.head.class_name} cannot be built from the config of {self.source.name}: {error}") from error
        if self.source.fields.get("tie_word_embeddings") is False and self.source.has_checkpoint:
            _untie(model)
        return model


def uses_flash(spec: ModelSpec) -> bool:
    """flash_attention_2, _3 or a kernel of the Hub: CUDA code that only runs there. PyTorch's own flash kernel takes the same memory, and
    sdpa takes it when no sample is padded, which is how the flash packages see every batch (they cut the padding out)."""
    name = spec.attn_implementation or ""
    return name.startswith("flash_attention") or "/" in name


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What is read off a model that has no weights."""

    model: nn.Module
    model_class: type
    main_input: str
    parameters: int
    trainable_parameters: int
    layers: int | None
    checkpointable: bool


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
    lists = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1]
    return max((len(blocks) for blocks in lists if len({type(block) for block in blocks}) == 1), default=None)


def stored_in(workload: Workload) -> str | None:
    """What the weights are stored in while training; None where nobody knows."""
    recipe = workload.build_model
    return str(weights_dtype(recipe.spec, recipe.config)).removeprefix("torch.") if isinstance(recipe, Recipe) else workload.weights_dtype


def weights_dtype(spec: ModelSpec, config: Any) -> torch.dtype:
    """As from_pretrained does: the stated dtype; unstated or 'auto' is the checkpoint's from transformers 5 on, float32 before."""
    stated = spec.weights_dtype
    if stated is None and _TRANSFORMERS < 5:
        return torch.float32
    if stated in (None, "auto"):
        stated = getattr(config, DTYPE_OPTION, None) or "float32"
    if isinstance(stated, torch.dtype):
        return stated
    name = str(stated).removeprefix("torch.")
    dtype = getattr(torch, _SHORT_DTYPES.get(name, name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise WorkloadError(f"{stated!r} is not a dtype for weights", hint="use float32, bfloat16, float16 or auto")
    return dtype


def _untie(model: Any) -> None:
    """transformers 5 ties every T5 until it sees that the checkpoint holds two different matrices; then it leaves them apart."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if outputs is not None and outputs.weight is inputs.weight:
        outputs.weight = nn.Parameter(outputs.weight.detach().clone())


def _packed_away(bare: nn.Module, model: nn.Module) -> int:
    """Weights that packing two to a byte hides from a count of elements."""
    if not any(parameter.dtype == torch.uint8 for parameter in model.parameters()):
        return 0
    plain = dict(bare.named_parameters())
    return sum(
        plain[name].numel() - parameter.numel()
        for name, parameter in ((_plain_name(name), parameter) for name, parameter in model.named_parameters())
        if parameter.dtype == torch.uint8
    )


def _plain_name(name: str) -> str:
    """A parameter's name without what peft puts around it."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")
