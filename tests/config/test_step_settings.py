"""A config's arguments as settings of one step."""

from __future__ import annotations

from typing import Any

import pytest

from hfopt.config.settings import step_settings, trainer_settings
from hfopt.schema import Checkpointing


@pytest.mark.parametrize(
    ("args", "precision"),
    [({}, "fp32"), ({"bf16": True}, "bf16"), ({"fp16": True}, "fp16"), ({"tf32": True}, "tf32"), ({"bf16": True, "tf32": True}, "bf16")],
)
def test_precision(args: dict[str, Any], precision: str) -> None:
    assert trainer_settings(args).precision == precision


def test_what_is_not_set_has_the_trainers_default() -> None:
    from transformers import TrainingArguments

    fields = TrainingArguments.__dataclass_fields__
    settings = step_settings(trainer_settings({}), capability=(7, 5))
    assert settings.max_grad_norm == fields["max_grad_norm"].default
    assert settings.optim == fields["optim"].default
    assert settings.capability == (7, 5) and not settings.checkpointing.on


def test_what_is_set_counts() -> None:
    read = trainer_settings({"optim": "sgd", "max_grad_norm": 0.0, "label_smoothing_factor": 0.1, "torch_compile_mode": "reduce-overhead"})
    settings = step_settings(read, accumulation=4)
    assert (settings.optim, settings.max_grad_norm, settings.label_smoothing) == ("sgd", 0.0, 0.1)
    assert settings.accumulation == 4
    assert read.torch_compile, "a mode switches it on"
    assert settings.compile_mode == "reduce-overhead" and not settings.torch_compile, "a candidate says whether it compiles"


def test_checkpointing_is_off_unless_asked() -> None:
    assert not trainer_settings({"gradient_checkpointing_kwargs": {"use_reentrant": True}}).checkpointing.on
    asked = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 3, "use_reentrant": True}}
    assert trainer_settings(asked).checkpointing == Checkpointing(every_n_layers=3, use_reentrant=True)


def test_full_checkpointing_is_what_turning_it_on_would_give() -> None:
    assert trainer_settings({}).checkpointing_when_on.every_n_layers == 1
