"""The CTC loss: its tables are as wide as the longest target, by the targets' true lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hfopt.errors import TraceError
from hfopt.memory.step_memory import Estimate, estimate
from hfopt.schema import StepSettings, Workload

FRAMES, BATCH = 49, 8
Make = Callable[..., Workload]


def _taken(traced: Estimate, op: str) -> list[int]:
    """Bytes of every block that the operation takes, in the first of the two recorded steps."""
    timeline = traced.curve.timeline
    sizes = zip(timeline.sizes(BATCH), timeline.place_of.tolist(), timeline.is_free.tolist(), strict=True)
    taken = [int(size) for size, place, freed in sizes if not freed and timeline.places[place].op.startswith(op)]
    return taken[: len(taken) // 2]


@pytest.fixture
def spelled(tiny_wav2vec2: Make) -> Estimate:
    return estimate(tiny_wav2vec2(characters=20, longest=12), StepSettings())


def test_forward_takes_a_table_as_wide_as_the_longest_target(spelled: Estimate) -> None:
    assert _taken(spelled, "aten::_ctc_loss.")[-2:] == [BATCH * FRAMES * (2 * 12 + 1) * 4, BATCH * 4]


def test_backward_takes_a_second_table_and_the_gradient(spelled: Estimate) -> None:
    assert _taken(spelled, "aten::_ctc_loss_backward")[-2:] == [BATCH * FRAMES * (2 * 12 + 1) * 4, BATCH * FRAMES * 32 * 4]


def test_the_turned_gradient_is_copied_for_log_softmax(spelled: Estimate) -> None:
    """And its gradient is contiguous, so that the head's product copies nothing."""
    assert _taken(spelled, "aten::_log_softmax_backward_data")[-2:] == [BATCH * FRAMES * 32 * 4] * 2


def test_longer_targets_keep_more(tiny_wav2vec2: Make) -> None:
    short, long = (estimate(tiny_wav2vec2(n), StepSettings()).curve.peak(64).allocated_bytes for n in (4, 4000))
    assert long - short > 64 * FRAMES * 2 * 3000 * 4


class _Spelling(torch.nn.Module):
    """The loss alone, over lengths given as a test likes."""

    def __init__(self, lengths: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 32)
        self.lengths = lengths

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        log_probs = self.linear(x).transpose(0, 1).log_softmax(-1)
        targets, lengths = self.lengths(targets)
        frames = torch.full((x.shape[0],), FRAMES)
        return {"loss": torch.nn.functional.ctc_loss(log_probs, targets, frames, lengths)}


def _spelling(make: Make, lengths: Callable[[torch.Tensor], Any]) -> Workload:
    def batch(size: int) -> dict[str, Any]:
        return {"x": torch.zeros(size, FRAMES, 16), "targets": torch.ones(size, 10, dtype=torch.long)}

    return replace(make(), build_model=lambda: _Spelling(lengths), make_batch=batch)


def _unknown(targets: torch.Tensor) -> torch.Tensor:
    return torch.randint(1, 10, (targets.shape[0],))


def test_padded_targets_of_unknown_length_count_in_full(tiny_wav2vec2: Make) -> None:
    traced = estimate(_spelling(tiny_wav2vec2, lambda targets: (targets, _unknown(targets))), StepSettings())
    assert _taken(traced, "aten::_ctc_loss.")[-2] == BATCH * FRAMES * (2 * 10 + 1) * 4


def test_joined_targets_of_unknown_length_are_refused(tiny_wav2vec2: Make) -> None:
    with pytest.raises(TraceError, match="_ctc_loss"):
        estimate(_spelling(tiny_wav2vec2, lambda targets: (targets.flatten(), _unknown(targets))), StepSettings())
