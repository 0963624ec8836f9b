"""No secret gets into a header, wherever it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import TrainingArguments

from hfopt.monitor import run_setup

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


def test_versions_name_what_is_installed() -> None:
    found = run_setup.versions()
    assert found["torch"] and found["transformers"] and "python" in found
