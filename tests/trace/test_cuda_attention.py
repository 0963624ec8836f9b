"""Which attention kernel is chosen, by dtype, mask, head size and capability."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hfopt.trace.cuda_allocations import efficient_forward, flash_backward
from hfopt.trace.cuda_choices import Attention
from hfopt.trace.events import Formula, Kernels, efficient_tile


def _heads(dtype: torch.dtype, width: int = 64) -> torch.Tensor:
    return torch.empty(2, 4, 32, width, dtype=dtype, device="meta", requires_grad=True)


@pytest.mark.parametrize(
    ("dtype", "width", "masked", "capability", "flash", "efficient"),
    [
        (torch.bfloat16, 64, False, (8, 0), True, True),
        (torch.bfloat16, 64, True, (8, 0), False, True),
        (torch.bfloat16, 64, False, (7, 5), False, False),  # bfloat16 needs 8.0 everywhere
        (torch.float16, 64, False, (7, 5), False, True),
        (torch.float32, 64, False, (8, 0), False, True),
        (torch.float32, 66, False, (8, 0), False, False),  # not a multiple of 4
        (torch.bfloat16, 224, False, (8, 6), False, True),  # no flash backward for such heads on sm_86
        (torch.bfloat16, 224, False, (8, 0), True, True),
        (torch.bfloat16, 264, False, (8, 0), False, True),
    ],
)
def test_choice(dtype: torch.dtype, width: int, masked: bool, capability: tuple[int, int], flash: bool, efficient: bool) -> None:
    query = _heads(dtype, width)
    mask = torch.empty(2, 1, 32, 32, dtype=torch.bool, device="meta") if masked else None
    rules = Attention(capability)
    assert rules.flash(query, query, query, mask, 0.0) is flash
    assert rules.efficient(query, query, query, mask) is efficient


@pytest.mark.parametrize(("version", "taken"), [((2, 14), (True, False)), ((2, 15), (True, True))])
def test_who_takes_grouped_heads(version: tuple[int, int], taken: tuple[bool, bool]) -> None:
    """Flash always, the memory-efficient kernel from torch 2.15 on; without being asked to group neither takes unequal heads."""
    query, key = _heads(torch.float32), torch.empty(2, 2, 32, 64, device="meta")
    attention = Attention((8, 0), version)
    assert attention.takes_heads(query, key, key, enable_gqa=True) == taken
    assert attention.takes_heads(query, key, key, enable_gqa=False) == (False, False)


@pytest.mark.parametrize(
    ("dtype", "width", "length", "masked", "kernel"),
    [
        (torch.bfloat16, 64, 32, False, "FlashAttention"),
        (torch.bfloat16, 60, 32, False, "Slice"),  # padded to 64 for the flash kernel, and cut again
        (torch.float32, 64, 30, True, "EfficientAttention"),  # the mask's rows are padded to 32
        (torch.float32, 66, 32, False, "View"),  # the plain formula
    ],
)
def test_the_call_ends_in_the_kernel_and_gives_the_shape(dtype: torch.dtype, width: int, length: int, masked: bool, kernel: str) -> None:
    query = torch.empty(2, 4, length, width, dtype=dtype, device="meta", requires_grad=True)
    mask = torch.empty(2, 1, length, length, dtype=torch.bool, device="meta") if masked else None
    out = Attention((8, 0))(query, query, query, mask)
    assert out.shape == query.shape and out.dtype == dtype
    assert kernel in type(out.grad_fn).__name__


def _taken(steps: Sequence[Any]) -> list[int]:
    """Bytes of the workspaces among the steps; tensors are outputs, and numbers say what is freed."""
    return [step.bytes() for step in steps if isinstance(step, Formula)]


@pytest.mark.parametrize(
    ("width", "key_heads", "taken"),
    [
        (64, 4, [2 * 4 * 128 * 4, 2 * 4 * 128 * 64 * 4]),
        (64, 2, [2 * 4 * 128 * 4, 2 * 4 * 128 * 64 * 4, 2 * 4 * 100 * 64 * 2, 2 * 4 * 100 * 64 * 2]),  # grouped heads are expanded
        (160, 4, [2 * 4 * 128 * 4, 2 * 4 * 128 * 192 * 4]),
        (200, 4, [2 * 4 * 128 * 4, 2 * 4 * 128 * 256 * 4]),
    ],
)
def test_what_the_flash_backward_takes(width: int, key_heads: int, taken: list[int]) -> None:
    query, key = (torch.empty(2, heads, 100, width, dtype=torch.bfloat16, device="meta") for heads in (4, key_heads))
    steps = flash_backward(Kernels(capability=(8, 0)), (query, query, key), {}, (query, key, key))
    assert all(one is other for one, other in zip(steps[:3], (query, key, key), strict=True))
    assert _taken(steps) == taken


@pytest.mark.parametrize(
    ("dtype", "width", "taken"), [(torch.float16, 128, []), (torch.float16, 136, [2 * 4 * 100 * 136 * 4]), (torch.float32, 136, [])]
)
def test_wide_heads_accumulate_in_float32(dtype: torch.dtype, width: int, taken: list[int]) -> None:
    output = torch.empty(2, 4, 100, width, dtype=dtype, device="meta")
    sums, seed, offset = torch.empty(2, 4, 100, device="meta"), torch.empty((), device="meta"), torch.empty((), device="meta")
    steps = efficient_forward(Kernels(capability=(8, 0)), (output, output, output), {}, (output, sums, seed, offset))
    assert _taken(steps) == taken
    assert [step for step in steps if isinstance(step, torch.Tensor)][2] is output


@pytest.mark.parametrize(
    ("half", "width", "capability", "tile"),
    [
        (True, 64, (8, 6), (64, 64, False)),
        (False, 128, (8, 0), (128, 64, False)),
        (False, 128, (8, 6), (64, 64, False)),
        (True, 128, (8, 0), (128, 128, False)),
        (True, 96, (8, 6), (128, 64, False)),
        (True, 128, (8, 6), (64, 64, True)),
        (True, 160, (8, 0), (128, 64, True)),
    ],
)
def test_the_tile_of_the_efficient_backward(half: bool, width: int, capability: tuple[int, int], tile: tuple[int, int, bool]) -> None:
    assert efficient_tile(half, width, bool(Kernels(capability=capability).roomy)) == tile
