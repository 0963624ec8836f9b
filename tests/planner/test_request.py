"""What is read from a file for a plan, beyond the job itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from hfopt.planner import request
from hfopt.planner.request import Request, from_file


def test_a_misspelt_key_is_a_note_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "workload_of", lambda job: None)
    config = tmp_path / "train.yaml"
    config.write_text("model_name_or_path: m\noutput_dir: o\nper_device_train_batch_size: 16\ngradient_acumulation_steps: 4\n")
    subject = from_file(config, Request(gpu="t4"))
    assert subject.job.effective_batch == 16
    assert [note for note in subject.notes if "gradient_acumulation_steps" in note and "gradient_accumulation_steps?" in note]
    config.write_text("model_name_or_path: m\noutput_dir: o\nper_device_train_batch_size: 16\nmy_own_key: 4\n")
    assert from_file(config, Request(gpu="t4")).notes == ()
