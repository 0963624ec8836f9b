"""No secret gets into a header, wherever it stands."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import watched
from transformers import Trainer, TrainingArguments

from hfopt.monitor import run_setup
from hfopt.monitor.callback import HFGpuMonitor

SECRET = "hf_" + "Ab3" * 10


@pytest.mark.parametrize(
    "place", [{"hub_token": SECRET}, {"run_name": f"x-{SECRET}"}, {"lr_scheduler_kwargs": {"note": [SECRET], "api_key": "k"}}]
)
def test_secrets_are_left_out(place: dict[str, object], tmp_path: Path) -> None:
    text = str(run_setup.config(TrainingArguments(str(tmp_path), use_cpu=True, **place)))  # type: ignore[arg-type]
    assert SECRET not in text and "'k'" not in text
    assert "per_device_train_batch_size" in text


def test_what_only_looks_like_a_secret_stays(tmp_path: Path) -> None:
    config = run_setup.config(TrainingArguments(str(tmp_path), use_cpu=True, include_num_input_tokens_seen=True, run_name="hf_short"))
    assert config["run_name"] == "hf_short" and "include_num_input_tokens_seen" in config


class OwnLoss(Trainer):  # type: ignore[misc]
    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        return super().compute_loss(*arguments, **options)


def test_gradients_that_grow_with_the_accumulation_are_named(tmp_path: Path) -> None:
    faulty = watched.trainer(tmp_path, watched.transformers.TrainerCallback(), gradient_accumulation_steps=4)
    said = run_setup.growing_gradients(faulty, None)
    assert said is not None and said.startswith("BertForSequenceClassification with gradient_accumulation_steps 4")
    told = SimpleNamespace(facts=SimpleNamespace(warnings=("said",)))
    assert run_setup.growing_gradients(faulty, told) is None and run_setup.growing_gradients(None, None) is None
    faulty.model_accepts_loss_kwargs = False
    assert run_setup.growing_gradients(faulty, None) is None
    for changed in ({"gradient_accumulation_steps": 1}, {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 4}):
        assert run_setup.growing_gradients(watched.trainer(tmp_path, watched.transformers.TrainerCallback(), **changed), None) is None
    own = watched.trainer(tmp_path, watched.transformers.TrainerCallback(), kind=OwnLoss, gradient_accumulation_steps=4)
    assert run_setup.growing_gradients(own, None) is None


def test_the_monitor_says_so_when_training_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watched.trainer(tmp_path, HFGpuMonitor(), gradient_accumulation_steps=2, max_steps=2).train()
    assert capsys.readouterr().err.count("hfopt: warning: BertForSequenceClassification with gradient_accumulation_steps 2") == 1


def test_versions_name_what_is_installed() -> None:
    found = run_setup.versions()
    assert found["torch"] and found["transformers"] and "python" in found
