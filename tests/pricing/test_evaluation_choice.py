"""The first evaluation in a plan: how it is read, and the batch and eval_accumulation_steps it gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hfopt import plan
from hfopt.errors import NothingFits
from hfopt.job.request import Request
from hfopt.job.subject import from_file
from hfopt.planner.result import Plan
from hfopt.pricing.evaluation_choice import read_evaluation

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 20000, "n_positions": 256}
BASE = {
    "max_length": 128,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "eval_strategy": "steps",
    "output_dir": "out",
}


def written(folder: Path, **more: Any) -> Path:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps({**GPT2, "architectures": ["GPT2LMHeadModel"]}))
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump({"model_name_or_path": str(folder / "model"), **BASE, **more}))
    return path


def reading(folder: Path, **more: Any) -> Any:
    return read_evaluation(from_file(written(folder, **more), Request(gpu="t4")))


def planned(folder: Path, *, vram_gib: float = 4.0, **more: Any) -> Plan:
    return plan(written(folder, **more), Request(vram_gib=vram_gib, dry_run=False, charts=False))


def after(made: Plan) -> dict[str, Any]:
    return {change.key: change.after for change in made.facts.changes}


def test_what_a_yaml_does_not_say_is_said(tmp_path: Path) -> None:
    loss_only = reading(tmp_path)
    assert not loss_only.settings.keeps_predictions and "no metric is named" in loss_only.assumed[0].value
    assert loss_only.assumed[0].guessed and "eval_accumulation_steps" in loss_only.notes[0]
    named = reading(tmp_path, metric_for_best_model="accuracy")
    assert named.settings.keeps_predictions and named.settings.samples == 1000
    assert not named.notes and "metric_for_best_model: accuracy" in named.assumed[0].value
    assert (named.assumed[1].value, named.assumed[1].guessed, named.assumed[1].settle) == ("1000 samples", True, "max_eval_samples")
    known = reading(tmp_path, metric_for_best_model="accuracy", max_eval_samples=77)
    assert known.settings.samples == 77 and known.assumed[1].value == "77 samples" and not known.assumed[1].guessed
    assert not reading(tmp_path, metric_for_best_model="eval_loss").settings.keeps_predictions
    assert not reading(tmp_path, metric_for_best_model="f1", prediction_loss_only=True).settings.keeps_predictions
    assert reading(tmp_path, eval_strategy="no") is None


def test_generation_and_trl(tmp_path: Path) -> None:
    writes = reading(tmp_path, predict_with_generate=True, generation_max_length=48, generation_num_beams=2).settings
    assert (writes.generation.max_length, writes.generation.beams) == (48, 2)
    assert not reading(tmp_path, packing=True, metric_for_best_model="loss").settings.keeps_predictions


def test_the_batch_comes_from_the_evaluations_own_trace(tmp_path: Path) -> None:
    made = planned(tmp_path, per_device_eval_batch_size=4)
    assert after(made)["per_device_eval_batch_size"] == 16, "twice the training's"
    evaluation = made.facts.after.evaluation
    assert evaluation is not None and evaluation.fits and evaluation.batch == 16
    assert "first evaluation" in made.report(verbose=True)
    assert "evaluation of the loss alone" in " ".join(made.report().split()).partition("Changes")[0], "among the assumptions"
    assert any(one["what"] == "evaluation" and one["guessed"] for one in made.to_json()["assumed"])
    assert made.to_json()["after"]["evaluation"]["per_device_eval_batch_size"] == 16


def test_an_evaluation_batch_above_the_training_limit_stays(tmp_path: Path) -> None:
    made = planned(tmp_path, vram_gib=1.4, per_device_eval_batch_size=24, per_device_train_batch_size=24)
    assert after(made)["per_device_train_batch_size"] < 24 and "per_device_eval_batch_size" not in after(made)
    assert made.facts.after.evaluation is not None and made.facts.after.evaluation.batch == 24


def test_predictions_that_do_not_fit_are_moved_to_the_host(tmp_path: Path) -> None:
    made = planned(tmp_path, metric_for_best_model="accuracy", max_eval_samples=1000)
    steps = after(made)["eval_accumulation_steps"]
    assert 1 <= steps < 125 and "per_device_eval_batch_size" not in after(made)
    before, now = made.facts.before, made.facts.after
    assert not before.fits and before.evaluation is not None and not before.evaluation.fits, "part of what fits"
    assert now.evaluation is not None and now.evaluation.fits and now.evaluation.accumulation_steps == steps
    assert f"eval_accumulation_steps: {steps}" in made.to_yaml()
    reason = next(change.reason for change in made.facts.changes if change.key == "eval_accumulation_steps")
    assert "1000 samples leave 9.54 GiB" in reason


def test_an_evaluation_batch_too_large_for_the_card_is_lowered(tmp_path: Path) -> None:
    made = planned(tmp_path, per_device_eval_batch_size=512)
    assert after(made)["per_device_eval_batch_size"] < 512
    assert made.facts.after.evaluation is not None and made.facts.after.evaluation.fits


def test_a_kept_evaluation_batch_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(NothingFits, match="the first evaluation at batch 512 needs"):
        plan(written(tmp_path, per_device_eval_batch_size=512), vram_gib=4.0, keep=frozenset({"per_device_eval_batch_size"}), dry_run=False)
