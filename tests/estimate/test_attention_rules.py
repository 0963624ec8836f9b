"""Which attention kernel is chosen, by dtype, mask, head size and capability."""

from __future__ import annotations

import pytest
import torch

from hfopt.estimate.attention_rules import Attention


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


def test_grouped_heads_have_no_efficient_kernel() -> None:
    query, key = _heads(torch.float32), torch.empty(2, 2, 32, 64, device="meta")
    assert not Attention((8, 0)).efficient(query, key, key, None)
