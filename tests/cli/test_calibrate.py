"""`hfopt calibrate` as it is run, on the CPU for real: measured, kept, used by a plan, shown and cleared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hfopt.speed.calibration import from_json

MODEL = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 32, "num_hidden_layers": 1}


def hfopt(cache: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "hfopt", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)


def test_nothing_kept_is_said_and_options_that_exclude_each_other(tmp_path: Path) -> None:
    shown = hfopt(tmp_path, "calibrate", "--show")
    assert shown.returncode == 0 and shown.stdout == "" and "nothing is kept" in shown.stderr
    assert hfopt(tmp_path, "calibrate", "--show", "--json").stdout == "[]\n"
    assert "0 calibrations removed" in hfopt(tmp_path, "calibrate", "--clear").stderr
    both = hfopt(tmp_path, "calibrate", "--show", "--clear")
    assert both.returncode == 2 and "exclude each other" in both.stderr


@pytest.mark.slow
def test_this_cpu_is_measured_and_a_plan_uses_it(tmp_path: Path) -> None:
    made = hfopt(tmp_path, "calibrate", "--json")
    assert made.returncode == 0, made.stderr
    row = from_json(made.stdout)
    assert row is not None and row.kind == "cpu" and row.step_scale is not None and row.trainer_step_s is not None
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}))
    config = tmp_path / "train.yaml"
    config.write_text(f"model_name_or_path: {tmp_path}\nmax_length: 16\noutput_dir: o\nper_device_train_batch_size: 4\nuse_cpu: true\n")
    planned = hfopt(tmp_path, "plan", config, "--verbose", "--no-dry-run")
    assert planned.returncode == 0 and f"speeds of {row.device} as `hfopt calibrate` measured this CPU" in planned.stderr, planned.stderr
    assert "used in plans for it" in hfopt(tmp_path, "calibrate", "--show").stdout
    assert "1 calibration removed" in hfopt(tmp_path, "calibrate", "--clear").stderr
