"""A tiny model on disk and a job that trains it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_jobs import made_job

from hfopt.schema import DataSpec, ModelSpec, TrainJob


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    config = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
    }
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def tiny_job(tiny_model: Path) -> TrainJob:
    return made_job(
        path=None,
        section=(),
        trainer="Trainer",
        raw={"learning_rate": 1e-4, "save_strategy": "steps", "output_dir": "out"},
        model=ModelSpec(name=str(tiny_model)),
        data=DataSpec(max_length=32),
        per_device_batch=4,
        accumulation=2,
    )
