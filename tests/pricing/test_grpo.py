"""GRPO's generation beside the card's memory: by rule, and the rule against PyTorch's own allocator on the virtual GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_jobs import made_job

from hfopt.config.settings import with_raw
from hfopt.errors import ConfigError, NothingFits, WorkloadError
from hfopt.job.subject import Subject
from hfopt.model import samples
from hfopt.model.from_config import from_spec
from hfopt.pricing.grpo import check_generation, check_groups, completions_at_once, writing_of
from hfopt.schema import Breakdown, DataSpec, MemoryPeak, ModelSpec
from hfopt.units import MIB

GRPO = made_job(
    path=None, section=(), trainer="GRPO", raw={}, model=ModelSpec(name=None), data=DataSpec(), per_device_batch=4, accumulation=4
)
STAYS = Breakdown(
    weights_bytes=20 * MIB,
    gradients_bytes=0,
    optimizer_bytes=10 * MIB,
    activations_bytes=0,
    logits_bytes=0,
    temporaries_bytes=0,
    fragmentation_bytes=0,
    context_bytes=0,
)
PEAK = MemoryPeak(batch=4, allocated_bytes=30 * MIB, reserved_bytes=30 * MIB, context_bytes=0, breakdown=STAYS)


@pytest.fixture(scope="module")
def subject(tiny: Path) -> Subject:
    workload = from_spec(ModelSpec(name=str(tiny / "llama")), DataSpec(max_length=64), trainer="GRPO")
    return Subject(job=GRPO, workload=workload, hardware=Any)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("args", "world", "rows"),
    [({}, 1, 16), ({}, 2, 16), ({"generation_batch_size": 24}, 2, 12), ({"steps_per_generation": 3}, 2, 12)],
)
def test_how_many_a_rank_writes_at_once(args: dict[str, Any], world: int, rows: int) -> None:
    assert completions_at_once(with_raw(replace(GRPO, world_size=world), args)) == rows


@pytest.mark.parametrize(
    ("args", "effective", "ways"),
    [
        ({"num_generations": 14}, 64, "num_generations: 8 or 16, --num-gpus 7, --effective-batch 70"),
        ({"num_generations": 14, "generation_batch_size": 32}, 64, "num_generations: 8 or 16, generation_batch_size: 42"),
        ({"num_generations": 6, "steps_per_generation": 4}, 64, "num_generations: 4 or 8, --num-gpus 3"),
        ({"num_generations": 14}, 56, None),
        ({"num_generations": 16, "steps_per_generation": 4}, 56, None),
    ],
)
def test_groups_that_trl_refuses_are_refused(args: dict[str, Any], effective: int, ways: str | None) -> None:
    """GRPOConfig raises where what is generated at once is no whole number of groups; every way that is named ends that."""
    job = replace(with_raw(GRPO, args), uses_trl=True)
    if ways is None:
        check_groups(job, effective)
        return
    with pytest.raises(ConfigError, match="no whole number of groups") as refused:
        check_groups(job, effective)
    assert refused.value.hint == f"one of these would do: {ways}"
    check_groups(replace(job, uses_trl=False), effective)  # another reader may have other rules


def test_what_a_token_of_a_completion_takes(subject: Subject) -> None:
    """Two layers, two heads of 8: 32 numbers of keys and values per token and layer."""
    mixed, half = (writing_of(subject, precision="bf16", dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert mixed is not None and half is not None
    assert (mixed.layers, mixed.kv_width, mixed.number_bytes) == (2, 16, 4)
    assert (half.number_bytes, half.copied_weights) == (2, 0)
    assert mixed.copied_weights == subject.workload.parameters - 64 * 16
    per_token = half.bytes_for(4, 11) - half.bytes_for(4, 10)
    assert per_token == 4 * 2 * 2 * 16 * 2


def test_what_does_not_fit_is_said_with_what_would(subject: Subject) -> None:
    def said(budget_mib: int, **args: Any) -> list[str]:
        job = with_raw(GRPO, {"num_generations": 4, **args})
        wide = replace(subject, job=job)
        return list(check_generation(wide, PEAK, budget_bytes=budget_mib * MIB, precision="fp32", dtype="float32"))

    assert "generating 16 completions" in said(100)[0] and "which fits" in said(100)[0]
    assert said(1, use_vllm=True) == [], "vLLM generates"
    with pytest.raises(NothingFits, match="nothing fits: generating 65536 completions") as ended:
        said(100, generation_batch_size=65536)
    advised = int((ended.value.hint or "").partition("generation_batch_size: ")[2].partition(",")[0])
    assert advised % 4 == 0 and "which fits" in said(100, generation_batch_size=advised)[0]
    with pytest.raises(NothingFits):
        said(100, generation_batch_size=advised + 4)
    with pytest.raises(NothingFits) as hopeless:
        said(31)
    assert "max_completion_length" in (hopeless.value.hint or "")
    assert (
        list(check_generation(replace(subject, job=replace(GRPO, trainer="SFT")), PEAK, budget_bytes=1, precision="fp32", dtype=None)) == []
    )


def test_prompts_are_texts_conversations_or_neither() -> None:
    assert samples._text("once upon") == "once upon"
    assert samples._text([{"role": "user", "content": "once"}, "upon"]) == "once upon"
    assert samples._text(7) == "7"


def test_no_completions_and_no_prompts_are_said() -> None:
    made = samples.Generated(prompt=8, completion=4, with_reference=True)
    batch = made(3)
    assert batch["prompt_ids"].shape == (3, 8) and batch["ref_per_token_logps"].shape == (3, 4) and batch["num_items_in_batch"] == 12
    assert batch["prompt_mask"].sum(1).tolist() == [8, 8, 6], "the last one is padded on the left"
    with pytest.raises(WorkloadError, match="a batch of 0 completions"):
        made(0)
    with pytest.raises(WorkloadError, match="the prompts cannot be looked at"):
        samples._longest_prompt(SimpleNamespace(train_dataset=iter(())))
