"""The canaries for what a trace answers in other packages' place: it stands where it is looked for, and is put back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hfopt.compat.torch_patches import lists_of_scalars, unvalidated_distributions
from hfopt.compat.transformers_patches import assignments_by_shape


def test_a_list_of_fake_scalars_is_read() -> None:
    original = torch.tensor
    with FakeTensorMode(), lists_of_scalars(lambda tensor: 7):
        assert torch.tensor([torch.ones(()), torch.ones(())]).shape == (2,)
    assert torch.tensor is original


def test_distributions_do_not_check_and_check_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch.compile switches it off for the whole process
    with unvalidated_distributions():
        torch.distributions.Normal(0.0, -1.0)
    with pytest.raises(ValueError, match="scale"):
        torch.distributions.Normal(0.0, -1.0)


def test_boxes_are_matched_by_shape() -> None:
    pytest.importorskip("scipy")
    from transformers.loss import loss_for_object_detection as loss

    original = loss.linear_sum_assignment
    with FakeTensorMode() as mode, assignments_by_shape():
        rows, columns = loss.linear_sum_assignment(mode.from_tensor(torch.ones(5, 3)))
        assert rows.tolist() == columns.tolist() == [0, 1, 2]
        assert loss.linear_sum_assignment(np.array([[2.0, 1.0], [1.0, 2.0]]))[1].tolist() == [1, 0], "a real matrix is matched in earnest"
    assert loss.linear_sum_assignment is original
