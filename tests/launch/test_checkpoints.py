"""The newest checkpoint that is whole; what is cut short, empty or without its optimizer is passed over and named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hfopt.launch.supervisor import newest_whole, what_is_wrong


def saved(folder: Path, step: int) -> Path:
    """As the Trainer writes it."""
    place = folder / f"checkpoint-{step}"
    place.mkdir(parents=True)
    save_file({"a": torch.randn(7, 3), "b": torch.randn(5)}, place / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"state": torch.randn(100)}, place / name)
    (place / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return place


def cut(path: Path, bytes_left: float = 0.6) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(bytes_left * len(data))])


def test_whole_ones_are_taken_the_newest_first(tmp_path: Path) -> None:
    assert newest_whole(tmp_path / "missing").path is None
    (tmp_path / "file").touch()
    assert newest_whole(tmp_path / "file" / "below").path is None
    saved(tmp_path, 2)
    newest = saved(tmp_path, 10)
    (tmp_path / "checkpoint-12").touch()  # a file
    (tmp_path / "checkpoint-best").mkdir()
    assert newest_whole(tmp_path).path == newest and newest_whole(tmp_path).passed_over == ()


@pytest.mark.parametrize(
    ("name", "how", "said"),
    [
        ("trainer_state.json", "cut", "trainer_state.json is missing or cut short"),
        ("trainer_state.json", "gone", "trainer_state.json is missing or cut short"),
        ("trainer_state.json", "[]", "trainer_state.json names no step"),
        ("model.safetensors", "cut", "model.safetensors is cut short"),
        ("model.safetensors", "empty", "model.safetensors is cut short"),
        ("model.safetensors", "gone", "it has no weights"),
        ("optimizer.pt", "gone", "optimizer.pt is missing"),
        ("optimizer.pt", "cut", "optimizer.pt is cut short or empty"),
        ("optimizer.pt", "empty", "optimizer.pt is cut short or empty"),
        ("scheduler.pt", "gone", "scheduler.pt is missing"),
    ],
)
def test_what_is_not_whole_falls_back_to_the_one_before(name: str, how: str, said: str, tmp_path: Path) -> None:
    before, broken = saved(tmp_path, 2), saved(tmp_path, 4)
    path = broken / name
    if how == "cut":
        cut(path)
    elif how == "gone":
        path.unlink()
    else:
        path.write_text("" if how == "empty" else how)
    found = newest_whole(tmp_path)
    assert found.path == before
    assert found.passed_over == (f"checkpoint-4: {said}",)


def test_shards_and_engines_that_save_otherwise(tmp_path: Path) -> None:
    sharded = saved(tmp_path, 1)
    (sharded / "model.safetensors").rename(sharded / "model-00001-of-00002.safetensors")
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}))
    assert what_is_wrong(sharded) == "model-00002-of-00002.safetensors is missing"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    assert what_is_wrong(sharded) is None
    index.write_text("{")
    assert what_is_wrong(sharded) == "model.safetensors.index.json is cut short"
    for name in ("global_step3", "pytorch_model_fsdp_0"):
        other = tmp_path / name / "checkpoint-3"
        (other / name).mkdir(parents=True)
        (other / "trainer_state.json").write_text('{"global_step": 3}')
        assert what_is_wrong(other) is None
