"""The planner end to end on a model small enough to trace in a second: the law of the effective batch, reasons, refusals, determinism."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hfopt.errors import ConfigError, NothingFits, WorkloadError
from hfopt.job.subject import from_file
from hfopt.memory.curve import MemoryCurve, Replay
from hfopt.memory.step_memory import Estimate, estimate
from hfopt.planner import Plan, Request, plan
from hfopt.planner.algorithm import plan_subject
from hfopt.schema import Neutrality, StepSettings, Workload

CARD = "rtx 3070"
NOT_NEUTRAL = Neutrality(
    model_class="BertForSequenceClassification",
    transformers_version="5",
    neutral=False,
    ratio=4.0,
    fixable=True,
    reason="the head ignores the number of items",
)
_TRACES: dict[tuple[str, StepSettings], Estimate] = {}


def remembered(workload: Workload, settings: StepSettings) -> Estimate:
    """One trace per model and setting for all tests of this file: the planner's choices are what is tested here."""
    key = (f"{workload.name} {workload.shape}", settings)
    if key not in _TRACES:
        _TRACES[key] = estimate(workload, settings)
    return _TRACES[key]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 1000,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write(tmp_path: Path, model: Path, **args: object) -> Path:
    path = tmp_path / "train.yaml"
    values = {"model_name_or_path": str(model), "max_seq_length": 64, "output_dir": "out", "per_device_train_batch_size": 8, **args}
    path.write_text("# my run\n" + yaml.safe_dump(values, sort_keys=False))
    return path


def made(path: Path, **options: object) -> Plan:
    return plan(path, Request(gpu=CARD, dry_run=False, allow=frozenset({"accumulation"})), estimator=remembered, **options)


@pytest.mark.parametrize(("batch", "accumulation"), [(32, 3), (1, 97), (97, 1), (8, 1), (1, 1), (6, 35)])
def test_the_effective_batch_is_the_same_before_and_after(tmp_path: Path, model: Path, batch: int, accumulation: int) -> None:
    path = write(tmp_path, model, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation)
    result = made(path)
    after = yaml.safe_load(result.to_yaml())
    assert after["per_device_train_batch_size"] * after.get("gradient_accumulation_steps", 1) == batch * accumulation
    assert result.facts.effective_batch == batch * accumulation


def test_more_memory_on_a_guessed_length_is_a_warning(tmp_path: Path, model: Path) -> None:
    stated = write(tmp_path, model, per_device_train_batch_size=2, gradient_accumulation_steps=64, bf16=True)
    assert made(stated).facts.warnings == ()
    guessed = stated.with_name("guessed.yaml")
    guessed.write_text(stated.read_text().replace("max_seq_length: 64\n", ""))
    found = made(guessed).facts
    assert found.after.memory.device_bytes > 1.25 * found.before.memory.device_bytes
    (warning,) = found.warnings
    assert warning.startswith("length ") and "(--seq-len): not stated, so assumed" in warning


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"num_ppo_epochs": 4, "total_episodes": 1000}, "PPO trains a policy and a value model"),
        ({"teacher_model_name_or_path": "org/large"}, "a teacher (org/large) stands beside"),
        ({"judge": "pair_rm", "max_new_tokens": 53}, "generates with the model that it trains"),
    ],
)
def test_a_job_of_several_models_is_refused(tmp_path: Path, model: Path, args: dict[str, object], words: str) -> None:
    with pytest.raises(WorkloadError, match=re.escape(words)):
        made(write(tmp_path, model, **args))
    assert from_file(write(tmp_path, model, data={"teacher_model": "org/large"}, teacher_model="gpt-4o"), Request(gpu=CARD)).job


def test_the_same_input_gives_the_same_bytes_and_keeps_the_rest_of_the_file(tmp_path: Path, model: Path) -> None:
    path = write(tmp_path, model, gradient_accumulation_steps=4)
    first, second = made(path), made(path)
    assert first.to_yaml() == second.to_yaml() and first.report() == second.report() and first.to_json() == second.to_json()
    assert first.to_yaml().startswith("# my run\n")


def test_every_change_has_its_reason_and_the_report_shows_it(tmp_path: Path, model: Path) -> None:
    result = made(write(tmp_path, model, gradient_accumulation_steps=4))
    assert {"per_device_train_batch_size", "gradient_accumulation_steps"} <= {change.key for change in result.facts.changes}
    report = str(result)
    flat = " ".join(report.split())  # lines are wrapped
    for change in result.facts.changes:
        assert change.key in flat and change.reason in flat
    assert "\x1b[" not in report


def test_the_charts_hold_the_peak_the_limit_and_the_chosen_batch(tmp_path: Path, model: Path) -> None:
    result = made(write(tmp_path, model, gradient_accumulation_steps=4))
    drawn, after = result.charts, result.facts.after
    positions = [point.position for point in drawn.timeline]
    assert positions == sorted(positions) and positions[0] >= 0 and positions[-1] <= 1
    assert {"forward", "backward", "optimizer"} <= {point.phase for point in drawn.timeline}
    first, last = drawn.timeline[0].bytes_by_category, drawn.timeline[-1].bytes_by_category
    for kind in ("weights", "optimizer"):
        assert last[kind] == pytest.approx(first[kind], rel=1e-3), "the chart ends with the step, not with the trace"
    assert drawn.peak is not None and drawn.peak in drawn.timeline
    assert after.memory.breakdown is not None
    held = after.memory.breakdown.total_bytes - after.memory.breakdown.fragmentation_bytes
    assert drawn.peak.total_bytes == pytest.approx(held, rel=1e-3)
    assert drawn.device_bytes is not None and drawn.budget_bytes == result.facts.budget_bytes < drawn.device_bytes
    (chosen,) = [point for point in drawn.batches if point.chosen]
    assert chosen.batch == after.candidate.per_device_batch and chosen.fits and chosen.may_be_chosen
    assert chosen.device_bytes == after.memory.device_bytes
    own = [point for point in drawn.batches if point.every_n_layers == chosen.every_n_layers]
    assert [p.batch for p in own] == sorted(p.batch for p in own) and own[-1].batch > 32
    assert all(a.device_bytes <= b.device_bytes * 1.02 for a, b in itertools.pairwise(own))


def test_a_plan_of_the_plan_changes_nothing(tmp_path: Path, model: Path) -> None:
    path = write(tmp_path, model, gradient_accumulation_steps=4)
    path.write_text(made(path).to_yaml())
    assert made(path).facts.changes == ()


def test_kept_keys_stay_by_option_and_by_comment(tmp_path: Path, model: Path) -> None:
    path = write(tmp_path, model, gradient_accumulation_steps=4)
    by_option = made(path, keep=frozenset({"per_device_train_batch_size", "bf16"}))
    assert not {"per_device_train_batch_size", "bf16"} & {change.key for change in by_option.facts.changes}
    path.write_text(path.read_text().replace("gradient_accumulation_steps: 4", "gradient_accumulation_steps: 4  # hfopt: keep"))
    assert "gradient_accumulation_steps" not in {change.key for change in made(path).facts.changes}


def test_a_tiny_model_is_launch_bound_and_the_larger_batch_is_only_advice(tmp_path: Path, model: Path) -> None:
    result = made(write(tmp_path, model, per_device_train_batch_size=32))
    assert result.facts.after.time.gpu_utilization < 0.5
    advice = next(item for item in result.facts.advice if item.flag and "--effective-batch 64" in item.flag)
    assert "8x (256)" in advice.detail
    asked = made(write(tmp_path, model, per_device_train_batch_size=32, learning_rate=1e-4), effective_batch=128, lr_scaling="sqrt")
    changed = {change.key: change.after for change in asked.facts.changes}
    assert changed["per_device_train_batch_size"] == 128 and changed["learning_rate"] == pytest.approx(2e-4)


@pytest.mark.slow
def test_nothing_fits_says_what_would(tmp_path: Path, model: Path) -> None:
    with pytest.raises(NothingFits) as refusal:
        plan(write(tmp_path, model), Request(gpu=CARD, dry_run=False, vram_gib=0.15), estimator=remembered)
    assert refusal.value.exit_code == 3 and refusal.value.hint
    assert "a card with more memory" in refusal.value.hint


@pytest.mark.slow
def test_what_was_kept_is_named_when_it_stands_in_the_way(tmp_path: Path, model: Path) -> None:
    path = write(tmp_path, model, per_device_train_batch_size=4096)
    with pytest.raises(NothingFits) as refusal:
        plan(path, Request(gpu=CARD, dry_run=False, vram_gib=1, keep=frozenset({"per_device_train_batch_size"})), estimator=remembered)
    assert refusal.value.hint and "leave per_device_train_batch_size free" in refusal.value.hint


def test_a_config_that_does_not_fit_is_repaired_and_said_so(tmp_path: Path, model: Path) -> None:
    result = made(write(tmp_path, model, per_device_train_batch_size=4096), vram_gib=1.0)
    assert not result.facts.before.fits and result.facts.after.fits
    assert result.facts.after.memory.device_bytes <= result.facts.budget_bytes
    assert "DOES NOT FIT" in result.report()


def test_a_batch_that_reserves_more_than_larger_ones_is_left_out(tmp_path: Path, model: Path) -> None:
    """The winner of an even curve does not fit where its own batch has a hole: the limit alone would take it again."""
    path, wishes = (
        write(tmp_path, model, per_device_train_batch_size=96),
        Request(gpu=CARD, dry_run=False, allow=frozenset({"accumulation"})),
    )
    even = plan(path, wishes, estimator=remembered)
    full = even.candidate.per_device_batch

    class Holed(MemoryCurve):
        def replay(self, batch: int, *rest: Any, **options: Any) -> Replay:
            found = super().replay(batch, *rest, **options)
            return replace(found, reserved_bytes=even.facts.budget_bytes) if batch == full else found

    def holed(workload: Workload, settings: StepSettings) -> Estimate:
        found = remembered(workload, settings)
        return replace(
            found, curve=Holed(found.curve.timeline, found.curve.context_bytes, third_step_follows=found.curve.third_step_follows)
        )

    facts = plan(path, wishes, estimator=holed).facts
    assert facts.after.candidate.per_device_batch != full
    for one in (facts.after, *facts.alternatives):
        assert one.memory.device_bytes <= facts.budget_bytes and one.candidate.per_device_batch != full
    assert any(r.candidate == even.candidate and "more is kept in the cache" in r.reason for r in facts.rejected)


@pytest.mark.slow
def test_more_devices_share_the_batch(tmp_path: Path, model: Path) -> None:
    path = write(tmp_path, model, per_device_train_batch_size=8, gradient_accumulation_steps=2)
    result = made(path, num_gpus=4)
    candidate = result.candidate
    assert candidate.per_device_batch * candidate.accumulation * 4 == result.facts.effective_batch == 64


def test_the_json_has_what_is_promised(tmp_path: Path, model: Path) -> None:
    data = json.loads(json.dumps(made(write(tmp_path, model)).to_json()))
    assert {"effective_batch", "changes", "before", "after", "verified", "alternatives", "rejected"} <= data.keys()
    for side in ("before", "after"):
        assert {"samples_per_s", "step_s", "gpu_utilization", "peak_reserved_bytes", "fits"} <= data[side].keys()
    assert data["verified"] is None and data["alternatives"] and data["alternatives"][0]["step_s"] >= data["after"]["step_s"] * 0.9


def test_the_planned_yaml_loads_into_training_arguments(tmp_path: Path, model: Path) -> None:
    from transformers import TrainingArguments

    result = made(write(tmp_path, model, dataloader_num_workers=4, dataloader_prefetch_factor=4), keep=frozenset({"bf16", "tf32"}))
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    applied = result.apply(arguments)
    assert applied.per_device_train_batch_size == result.candidate.per_device_batch
    assert arguments.per_device_train_batch_size == 8


def test_bad_wishes_are_refused_in_words(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match="--allow turbo"):
        Request(allow=frozenset({"turbo"}))
    with pytest.raises(ConfigError, match="headroom"):
        Request(headroom=6)
    with pytest.raises(ConfigError, match="cannot be shared"):
        made(write(tmp_path, model, per_device_train_batch_size=1), num_gpus=4, effective_batch=6)


def test_a_model_that_is_not_neutral_keeps_its_accumulation_until_allowed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hfopt.probe.neutrality.probe", lambda job, workload: NOT_NEUTRAL)
    path = write(tmp_path, model, per_device_train_batch_size=8, gradient_accumulation_steps=4)
    kept = plan(path, Request(gpu=CARD, dry_run=False), estimator=remembered)
    assert kept.candidate.accumulation == 4 and kept.candidate.per_device_batch == 8
    assert any("another accumulation would change the gradients" in advice.title for advice in kept.facts.advice)
    assert any("would change the gradients" in rejection.reason for rejection in kept.facts.rejected)
    assert kept.facts.warnings and "\nWARNING: BertForSequenceClassification with gradient_acc" in kept.report()
    assert kept.to_json()["warnings"] == list(kept.facts.warnings)
    assert made(path).candidate.accumulation == 1 and not made(path).facts.warnings


def test_a_head_that_cannot_be_asked_is_judged_by_the_rule(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfopt.probe.neutrality.probe", lambda job, workload: None)
    monkeypatch.setattr("hfopt.planner.algorithm.grows_by_rule", lambda subject: True)
    path = write(tmp_path, model, per_device_train_batch_size=8, gradient_accumulation_steps=4)
    assert plan(path, Request(gpu=CARD, dry_run=False), estimator=remembered).candidate.accumulation == 4


@pytest.mark.slow
def test_a_trade_that_trains_something_else_is_refused_until_allowed(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfopt.probe.neutrality.probe", lambda job, workload: NOT_NEUTRAL)
    path = write(tmp_path, model, per_device_train_batch_size=8192)
    with pytest.raises(NothingFits, match="at the config's accumulation of 1") as refused:
        plan(path, Request(gpu=CARD, dry_run=False, vram_gib=1.0), estimator=remembered)
    hint = str(refused.value.hint).splitlines()
    assert refused.value.exit_code == 3 and hint[0] == "What would fit:"
    assert "hfopt run" in hint[1] and "--allow accumulation" in hint[2] and "ignores the number of items" in hint[2]
    traded = made(path, vram_gib=1.0)
    assert traded.candidate.accumulation > 1 and "--allow accumulation asks" in traded.facts.warnings[0]


def test_a_loss_over_the_batch_keeps_its_batch(tmp_path: Path, model: Path) -> None:
    path = write(tmp_path, model, per_device_train_batch_size=8, gradient_accumulation_steps=4)
    subject = from_file(path, Request(gpu=CARD, dry_run=False))
    contrastive = replace(subject, workload=replace(subject.workload, batch_dependent_loss="contrastive: test"))
    kept = plan_subject(contrastive, Request(gpu=CARD, dry_run=False), estimator=remembered)
    assert (kept.candidate.per_device_batch, kept.candidate.accumulation) == (8, 4)
    assert "contrastive: test" in kept.report(verbose=True)


def test_python_arguments_plan_like_a_file(tmp_path: Path, model: Path) -> None:
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, per_device_train_batch_size=8, gradient_accumulation_steps=4
    )
    request = Request(gpu=CARD, dry_run=False, model=str(model), seq_len=64, allow=frozenset({"accumulation"}))
    from_python = plan(arguments, request, estimator=remembered)
    from_yaml = made(write(tmp_path, model, gradient_accumulation_steps=4))
    assert from_python.candidate == from_yaml.candidate
    with pytest.raises(ConfigError, match="which model"):
        plan(arguments, Request(gpu=CARD, dry_run=False))
    with pytest.raises(ConfigError, match="cannot be planned"):
        plan(3, Request(gpu=CARD, dry_run=False))
