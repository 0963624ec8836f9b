"""From candidate to keys: nothing that changes nothing, nothing that was to be kept, nothing TrainingArguments refuses."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from versions import BEFORE_5

from hfopt.config.read_job import load_bytes
from hfopt.config.settings import trainer_settings
from hfopt.planner.changes import Outcome, Setting, changes
from hfopt.planner.conclusion import _as_written
from hfopt.schema import Candidate, Change, Checkpointing, Chosen, LoaderPlan, MemoryPeak, StepTime

DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "per_device_eval_batch_size": 8,
    "fp16": False,
    "bf16": False,
    "tf32": None,
    "gradient_checkpointing": False,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": True,
    "dataloader_persistent_workers": False,
    "dataloader_prefetch_factor": None,
}
STEP = StepTime(step_s=1, busy_s=1, samples_per_s=1, tokens_per_s=None, mfu=None, bound="compute")


def loader(workers: int = 0, prefetch: int | None = None, persistent: bool = False) -> LoaderPlan:
    return LoaderPlan(
        workers=workers,
        prefetch_factor=prefetch,
        pin_memory=True,
        persistent_workers=persistent,
        sample_s=1e-3,
        measured=False,
        reason="test",
    )


def chosen(candidate: Candidate, feed: LoaderPlan) -> Chosen:
    memory = MemoryPeak(batch=candidate.per_device_batch, allocated_bytes=1, reserved_bytes=1, context_bytes=0)
    return Chosen(candidate=candidate, memory=memory, time=STEP, loader=feed, fits=True)


def made(
    args: dict[str, Any],
    after: Candidate,
    *,
    feed: LoaderPlan | None = None,
    was: LoaderPlan | None = None,
    kept: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    before = Candidate(
        per_device_batch=args.get("per_device_train_batch_size", 8),
        accumulation=args.get("gradient_accumulation_steps", 1),
        precision=trainer_settings(args).precision,
        checkpointing=trainer_settings(args).checkpointing,
    )
    outcome = Outcome(
        before=chosen(before, was or loader()), after=chosen(after, feed or loader()), effective_batch=8, budget_bytes=1, device="card"
    )
    found = changes(Setting(args=args, defaults=DEFAULTS, kept=kept), outcome)
    assert all(change.reason for change in found)
    return {change.key: change.after for change in found}


def test_the_same_candidate_changes_nothing() -> None:
    assert made({}, Candidate(per_device_batch=8, accumulation=1, precision="fp32")) == {}


def test_batch_and_accumulation_move_together() -> None:
    after = Candidate(per_device_batch=4, accumulation=2, precision="fp32")
    assert made({}, after) == {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


def test_one_precision_takes_the_others_place() -> None:
    after = Candidate(per_device_batch=8, accumulation=1, precision="bf16")
    assert made({"fp16": True}, after) == {"fp16": False, "bf16": True}
    assert made({"tf32": False}, after) == {"bf16": True}
    assert made({"tf32": True}, after) == {"bf16": True}  # both help, each its own kernels


def test_checkpointing_goes_with_its_options() -> None:
    on = Candidate(per_device_batch=8, accumulation=1, precision="fp32", checkpointing=Checkpointing(every_n_layers=2))
    assert made({}, on)["gradient_checkpointing_kwargs"] == {"use_reentrant": False, "every_n_layers": 2}
    every = replace(on, checkpointing=Checkpointing(every_n_layers=1))
    assert made({}, every)["gradient_checkpointing_kwargs"] == {"use_reentrant": False}  # what every transformers knows
    off = Candidate(per_device_batch=8, accumulation=1, precision="fp32")
    args = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    assert made(args, off) == {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": None}


def test_prefetch_leaves_with_the_workers() -> None:
    same = Candidate(per_device_batch=8, accumulation=1, precision="fp32")
    args = {"dataloader_num_workers": 6, "dataloader_prefetch_factor": 4, "dataloader_persistent_workers": True}
    found = made(args, same, was=loader(6, 4, True), feed=loader())
    assert found == {"dataloader_num_workers": 0, "dataloader_prefetch_factor": None, "dataloader_persistent_workers": False}


def test_pytorchs_own_prefetch_is_not_spelled_out() -> None:
    same = Candidate(per_device_batch=8, accumulation=1, precision="fp32")
    assert made({}, same, feed=loader(4, 2, True)) == {"dataloader_num_workers": 4, "dataloader_persistent_workers": True}


def test_one_worker_is_a_worker() -> None:
    same = Candidate(per_device_batch=8, accumulation=1, precision="fp32")
    found = made({}, same, feed=loader(1, 4, True))
    assert found == {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 4, "dataloader_persistent_workers": True}


def test_kept_keys_stay() -> None:
    after = Candidate(per_device_batch=8, accumulation=1, precision="bf16")
    assert made({}, after, kept=frozenset({"bf16"})) == {}


def test_reading_the_flags() -> None:
    assert trainer_settings({"bf16": True, "tf32": True}).precision == "bf16"
    assert trainer_settings({"tf32": True}).precision == "tf32"
    assert trainer_settings({"fp16": False}).precision == "fp32"
    assert trainer_settings({"gradient_checkpointing": True}).checkpointing == Checkpointing(every_n_layers=1, use_reentrant=BEFORE_5)
    assert (
        trainer_settings({"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"every_n_layers": 2}}).checkpointing
        == Checkpointing()
    )


@pytest.mark.parametrize(("fits", "said"), [(True, "samples/s predicted instead of"), (False, "8 does not fit")])
def test_the_reason_says_whether_the_old_batch_was_too_large_or_too_slow(fits: bool, said: str) -> None:
    old, new = (Candidate(per_device_batch=batch, accumulation=8 // batch, precision="fp32") for batch in (8, 4))
    before = replace(chosen(old, loader()), fits=fits)
    outcome = Outcome(before=before, after=chosen(new, loader()), effective_batch=8, budget_bytes=1, device="card")
    reasons = {change.key: change.reason for change in changes(Setting(args={}, defaults=DEFAULTS, kept=frozenset()), outcome)}
    assert said in reasons["per_device_train_batch_size"]


def test_what_only_the_user_may_allow_is_written_with_that_reason() -> None:
    after = Candidate(
        per_device_batch=8,
        accumulation=1,
        precision="fp32",
        optim="adamw_torch_fused",
        torch_compile=True,
        use_liger_kernel=True,
        attn_implementation="sdpa",
    )
    old = Candidate(per_device_batch=8, accumulation=1, precision="fp32")
    outcome = Outcome(
        before=chosen(old, loader()),
        after=chosen(after, loader()),
        effective_batch=8,
        budget_bytes=1,
        device="card",
        learning_rate=(2e-5, "scaled"),
        compiling="allowed by --allow torch_compile",
        further=(("per_device_eval_batch_size", 64, "no activations"),),
    )
    found = changes(Setting(args={}, defaults=DEFAULTS, kept=frozenset()), outcome)
    assert {change.key: change.after for change in found} == {
        "optim": "adamw_torch_fused",
        "torch_compile": True,
        "use_liger_kernel": True,
        "attn_implementation": "sdpa",
        "learning_rate": 2e-5,
        "per_device_eval_batch_size": 64,
    }
    for change in found[:4]:
        assert f"allowed by --allow {change.key}" in change.reason
    assert [change.reason for change in found[4:]] == ["scaled", "no activations"]


def test_checkpointing_of_fewer_layers_says_what_it_brings() -> None:
    half = Candidate(per_device_batch=8, accumulation=1, precision="fp32", checkpointing=Checkpointing(every_n_layers=2))
    outcome = Outcome(
        before=chosen(replace(half, checkpointing=Checkpointing(every_n_layers=1)), loader()),
        after=replace(chosen(half, loader()), time=replace(STEP, samples_per_s=2)),
        effective_batch=8,
        budget_bytes=1 << 30,
        device="card",
    )
    args = {"gradient_checkpointing": True}
    (change,) = changes(Setting(args=args, defaults=DEFAULTS, kept=frozenset()), outcome)
    assert (change.key, change.after) == ("gradient_checkpointing_kwargs", {"use_reentrant": False, "every_n_layers": 2})
    assert change.reason.endswith("2.00 samples/s predicted instead of 1.00 samples/s; takes 1 B of 1.00 GiB usable on card")


def test_the_prefetch_that_changes_says_what_a_sample_costs() -> None:
    same = Candidate(per_device_batch=8, accumulation=1, precision="fp32")
    outcome = Outcome(
        before=chosen(same, loader(2, 2, True)), after=chosen(same, loader(2, 4, True)), effective_batch=8, budget_bytes=1, device="card"
    )
    args = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
    (change,) = changes(Setting(args=args, defaults=DEFAULTS, kept=frozenset()), outcome)
    assert (change.key, change.after) == ("dataloader_prefetch_factor", 4) and "a sample costs 1.0 ms" in change.reason


def test_a_precision_the_card_lacks_is_switched_off() -> None:
    after = Candidate(per_device_batch=8, accumulation=1, precision="fp32")
    assert made({"bf16": True}, after) == {"bf16": False}
    assert made({"tf32": True}, after) == {"tf32": False}


def test_a_change_is_told_as_the_files_own_tool_spells_it() -> None:
    text = b"model_name_or_path: x\nstage: sft\nfinetuning_type: full\ntemplate: qwen\nper_device_train_batch_size: 2\n"
    subject: Any = SimpleNamespace(loaded=load_bytes(text, "c.yaml"))
    made = (
        Change(key="gradient_checkpointing", before=True, after=False, reason="why"),
        Change(key="per_device_train_batch_size", before=2, after=4, reason="why"),
    )
    (spelled,) = _as_written(subject, made).values()
    assert (spelled.key, spelled.before, spelled.after, spelled.reason) == ("disable_gradient_checkpointing", False, True, "why")
    assert _as_written(SimpleNamespace(loaded=None), made) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize(("ruled_out", "reason"), [("no bf16 on it", "no bf16 on it"), (None, "float32 is predicted faster here")])
def test_a_precision_that_a_card_has_is_not_called_missing(ruled_out: str | None, reason: str) -> None:
    old, new = (Candidate(per_device_batch=8, accumulation=1, precision=precision) for precision in ("bf16", "fp32"))
    outcome = Outcome(
        before=chosen(old, loader()), after=chosen(new, loader()), effective_batch=8, budget_bytes=1, device="card", ruled_out=ruled_out
    )
    made = {change.key: change for change in changes(Setting(args={"bf16": True}, defaults=DEFAULTS, kept=frozenset()), outcome)}
    assert made["bf16"].after is False and made["bf16"].reason.startswith(reason)
