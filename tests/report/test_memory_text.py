"""The memory table in words: a margin smaller than what estimates are off by is no verdict."""

from __future__ import annotations

import pytest

from hfopt.report.memory_text import verdict
from hfopt.schema import Checkpointing, MemoryPeak, MemoryRow, MemoryTable, StepSettings
from hfopt.units import GIB, MIB


def table(spare_bytes: int) -> MemoryTable:
    peak = MemoryPeak(batch=8, allocated_bytes=9 * GIB, reserved_bytes=9 * GIB, context_bytes=GIB)
    row = MemoryRow(peak=peak, checkpointing=Checkpointing(), fits=spare_bytes >= 0, spare_bytes=spare_bytes, asked=True)
    return MemoryTable(
        model="gpt2", model_class="GPT2LMHeadModel", parameters=1, trainable_parameters=1, sample=None, settings=StepSettings(),
        device=None, available_bytes=peak.device_bytes + spare_bytes, rows=(row,), largest={False: 8}, seconds=1.0, notes=(),
    )  # fmt: skip


@pytest.mark.parametrize("spare_bytes", [2 * MIB, -2 * MIB])
def test_two_mebibytes_either_way_are_too_close_to_call(spare_bytes: int) -> None:
    words = verdict(table(spare_bytes))
    assert words[0].startswith("batch 8 is too close to call: 2 MiB")
    assert any("6 of 84 runs" in line for line in words)


def test_a_margin_above_the_known_error_is_a_verdict() -> None:
    assert verdict(table(GIB))[0] == "batch 8 fits with 1.00 GiB to spare"
    assert verdict(table(-GIB))[0] == "batch 8 does not fit: 1.00 GiB missing"
    assert not any("too close" in line for line in (*verdict(table(GIB)), *verdict(table(-GIB))))
