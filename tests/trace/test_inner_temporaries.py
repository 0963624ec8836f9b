"""Temporaries of convolutions; the figures are those of PyTorch's own allocator (ConvNeXt on the virtual GPU, 28 multiprocessors)."""

from __future__ import annotations

from typing import Any

import torch

from hfopt.trace.cuda_allocations import RULES
from hfopt.trace.events import Formula, Kernels

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


def _bytes(steps: list[Any], out: torch.Tensor) -> list[Any]:
    return ["out" if step is out else step.bytes() for step in steps]


def test_a_video_is_packed_before_its_convolution_and_again_before_its_gradient() -> None:
    """Frames stand before channels by a view (VideoMAE on the virtual GPU)."""
    video, weight = torch.empty(2, 8, 3, 16, 16, device="meta").transpose(1, 2), torch.empty(4, 3, 2, 8, 8, device="meta")
    out = torch.empty(2, 4, 4, 2, 2, device="meta")
    steps = forward(KERNELS, (video, weight, None, [2, 8, 8], [0] * 3, [1] * 3, False, [0] * 3, 1), {}, out)
    assert _bytes(steps, out) == [4 * video.numel(), "out"]
    outputs = (None, torch.empty_like(weight), None)
    args = (out, video, weight, None, [2, 8, 8], [0] * 3, [1] * 3, False, [0] * 3, 1, [False, True, False])
    assert [_name(step, outputs) for step in backward(KERNELS, args, {}, outputs)] == [4 * video.numel(), "weight"]  # type: ignore[arg-type]


def test_placeholders_are_replaced_through_a_running_count_over_the_mask() -> None:
    """LLaVA on the virtual GPU: 8 bytes an element of the text, the mask in full; back, a position in each dimension for each element."""
    rule, back = RULES[torch.ops.aten.masked_scatter.default], RULES[torch.ops.aten.masked_scatter_backward.default]
    text, source = torch.empty(2, 10, 8, device="meta"), torch.empty(6, 8, device="meta")
    mask = torch.empty(2, 10, 1, dtype=torch.bool, device="meta").expand(2, 10, 8)
    assert _bytes(rule(KERNELS, (text, mask, source), {}, text), text) == ["out", 8 * 160, 160]
    assert _bytes(back(KERNELS, (text, mask, [6, 8]), {}, source), source) == [8 * 3 * 48, "out"]


def test_a_mask_is_counted_in_int64() -> None:
    mask, out = torch.empty(100, 7, dtype=torch.bool, device="meta"), torch.empty((), dtype=torch.long, device="meta")
    assert _bytes(RULES[torch.ops.aten.sum.default](KERNELS, (mask,), {}, out), out) == [8 * 700, "out"]


def test_softmax_multiplies_gradient_and_output_apart() -> None:
    """Seen on the virtual GPU: 8 × 1536 × 1536 in float32 beside the gradient of Gemma-2's eager attention over one row of samples."""
    gradient = torch.empty(1, 8, 48, 48)
    out, product = RULES[torch.ops.aten._softmax_backward_data.default](KERNELS, (gradient, gradient, -1, torch.float32), {}, gradient)
    assert out is gradient and isinstance(product, Formula)
    assert (product.name, product.bytes()) == ("product", 8 * 48 * 48 * 4)
