"""Temporaries of convolutions; the figures are those of PyTorch's own allocator (ConvNeXt on the virtual GPU, 28 multiprocessors)."""

from __future__ import annotations

from typing import Any

import torch

from hfopt.trace.cuda_allocations import RULES
from hfopt.trace.kernel_sizes import Formula, Kernels

KERNELS = Kernels(capability=(8, 6), multiprocessors=28)
backward = RULES[torch.ops.aten.convolution_backward.default]
forward = RULES[torch.ops.aten.convolution.default]


def _last(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta").to(memory_format=torch.channels_last)


def _backward(incoming: torch.Tensor, source: torch.Tensor, weight: torch.Tensor, groups: int) -> list[Any]:
    outputs = (torch.empty_like(source), torch.empty_like(weight), torch.empty(weight.shape[0], device="meta"))
    args = (incoming, source, weight, [weight.shape[0]], [1, 1], [0, 0], [1, 1], False, [0, 0], groups, [True] * 3)
    return [_name(step, outputs) for step in backward(KERNELS, args, {}, outputs)]


def _name(step: Any, outputs: tuple[torch.Tensor, ...]) -> Any:
    if isinstance(step, torch.Tensor):
        return ("input", "weight", "bias")[next(at for at, output in enumerate(outputs) if output is step)]
    return step.bytes() if isinstance(step, Formula) else step


def test_the_gradient_of_a_bias_is_summed_through_global_memory() -> None:
    weight = torch.empty(192, 1, 7, 7, device="meta")
    assert _backward(_last(5, 192, 28, 28), _last(5, 192, 28, 28), weight, 192) == ["input", "weight", "bias", 6_094_848]


def test_gradient_and_weight_are_copied_into_the_layout_of_the_input_and_given_back() -> None:
    incoming, weight = torch.empty(5, 768, 7, 7, device="meta"), torch.empty(768, 384, 2, 2, device="meta")
    steps = _backward(incoming, _last(5, 384, 14, 14), weight, 1)
    assert steps == [4 * incoming.numel(), "input", 4 * weight.numel(), 1, "weight", 0, "bias"]


def test_nothing_is_copied_where_all_have_one_layout() -> None:
    incoming, weight = torch.empty(2, 8, 4, 4, device="meta"), torch.empty(8, 4, 2, 2, device="meta")
    assert _backward(incoming, torch.empty(2, 4, 5, 5, device="meta"), weight, 1) == ["input", "weight", "bias"]


def test_the_output_comes_before_the_copy_of_the_weight() -> None:
    source, weight, out = _last(2, 8, 8, 8), torch.empty(16, 8, 2, 2, device="meta"), torch.empty(2, 16, 7, 7, device="meta")
    first, copy = forward(KERNELS, (source, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), {}, out)
    assert first is out and isinstance(copy, Formula) and copy.bytes() == 4 * weight.numel()
