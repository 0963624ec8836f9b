"""4- and 8-bit weights by their true bytes: bitsandbytes' layouts and lifetimes, without bitsandbytes or a GPU.

Each linear layer but the output head is replaced by one that holds what bitsandbytes holds and makes the temporaries it makes:
  4-bit: two weights in a byte; one float32 scale per 64 weights, or with double quantization one byte per 64 and one float32 per 256 of
         those; forward and backward each unpack the whole weight into the dtype it had, and cast that to the compute dtype.
  8-bit: one byte a weight and a float32 scale per row; forward quantizes its input, as float16, to int8 row by row and keeps the input
         for backward; backward unpacks the whole weight.
The 4-bit bytes are those bitsandbytes 0.50.2 makes on the CPU (QuantState); what a step takes besides is read in its MatMul4Bit and
MatMul8bitLt, not measured. The unpacked values are a constant: shapes,
types and lifetimes are right, losses mean nothing. The outlier columns of 8-bit (few, and known only at run time) are left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hfopt.schema import Quantization

_BLOCK = 64  # weights per scale
_NESTED_BLOCK = 256  # scales per scale of scales
_STAND_IN = 0.01


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
        shape = (self.out_features, self.in_features)
        output: torch.Tensor = _MatMul4bit.apply(input.to(self.compute_dtype), self.weight, bias, shape, self.stored_dtype)
        return output.to(input.dtype)


class _MatMul4bit(torch.autograd.Function):  # type: ignore[misc]
    """Keeps the packed weight only: backward unpacks it again."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, shape: tuple[int, int], stored: torch.dtype
    ) -> Any:
        ctx.shape, ctx.stored, ctx.device = shape, stored, packed.device
        return nn.functional.linear(x, torch.full(shape, _STAND_IN, dtype=stored, device=packed.device).to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        weight = torch.full(ctx.shape, _STAND_IN, dtype=ctx.stored, device=ctx.device).to(grad.dtype)
        return torch.matmul(grad, weight), None, None, None, None


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
        output: torch.Tensor = _MatMul8bit.apply(input, self.weight, self.bias)
        return output


class _MatMul8bit(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        ctx.save_for_backward(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        half = rows.to(torch.float16)
        quantized = torch.zeros_like(half, dtype=torch.int8)
        scales = torch.zeros(rows.shape[0], device=x.device)
        del half
        products = torch.zeros(rows.shape[0], weight.shape[0], dtype=torch.int32, device=x.device)
        output = products.to(x.dtype)
        del quantized, scales, products
        if bias is not None:
            output += bias.to(output.dtype)
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return torch.matmul(grad.to(x.dtype), weight.to(x.dtype)), None, None


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
