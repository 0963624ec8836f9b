"""Changes put onto a Trainer that exists: what it had read earlier is brought after, and half a change is taken back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hfopt.launch import apply_plan
from hfopt.launch.apply_plan import apply_changes
from hfopt.schema import Change


class Args(SimpleNamespace):
    @property
    def train_batch_size(self) -> int:
        return int(self.per_device_train_batch_size)


def trainer(**args: Any) -> Any:
    given = {"per_device_train_batch_size": 4, "gradient_checkpointing": True, "bf16": False, "fp16": False, "use_liger_kernel": False}
    more = {"torch_compile": False, "torch_compile_backend": None, "ddp_find_unused_parameters": None, "mixed_precision": "no"}
    model = SimpleNamespace(is_gradient_checkpointing=True, off=0, attention=None)
    model.gradient_checkpointing_disable = lambda: setattr(model, "is_gradient_checkpointing", False)
    model.set_attn_implementation = lambda name: setattr(model, "attention", name)
    accelerator = SimpleNamespace(ddp_handler=SimpleNamespace(find_unused_parameters=False))
    return SimpleNamespace(
        args=Args(**{**given, **more, **args}), model=model, accelerator=accelerator, _train_batch_size=4, model_accepts_loss_kwargs=True
    )


def changed(**values: Any) -> list[Change]:
    return [Change(key=key, before=None, after=value, reason="") for key, value in values.items()]


def test_checkpointing_that_is_on_is_switched_off_and_ddp_looks_for_unused_parameters_again() -> None:
    run = trainer()
    apply_changes(run, changed(gradient_checkpointing=False))
    assert run.model.is_gradient_checkpointing is False and run.accelerator.ddp_handler.find_unused_parameters is True
    stated = trainer(ddp_find_unused_parameters=False)
    apply_changes(stated, changed(gradient_checkpointing=False))
    assert stated.accelerator.ddp_handler.find_unused_parameters is False, "the user said so"


def test_the_loader_and_the_generations_follow_the_batch_and_attention_is_the_models() -> None:
    run = trainer(steps_per_generation=6)
    apply_changes(run, changed(per_device_train_batch_size=8, attn_implementation="sdpa"), divides_loss=True)
    assert (run._train_batch_size, run.args.steps_per_generation, run.model.attention) == (8, 3, "sdpa")
    assert run.model_accepts_loss_kwargs is False and not hasattr(run.args, "attn_implementation")


def test_half_a_change_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    renewed: list[bool] = []

    def renew(run: Any) -> None:
        renewed.append(run.args.bf16)
        if run.args.bf16:
            raise RuntimeError("the accelerator refuses")

    monkeypatch.setattr(apply_plan, "renew_accelerator", renew)
    run = trainer()
    with pytest.raises(RuntimeError, match="refuses"):
        apply_changes(run, changed(per_device_train_batch_size=8, bf16=True), divides_loss=True)
    assert (run.args.per_device_train_batch_size, run.args.bf16, run._train_batch_size) == (4, False, 4)
    assert run.model_accepts_loss_kwargs is True and renewed == [True, False]


def test_a_model_and_arguments_of_transformers_5_23_are_switched_under_their_new_names() -> None:
    run = trainer(activation_checkpointing=True)
    run.model.is_activation_checkpointing = True
    run.model.activation_checkpointing_disable = lambda: setattr(run.model, "is_activation_checkpointing", False)
    apply_changes(run, changed(gradient_checkpointing=False))
    assert (run.args.activation_checkpointing, run.args.gradient_checkpointing) == (False, False)
    assert run.model.is_activation_checkpointing is False and run.model.is_gradient_checkpointing is True, "the old name is left alone"
