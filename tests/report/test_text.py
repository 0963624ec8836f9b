"""The plan in words: what candidates are called, and what a rehearsal ran."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hfopt.report.plan_page import plan_page
from hfopt.report.text import plan_text
from hfopt.schema import Candidate, PlanCharts, PlanFacts, Rejection, Trial


@pytest.mark.parametrize(
    ("precision", "stored", "words"),
    [
        ("fp32", None, "4 × 4 fp32"),
        ("fp32", "float32", "4 × 4 fp32"),
        ("fp32", "bfloat16", "4 × 4 bf16 weights"),
        ("tf32", "float16", "4 × 4 fp16 weights"),
        ("bf16", "bfloat16", "4 × 4 bf16"),
    ],
)
def test_weights_in_half_precision_need_no_autocast_and_are_not_called_fp32(
    facts: PlanFacts, precision: str, stored: str | None, words: str
) -> None:
    refused = Candidate(per_device_batch=4, accumulation=4, precision=precision)  # type: ignore[arg-type]
    told = replace(facts, weights_dtype=stored, alternatives=(), rejected=(Rejection(candidate=refused, reason="too large"),))
    assert f"  {words}  too large" in plan_text(told)
    assert f">{words}<" in plan_page(told, PlanCharts()).decode()


def test_a_rehearsal_of_some_micro_batches_says_so(facts: PlanFacts) -> None:
    def told(accumulation: int, device: str) -> str:
        candidate = replace(facts.after.candidate, accumulation=accumulation)
        trial = Trial(device=device, candidate=candidate, outcome="ok", peak_reserved_bytes=1)  # type: ignore[arg-type]
        return plan_text(replace(facts, trial=trial))

    assert "with 2 of a step's 16 micro-batches" in told(16, "virtual")
    assert "micro-batches" not in told(2, "virtual") and "micro-batches" not in told(16, "cuda")
