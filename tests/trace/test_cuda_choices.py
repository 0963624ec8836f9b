"""CUDA's autocast lists hold in the trace, and end with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hfopt.trace.cuda_choices import cuda_rules

HALF, WHOLE = torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2)


@pytest.mark.parametrize(
    ("operation", "result"),
    [
        (lambda: torch.mv(WHOLE, WHOLE[0]), torch.bfloat16),  # CUDA alone lists it
        (lambda: torch.addr(WHOLE, WHOLE[0], WHOLE[0]), torch.bfloat16),
        (lambda: torch.addcmul(HALF, HALF, HALF), torch.bfloat16),  # in the widest type of its arguments
        (lambda: torch.addcmul(WHOLE, HALF, HALF), torch.float32),
        (lambda: torch.atan2(HALF, WHOLE), torch.float32),
        (lambda: torch.exp(HALF), torch.float32),
        (lambda: HALF.sum(), torch.float32),
        (lambda: HALF.sum(dtype=torch.bfloat16), torch.bfloat16),  # whoever says a type gets it
    ],
)
def test_the_type_of_a_result_is_that_of_cuda(operation: Callable[[], torch.Tensor], result: torch.dtype) -> None:
    with cuda_rules((8, 0)), torch.autocast("cpu", torch.bfloat16):
        assert operation().dtype == result


def test_outside_the_cpus_lists_are_as_they_were() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        before = torch.exp(HALF).dtype, torch.mv(WHOLE, WHOLE[0]).dtype
        with cuda_rules((8, 0)):
            assert (torch.exp(HALF).dtype, torch.mv(WHOLE, WHOLE[0]).dtype) == (torch.float32, torch.bfloat16) != before
        assert (torch.exp(HALF).dtype, torch.mv(WHOLE, WHOLE[0]).dtype) == before


def test_dropout_keeps_a_mask_of_bytes_and_none_where_nothing_is_dropped() -> None:
    values = torch.ones(1000, requires_grad=True)
    with cuda_rules((8, 0)):
        kept = torch.nn.functional.dropout(values, 0.5)
        assert torch.nn.functional.dropout(values, 0.5, training=False) is values
        assert torch.nn.functional.dropout(values, 0.0) is values
    assert kept.grad_fn is not None and kept.grad_fn._saved_result1.dtype == torch.bool
    assert set(kept.unique().tolist()) == {0.0, 2.0}
