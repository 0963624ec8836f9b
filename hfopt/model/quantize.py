"""4- and 8-bit weights by their true bytes: bitsandbytes' layouts and lifetimes, without bitsandbytes or a GPU.

Each linear layer but the output head is replaced by one that holds what bitsandbytes 0.50.2 holds and makes the temporaries it makes:
  4-bit: two weights in a byte; one float32 scale per 64 weights, or with double quantization one byte per 64 and one float32 per 256 of
         those; forward unpacks the whole weight into the input's dtype, backward into the dtype it had, and casts that.
  8-bit: one byte a weight and a float32 scale per row; forward quantizes its input, as float16, to int8 row by row and keeps the input
         for backward outside of what autograd saves, so that checkpointing without reentry does not drop it; backward unpacks the weight.
peft has adapters of its own for such layers, which cast their inputs otherwise: `adapters` makes theirs (peft/tuners/lora/bnb.py).

A step of it is compared with bitsandbytes' own library on the virtual GPU (tests/memory/test_adapters_against_allocator.py). The unpacked
values are a constant: shapes, types and lifetimes are right, losses mean nothing. Known limits: the outlier columns of 8-bit (few, and
known only at run time) are left out; up to 1536 tokens a forward may run a kernel that unpacks nothing, so small batches take less.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hfopt.schema import Quantization

_BLOCK = 64  # weights per scale
_NESTED_BLOCK = 256  # scales per scale of scales
_STAND_IN = 0.01
_THRESHOLD = 6.0  # from which on a value is an outlier (BitsAndBytesConfig.llm_int8_threshold)


class Linear4bit(nn.Linear):  # type: ignore[misc]
    """A linear layer of packed 4-bit weights."""

    def __init__(self, original: nn.Linear, how: Quantization) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = original.in_features, original.out_features
        self.stored_dtype = original.weight.dtype
        self.compute_dtype = getattr(torch, how.compute_dtype or "float32")
        weights, device = original.weight.numel(), original.weight.device
        self.weight = nn.Parameter(torch.zeros((weights + 1) // 2, 1, dtype=torch.uint8, device=device), requires_grad=False)
        self.bias = original.bias
        blocks = -(-weights // _BLOCK)
        self.register_buffer("code", torch.zeros(16, device=device), persistent=False)
        if how.double_quant:
            self.register_buffer("absmax", torch.zeros(blocks, dtype=torch.uint8, device=device), persistent=False)
            self.register_buffer("nested_absmax", torch.zeros(-(-blocks // _NESTED_BLOCK), device=device), persistent=False)
            self.register_buffer("nested_code", torch.zeros(256, device=device), persistent=False)
            self.register_buffer("offset", torch.zeros((), device=device), persistent=False)
        else:
            self.register_buffer("absmax", torch.zeros(blocks, device=device), persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        output: torch.Tensor = _MatMul4bit.apply(input.to(self.compute_dtype), self.weight, bias, self)
        return output.to(input.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The whole weight, in the dtype it had; with double quantization its scales are unpacked first."""
        device = self.weight.device
        scales = self.absmax.to(torch.float32) + self.offset if self.absmax.dtype == torch.uint8 else self.absmax
        weight = torch.full((self.out_features, self.in_features), _STAND_IN, dtype=dtype or self.stored_dtype, device=device)
        del scales
        return weight

    @property
    def W_q(self) -> torch.Tensor:  # noqa: N802
        """By this name peft knows a layer that unpacks its weight itself (peft/utils/integrations.py)."""
        return self.weight


class _MatMul4bit(torch.autograd.Function):  # type: ignore[misc]
    """Keeps the packed weight only: backward unpacks it again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, layer: Linear4bit) -> Any:
        ctx.layer = layer
        return nn.functional.linear(x, layer.dequantize(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return torch.matmul(grad, ctx.layer.dequantize().to(grad.dtype)), None, None, None


class Linear8bit(nn.Linear):  # type: ignore[misc]
    """A linear layer of 8-bit weights with a scale per row."""

    def __init__(self, original: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = original.in_features, original.out_features
        device = original.weight.device
        self.weight = nn.Parameter(torch.zeros(original.weight.shape, dtype=torch.int8, device=device), requires_grad=False)
        self.bias = original.bias
        self.register_buffer("scale", torch.zeros(self.out_features, device=device), persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _MatMul8bit.apply(input, self.weight, self.bias, self.scale)
        return output

    def dequantize(self) -> torch.Tensor:
        """The whole weight in float32 (int8_vectorwise_dequant)."""
        return self.weight * self.scale.view(-1, 1) * (1 / 127)

    @property
    def W_q(self) -> torch.Tensor:  # noqa: N802
        """As above."""
        return self.weight


class _MatMul8bit(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor) -> Any:
        ctx.kept = x, weight, scale  # as in bitsandbytes, not by save_for_backward
        rows = x.reshape(-1, x.shape[-1])
        half = rows.to(torch.float16)
        scales = torch.zeros(rows.shape[0], device=x.device)
        quantized = torch.zeros_like(half, dtype=torch.int8)
        outliers = half.abs() >= _THRESHOLD
        del half, outliers
        products = torch.zeros(rows.shape[0], weight.shape[0], dtype=torch.int32, device=x.device)
        output = products.to(torch.float16)
        if bias is not None:
            output += bias.to(output.dtype)
        output = output.to(x.dtype)
        del quantized, scales, products
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, scale = ctx.kept
        rows = grad.reshape(-1, grad.shape[-1])
        unpacked = weight.to(x.dtype, copy=True).mul_(scale.unsqueeze(1).mul(1 / 127))
        return torch.matmul(rows.to(x.dtype), unpacked).view(x.shape), None, None, None


def adapters() -> dict[type[nn.Module], type[nn.Module]]:
    """The adapters that peft puts on bitsandbytes' layers, for the layers here: under autocast the input is not cast to the adapter's
    dtype, and what comes out not cast back; the output of 4-bit layers is copied first."""
    from peft.tuners.lora.layer import Linear

    class PackedLora(Linear):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            result: torch.Tensor
            if not hasattr(self, "lora_variant"):  # peft before 0.16: as on any linear layer
                result = super().forward(x, *args, **kwargs)
                return result
            result = self.base_layer(x, *args, **kwargs)
            if self.disable_adapters:
                return result
            result = result.clone() if isinstance(self.base_layer, Linear4bit) else result
            converts, expected = not torch.is_autocast_enabled(), result.dtype
            for name in self.active_adapters:
                x = self._cast_input_dtype(x, self.lora_A[name].weight.dtype) if converts else x
                if name in self.lora_variant:
                    result = self.lora_variant[name].forward(self, active_adapter=name, x=x, result=result)
                else:
                    added = self.lora_B[name](self.lora_A[name](self.lora_dropout[name](x))) * self.scaling[name]
                    result = result + (added.to(expected) if converts else added)
            return result.to(expected) if converts else result

    return {Linear4bit: PackedLora, Linear8bit: PackedLora}


def stand_in(layer: nn.Module) -> nn.Module | None:
    """For a live layer of bitsandbytes, by its own sizes and types; None for any other."""
    if not any(base.__module__.partition(".")[0] == "bitsandbytes" for base in type(layer).__mro__) or not isinstance(layer, nn.Linear):
        return None
    state = getattr(layer.weight, "quant_state", None)
    stored = state.dtype if state is not None else torch.float16
    plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta", dtype=stored)
    if layer.bias is not None:
        plain.bias = nn.Parameter(layer.bias.detach().to("meta"), requires_grad=layer.bias.requires_grad)
    if state is None:
        return Linear8bit(plain) if layer.weight.dtype == torch.int8 else None
    computed = str(getattr(layer, "compute_dtype", None) or stored).removeprefix("torch.")
    return Linear4bit(plain, Quantization(bits=4, double_quant=bool(getattr(state, "nested", False)), compute_dtype=computed))


def quantize(model: nn.Module, how: Quantization) -> nn.Module:
    """Packs every linear layer but the output head and the last module, as transformers does, and prepares the rest for training:
    what stays unpacked is frozen and goes to float32 (peft's prepare_model_for_kbit_training)."""
    kept = _left_alone(model)
    for name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            full_name = f"{name}.{child_name}" if name else child_name
            if type(child) is nn.Linear and full_name not in kept:
                setattr(module, child_name, Linear4bit(child, how) if how.bits == 4 else Linear8bit(child))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            wide = parameter.detach().float() if parameter.dtype in (torch.float16, torch.bfloat16) else parameter.detach()
            if wide.is_floating_point():
                _set_shared(model, module, name, parameter, wide)
    return model


def _set_shared(model: nn.Module, module: nn.Module, name: str, old: nn.Parameter, tensor: torch.Tensor) -> None:
    """Replaces a parameter wherever it is shared, frozen."""
    new = nn.Parameter(tensor, requires_grad=False)
    for other in model.modules():
        for other_name, parameter in other._parameters.items():
            if parameter is old:
                other._parameters[other_name] = new


def _left_alone(model: Any) -> set[str]:
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    last = list(model.named_parameters())[-1][0].rpartition(".")[0]
    return {name for name, module in model.named_modules() if module is output} | {last}
