"""The canary for masks in a trace: transformers' question whether a tensor is fake stands where it is looked for, and is put back."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.utils import import_utils

from hfopt.compat.transformers_patches import masks_read


def test_a_trace_asks_a_fake_mask_for_its_values_as_a_step_would() -> None:
    if not hasattr(import_utils, "is_fake_tensor"):
        pytest.skip("this transformers does not ask")
    with FakeTensorMode():
        mask = torch.ones(2, 4, dtype=torch.long)
        assert import_utils.is_tracing(mask)
        with masks_read():
            assert not import_utils.is_tracing(mask)
        assert import_utils.is_tracing(mask)
