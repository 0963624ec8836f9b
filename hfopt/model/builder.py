"""How a model is put together: configuration, head, packed weights, frozen parts, adapters, wherever the caller builds it.

Building a model wherever the caller stands: under a fake-tensor mode, on the meta device, or for real. Fake and meta models are built the
same way: every parameter goes to the meta device the moment a module registers it, so no weight is ever held, while buffers and plain
tensors stay real, so `.item()` in a constructor (drop-path rates) works. Adapters and quantization are put on that skeleton. Then
parameters become what the caller's context asks for. Nothing is swapped in place, so weak references to parameters (which peft and the fake
mode both hold) never get in the way. A real build runs the model's own initialisation.

Which parameters train: LoRA and DoRA adapters through peft, and frozen modules.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import huggingface_hub.errors
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from hfopt.compat.torch_patches import parameters_on_meta
from hfopt.compat.transformers_patches import quietly, sdpa_stands_in
from hfopt.compat.versions import is_at_least
from hfopt.errors import WorkloadError
from hfopt.model.losses import REFERENCE
from hfopt.model.quantize import adapters, quantize
from hfopt.model.sources import ConfigSource, Head, config_for
from hfopt.model.trl_trainer import TrlSetup
from hfopt.model.vision_language import freeze_parts, modules_of_parts
from hfopt.schema import Assumption, Lora, ModelPart, ModelSpec, Task


def build_here(assemble: Callable[[], nn.Module], real: Callable[[], nn.Module] | None = None) -> nn.Module:
    """The module that `assemble()` makes, in the form of the calling context, in training mode; `real` makes it where tensors are real."""
    fake_mode = _active_fake_mode()
    if fake_mode is not None:
        model = skeleton(assemble)
        _replace_tensors(model, lambda tensor: _fake(tensor, fake_mode))
        return model
    if torch.empty(0).device.type == "meta":  # torch 2.6's get_default_device does not see a `with torch.device`
        model = skeleton(assemble)
        _replace_tensors(model, lambda tensor: tensor.to("meta"))
        return model
    return (real or assemble)().train()


@contextmanager
def unfaked() -> Iterator[None]:
    """Tensors made in here are real CPU tensors whatever the caller's context."""
    with _disable_current_modes(), torch.device("cpu"):
        yield


def skeleton(assemble: Callable[[], nn.Module]) -> nn.Module:
    """The module with its parameters on the meta device and its buffers real."""
    with unfaked(), parameters_on_meta(), _LargeOnMeta():
        return assemble().train()


def _active_fake_mode() -> FakeTensorMode | None:
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, FakeTensorMode)), None)


_LARGE = 2**27  # elements; no model keeps a buffer of that size
_DRAWS = frozenset(("normal_", "uniform_", "kaiming_uniform_"))  # of tensors and of torch.nn.init, whose functions transformers replaces


class _LargeOnMeta(TorchFunctionMode):  # type: ignore[misc]
    """What is large enough to be a weight alone is never held, nor filled with zeros: experts are gigabytes a layer. Nor are weights drawn
    that hold nothing: on the meta device it is a decomposition in Python, half of the time that building takes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if getattr(func, "__name__", None) in _DRAWS and (drawn := args[0] if args else options["tensor"]).device.type == "meta":
            return drawn
        if func is torch.empty or func is torch.zeros:
            on_meta = func(*args, **{**options, "device": "meta"})
            if on_meta.numel() >= _LARGE:
                return on_meta
        return func(*args, **options)


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    if tensor.device.type == "meta":
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return mode.from_tensor(tensor)


def _replace_tensors(model: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Each parameter and buffer once, so that what was tied stays tied."""
    converted: dict[int, Any] = {}
    for module in model.modules():
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is None:
                    continue
                if id(tensor) not in converted:
                    converted[id(tensor)] = _converted(tensor, convert), tensor
                registry[name] = converted[id(tensor)][0]
        if isinstance(module, nn.RNNBase):  # it keeps a list of its own
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def _converted(tensor: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    if not isinstance(tensor, nn.Parameter):
        return convert(tensor)
    new = nn.Parameter(convert(tensor.detach()), requires_grad=tensor.requires_grad)
    new.__dict__.update(tensor.__dict__)
    return new


_PEFT_TASKS: dict[Task, str] = {
    "causal_lm": "CAUSAL_LM",
    "seq2seq_lm": "SEQ_2_SEQ_LM",
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
    "question_answering": "QUESTION_ANS",
}
"""With these peft trains the new head too; other tasks need modules_to_save."""


def lora_config(lora: Lora, task: Task, without: str | None = None) -> Any:
    """The config as peft has it; `without`: modules that get no adapter, as a pattern of their names."""
    try:
        from peft import LoraConfig
    except ImportError:
        raise WorkloadError("the config asks for LoRA, but peft is not installed", hint="pip install 'hfopt[peft]'") from None
    if lora.r < 1:
        raise WorkloadError(f"LoRA's rank is {lora.r}; it must be at least 1", hint="set r (lora_r) to for example 8")
    targets = lora.target_modules
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(targets) if isinstance(targets, tuple) else targets,
        modules_to_save=list(lora.modules_to_save) or None,
        use_dora=lora.use_dora,
        use_rslora=lora.use_rslora,
        task_type=_PEFT_TASKS.get(task),
        exclude_modules=without,
    )
    config._register_custom_module(adapters())
    return config


def add_lora(model: nn.Module, lora: Lora, task: Task, without: Sequence[ModelPart] = ()) -> nn.Module:
    """The model with adapters, everything else frozen. Half-precision adapters go to float32, as get_peft_model does."""
    config = lora_config(lora, task, modules_of_parts(model, without))
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's remarks, such as on tied target layers
        try:
            adapted: nn.Module = get_peft_model(model, config)
        except (ValueError, KeyError, TypeError) as error:
            hint = "lora_dropout: 0" if "lora_dropout" in str(error) else "name its linear layers in target_modules, or use all-linear"
            raise WorkloadError(f"LoRA cannot be put on {type(model).__name__}: {error}", hint=hint) from error
    return adapted


def freeze(model: nn.Module, prefixes: tuple[str, ...]) -> None:
    """Stops the modules with these names from training; the model's own prefix may be left out (`embeddings` for `bert.embeddings`)."""
    own = getattr(model, "base_model_prefix", "")
    for prefix in prefixes:
        starts = tuple(f"{start}{prefix.rstrip('.')}." for start in ("", f"{own}."))
        found = [parameter for name, parameter in model.named_parameters() if f"{name}.".startswith(starts)]
        if not found:
            able = ", ".join(dict.fromkeys(".".join(name.split(".")[:2]) for name, _ in model.named_parameters()))
            raise WorkloadError(f"there is no module {prefix!r} to freeze in {type(model).__name__}", hint=f"it has: {able}")
        for parameter in found:
            parameter.requires_grad = False


def train_layers_alone(model: nn.Module, last: int, *, widened: bool = False) -> None:
    """The last layers train and nothing else (below zero: the first ones), as LLaMA-Factory's `freeze` does; widened: in float32."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len({type(block) for block in module}) == 1]
    blocks = max(lists, key=len, default=None)
    if blocks is None:
        raise WorkloadError(f"{type(model).__name__} has no repeated layers, of which some could be frozen")
    model.requires_grad_(False)
    for block in list(blocks)[-last:] if last > 0 else list(blocks)[:-last]:
        block.requires_grad_(True)
        if widened:
            block.to(torch.float32)


DTYPE_OPTION = "dtype" if is_at_least("transformers", "5") else "torch_dtype"
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
NO_WINDOW = 1 << 30
"""A flash package cuts a sliding window inside its kernel, where sdpa needs a mask for it: its stand-in gets a window that cuts nothing.
Known limit: what the window saves of the arithmetic is not counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Calling it builds the model, in training mode, in the form of the calling context (see build.py)."""

    spec: ModelSpec
    source: ConfigSource
    config: Any
    head: Head
    reference: bool = False  # a frozen copy beside the model (DPO, KTO); with an adapter the model is its own reference
    trl: TrlSetup | None = None  # TRL's trainer, which puts adapter and reference on itself

    def __call__(self) -> nn.Module:
        return build_here(self.assemble)

    def facts(self) -> ModelFacts:
        """Of the model that trains, without a reference beside it."""
        model = skeleton(replace(self, reference=False, trl=None).assemble)
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

    def assemble(self) -> nn.Module:
        model = self._bare()
        if self.spec.quantization is not None:
            model = quantize(model, self.spec.quantization)
        freeze(model, self.spec.frozen)
        if self.spec.last_layers is not None:
            train_layers_alone(model, self.spec.last_layers, widened=self.spec.widens_trained)
        if self.spec.frozen_parts:
            freeze_parts(model, self.spec.frozen_parts)
        if self.trl is not None:
            adapter = None
            if self.spec.lora is not None:
                adapter = lora_config(self.spec.lora, self.head.task, modules_of_parts(model, self.spec.frozen_parts))
            return self.trl.around(model, another=self._bare, adapter=adapter)
        if self.spec.lora is not None:
            return add_lora(model, self.spec.lora, self.head.task, self.spec.frozen_parts)
        if self.reference:
            model.add_module(REFERENCE, self._bare().requires_grad_(False))
        return model

    def _bare(self) -> nn.Module:
        options: dict[str, Any] = {DTYPE_OPTION: weights_dtype(self.spec, self.config)}
        config = copy.deepcopy(self.config)
        if self.spec.attn_implementation is not None:
            options["attn_implementation"] = "sdpa" if uses_flash(self.spec) else self.spec.attn_implementation
        if uses_flash(self.spec) and isinstance(getattr(config, "sliding_window", None), int):
            config.sliding_window = NO_WINDOW
        with quietly():
            try:
                model_class = self.head.model_class or getattr(transformers, self.head.class_name)
                config = config_for(model_class, config)
                with sdpa_stands_in(model_class) if uses_flash(self.spec) else nullcontext():
                    model: nn.Module = model_class._from_config(config, **options)
            except FAILURES as error:
                raise WorkloadError(f"{self.head.class_name} cannot be built from the config of {self.source.name}: {error}") from error
        if self.source.fields.get("tie_word_embeddings") is False and self.source.has_checkpoint:
            _untie(model)
        _widen(model, self.spec.float32_modules)
        return model


def uses_flash(spec: ModelSpec) -> bool:
    """flash_attention_2, _3, a kernel of the Hub or FlexAttention: code that only runs on a card. PyTorch's own flash kernel takes the same
    memory, and sdpa takes it when no sample is padded, which is how all of them see a batch (padding is cut out, or whole blocks of it)."""
    return is_flash(spec.attn_implementation)


def is_flash(name: str | None) -> bool:
    return name is not None and (name.startswith("flash_attention") or name == "flex_attention" or "/" in name)


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


def dtype_name(dtype: Any) -> str:
    """'bfloat16' of torch.bfloat16 and of its name."""
    return str(dtype).removeprefix("torch.")


def checkpoint_dtype(config: Any) -> str | None:
    """What the configuration says the checkpoint is stored in."""
    stated = getattr(config, DTYPE_OPTION, None)
    return None if stated is None else dtype_name(stated)


def weights_dtype(spec: ModelSpec, config: Any) -> torch.dtype:
    name = spec.stored_in(getattr(config, DTYPE_OPTION, None))
    dtype = getattr(torch, _SHORT_DTYPES.get(name, name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise WorkloadError(f"{name!r} is not a dtype for weights", hint="use float32, bfloat16, float16 or auto")
    return dtype


def assumed_build(recipe: Recipe, model: nn.Module) -> tuple[Assumption, ...]:
    """What the weights are stored in, how attention is computed, and what trains; unstated, they are from_pretrained's own choices."""
    spec = recipe.spec
    stored = dtype_name(weights_dtype(spec, recipe.config))
    packed = "" if spec.quantization is None else f"{spec.quantization.bits}-bit, the rest "
    if spec.widened(getattr(recipe.config, DTYPE_OPTION, None)):
        stored += ", not the checkpoint's float16, which fp16: true cannot train"
    attention = spec.attn_implementation or getattr(getattr(model, "config", None), "_attn_implementation", None)
    lora = spec.lora
    adapter = "none" if lora is None else f"{'DoRA' if lora.use_dora else 'LoRA'} r={lora.r}"
    if spec.guessed_adapter and lora is not None and lora.target_modules == "all-linear":
        adapter += " on all linear layers"
    if spec.stands_for is not None:
        adapter = f"{spec.stands_for} (planned as {adapter})"
    layers = spec.last_layers
    alone = (
        () if layers is None else (Assumption(what="trained", value=f"the {'last' if layers > 0 else 'first'} {abs(layers)} layers alone"),)
    )
    return (
        Assumption(what="weights", value=f"{packed}{stored}", guessed=spec.weights_dtype is None or spec.loads_itself, settle="dtype"),
        Assumption(what="attention", value=attention, guessed=spec.attn_implementation is None, settle="attn_implementation"),
        Assumption(what="adapter", value=adapter, guessed=spec.guessed_adapter, settle="lora_r, lora_target_modules"),
        *alone,
    )


def _untie(model: Any) -> None:
    """transformers 5 ties every T5 until it sees that the checkpoint holds two different matrices; then it leaves them apart."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if outputs is not None and outputs.weight is inputs.weight:
        outputs.weight = nn.Parameter(outputs.weight.detach().clone())


def _widen(model: nn.Module, names: tuple[str, ...]) -> None:
    """Modules with one of these words in their name to float32; one of several that share a weight takes the others along."""
    for name, module in model.named_modules() if names else ():
        if any(word in name.rsplit(".", 1)[-1] for word in names):
            module.to(torch.float32)


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
