"""TRL's SFTTrainer on images: its own loss, on batches labelled as its collator labels them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hfopt.model.from_config import from_spec
from hfopt.model.trl_trainer import trl_loss
from hfopt.schema import DataSpec, ModelSpec, Workload

pytest.importorskip("trl", reason="TRL is not installed: its 1.0 asks for a newer transformers than the oldest here")
FAMILIES = json.loads((Path(__file__).parents[2] / "benchmarks" / "data" / "tiny_families.json").read_text())


def _made(folder: Path, name: str, trainer: str = "SFT", **data: int) -> Workload:
    (folder / "config.json").write_text(json.dumps(FAMILIES[name]))
    return from_spec(ModelSpec(name=str(folder)), DataSpec(image_size=224, **data), trainer=trainer, trl_arguments={})


@pytest.mark.parametrize("name", ["qwen2_vl", "llava_next"])
def test_the_loss_is_trls_own_and_every_token_is_learned(tmp_path: Path, name: str) -> None:
    made = _made(tmp_path, name, max_length=1600)
    assert made.compute_loss is trl_loss and any("SFTTrainer computes it" in note for note in made.notes)
    batch = made.make_batch(2)
    assert torch.equal(batch["labels"] != -100, batch["attention_mask"] == 1), "placeholders of images too"
    with torch.device("cpu"):
        loss = trl_loss(made.build_model(), made.make_batch(1))
    assert torch.isfinite(loss) and loss.requires_grad


def test_a_default_length_that_cuts_images_is_said(tmp_path: Path) -> None:
    long = _made(tmp_path, "llava_next")
    assert long.shape.length is not None and long.shape.length > 1024
    assert any("set max_length: null" in note for note in long.notes)


def test_other_trainers_on_images_say_that_a_rule_is_used(tmp_path: Path) -> None:
    notes = _made(tmp_path, "qwen2_vl", "DPO", max_length=512).notes
    assert any("DPOTrainer on images is traced by a rule" in note for note in notes)
    assert not any("no TRL" in note for note in notes)
