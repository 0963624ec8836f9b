"""A live loss answers the same on a stand-in of its model: where the device's numbers mean nothing, that is all there is to ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from versions import BEFORE_5

from hfopt.probe import live_neutrality
from hfopt.schema import Neutrality

SHAPE = {"vocab_size": 500, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, classes: int | None) -> None:
        self.classes = classes

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, Any]:
        ids = torch.randint(400, 500, (12,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids.clone() if self.classes is None else i % self.classes}


def model_of(kind: str) -> Any:
    return LlamaForCausalLM(LlamaConfig(**SHAPE)) if kind == "llama" else BertForSequenceClassification(BertConfig(**SHAPE, num_labels=5))


@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize("most_parameters", [10**9, 0])
def test_a_stand_in_answers_as_the_model_itself(kind: str, most_parameters: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainingArguments(str(tmp_path), gradient_accumulation_steps=4, use_cpu=True, report_to=[])
    trainer = Trainer(model_of(kind), args, train_dataset=Samples(None if kind == "llama" else 5))
    itself = live_neutrality.probe_live(trainer)
    asked: list[torch.nn.Module] = []
    noise = live_neutrality._noise
    monkeypatch.setattr(live_neutrality, "_means_nothing", lambda model: True)
    monkeypatch.setattr(live_neutrality, "_MOST_PARAMETERS", most_parameters)
    monkeypatch.setattr(live_neutrality, "_noise", lambda model: asked.append(model) or noise(model))
    # the head of transformers 4 takes no count, and the Trainer divides
    assert isinstance(itself, Neutrality) and itself.neutral == (kind == "llama" or BEFORE_5)
    assert live_neutrality.probe_live(trainer) == itself
    (stand_in,) = asked
    assert stand_in is not trainer.model and (stand_in.config.num_hidden_layers == 3) == bool(most_parameters)
    assert stand_in.config.vocab_size == 500
