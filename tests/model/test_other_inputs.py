"""Batches for detection, video and time series, and what is said of state-space models and of speech that is too long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hfopt.errors import WorkloadError
from hfopt.model.from_config import from_spec
from hfopt.schema import DataSpec, ModelSpec, Workload

FAMILIES = json.loads((Path(__file__).parents[2] / "benchmarks" / "data" / "tiny_families.json").read_text())


def _tiny(folder: Path, name: str, **data: Any) -> Workload:
    (folder / "config.json").write_text(json.dumps(FAMILIES[name]))
    return from_spec(ModelSpec(name=str(folder), weights_dtype="float32"), DataSpec(**data))


def test_detection(tmp_path: Path) -> None:
    batch = _tiny(tmp_path, "detr").make_batch(2)
    assert tuple(batch["pixel_values"].shape) == (2, 3, 800, 1066), "the processor brings a photo's shorter side to 800"
    assert [tuple(target["boxes"].shape) for target in batch["labels"]] == [(10, 4)] * 2
    square = _tiny(tmp_path, "yolos", image_size=320).make_batch(3)
    assert tuple(square["pixel_values"].shape) == (3, 3, 320, 320) and "pixel_mask" not in square, "YOLOS takes no mask"


@pytest.mark.parametrize(
    ("model_type", "name", "mask"),
    [("mask2former", "Mask2FormerForUniversalSegmentation", True), ("eomt", "EomtForUniversalSegmentation", False)],
)
def test_segmentation_by_masks(tmp_path: Path, model_type: str, name: str, mask: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "architectures": [name], "num_hidden_layers": 2}))
    workload = from_spec(ModelSpec(name=str(tmp_path), num_labels=5), DataSpec(image_size=256))
    batch = workload.make_batch(3)
    assert (workload.model_class, workload.task, "pixel_mask" in batch) == (name, "semantic_segmentation", mask)
    assert [tuple(one.shape) for one in batch["mask_labels"]] == [(10, 256, 256)] * 3
    assert [tuple(one.shape) for one in batch["class_labels"]] == [(10,)] * 3
    assert any(one.what == "objects" and one.guessed for one in workload.assumed)


@pytest.mark.parametrize("name", ["videomae", "timesformer"])
def test_video(tmp_path: Path, name: str) -> None:
    assert tuple(_tiny(tmp_path, name).make_batch(2)["pixel_values"].shape) == (2, 8, 3, 112, 112)


@pytest.mark.parametrize("name", ["patchtst", "patchtst_classifier", "patchtsmixer", "informer", "time_series_transformer"])
def test_the_model_takes_a_series(tmp_path: Path, name: str) -> None:
    workload = _tiny(tmp_path, name)
    assert workload.task == "time_series"
    assert torch.isfinite(workload.build_model()(**workload.make_batch(2))["loss"])


def test_state_space_layers_without_their_kernels_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfopt.model.from_config.find_spec", lambda name: None)
    assert any("not installed" in note and "causal_conv1d" in note for note in _tiny(tmp_path, "bamba").notes)
    monkeypatch.setattr("hfopt.model.from_config.find_spec", lambda name: object())
    assert not any("not installed" in note for note in _tiny(tmp_path, "bamba").notes)


@pytest.mark.parametrize("task", [None, "seq2seq_lm"])
def test_a_transcript_over_whispers_positions(task: Any) -> None:
    with pytest.raises(WorkloadError, match="a transcript of 600 tokens is over the model's 448 target positions"):
        from_spec(ModelSpec(name="openai/whisper-tiny", task=task), DataSpec(max_target_length=600))
