"""The prepared model against the one that the installed Trainer trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from versions import needs_graded_checkpointing

from hfopt.errors import TraceError
from hfopt.memory.step_memory import estimate
from hfopt.model.from_config import from_spec
from hfopt.schema import Checkpointing, DataSpec, ModelSpec, StepSettings, Workload
from hfopt.trace.tracer import prepared, tracer_of
from hfopt.trace.trainer_step import trainer_script

Make = Callable[..., Workload]
EACH_SECOND = StepSettings(checkpointing=Checkpointing(every_n_layers=2))


def _checkpointed(model: Any) -> list[bool]:
    return [layer.gradient_checkpointing for layer in model.transformer.h]


@needs_graded_checkpointing
def test_the_trainer_checkpoints_the_layers_that_are_traced(tiny_gpt2: Make, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    workload = tiny_gpt2(length=4, n_layer=4, vocab_size=100, bos_token_id=0, eos_token_id=0)
    model = workload.build_model()
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False, "every_n_layers": 2},
        max_steps=1,
        per_device_train_batch_size=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    samples: Any = [0, 1]
    Trainer(model=model, args=arguments, train_dataset=samples, data_collator=lambda _: workload.make_batch(1)).train()
    assert _checkpointed(prepared(workload, EACH_SECOND)()) == _checkpointed(model) == [True, False, True, False]


@needs_graded_checkpointing
def test_each_second_layer_lies_halfway_between_none_and_all(tiny_gpt2: Make) -> None:
    workload = tiny_gpt2(n_layer=4, vocab_size=100, bos_token_id=0, eos_token_id=0)
    none, second, every = (
        estimate(workload, StepSettings(checkpointing=Checkpointing(every_n_layers=n))).curve.peak(64).allocated_bytes for n in (0, 2, 1)
    )
    assert every < second < none
    assert (second - every) / (none - every) == pytest.approx(0.5, abs=0.2)  # two of the four layers keep what they computed


def test_a_transformers_without_it_is_named(tiny_gpt2: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedModel

    def enable(self: Any, gradient_checkpointing_kwargs: Any = None) -> None:
        """As it was before 5.22."""

    monkeypatch.delattr(PreTrainedModel, "activation_checkpointing_enable", raising=False)
    monkeypatch.setattr(PreTrainedModel, "gradient_checkpointing_enable", enable)
    with pytest.raises(TraceError, match=r"cannot checkpoint every n-th layer \(n = 2\)"):
        prepared(tiny_gpt2(), EACH_SECOND)()


def test_reentrant_checkpointing_over_frozen_embeddings_has_gradients_to_pass_on(tiny_gpt2: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedModel

    plain = getattr(PreTrainedModel, "activation_checkpointing_enable", PreTrainedModel.gradient_checkpointing_enable)

    def enable(self: Any, gradient_checkpointing_kwargs: Any = None) -> None:
        """As it was before 5: the embeddings are left alone."""
        plain(self, gradient_checkpointing_kwargs)
        if getattr(self, "_require_grads_hook", None) is not None:
            self.disable_input_require_grads()

    monkeypatch.setattr("hfopt.trace.tracer.enable_checkpointing", lambda model, options: enable(model, dict(options)))
    reentrant = StepSettings(checkpointing=Checkpointing(every_n_layers=1, use_reentrant=True))
    workload = tiny_gpt2()
    frozen = replace(workload, build_model=lambda: without_embeddings(workload.build_model()))
    model = prepared(frozen, reentrant)()
    ids = torch.ones(1, 4, dtype=torch.long)
    assert model.get_input_embeddings()(ids).requires_grad
    assert not prepared(frozen, StepSettings())().get_input_embeddings()(ids).requires_grad


def without_embeddings(model: Any) -> Any:
    model.get_input_embeddings().requires_grad_(False)
    return model


@needs_graded_checkpointing
def test_each_trace_begins_with_the_layers_that_the_trainer_checkpoints(tmp_path: Path) -> None:
    """After a reference's forward TRL checkpoints every layer: the next trace of the same model is a first step again."""
    pytest.importorskip("trl", reason="TRL is not installed: its 1.0 asks for a newer transformers than the oldest here")
    fields = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 100, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    workload = from_spec(ModelSpec(name=str(tmp_path)), DataSpec(max_length=16), trainer="DPO", trl_arguments={})
    with tracer_of(workload, EACH_SECOND) as tracer:
        script = trainer_script(EACH_SECOND, workload.compute_loss)
        counts = [len(tracer.record(script, batch).events) for batch in (2, 4)]
        layers = [layer.gradient_checkpointing for layer in tracer.model.model.layers]
    assert all(layers), "TRL keeps every_n_layers now: what is put back here has no use any more"
    assert counts[0] == counts[1]


def test_a_workload_of_kept_facts_is_made_before_its_trace(tiny_gpt2: Make) -> None:
    """What its processor makes once, with real values, is then not made of fake tensors."""
    own, made = tiny_gpt2(length=4, vocab_size=100), list[Workload]()

    def remake() -> Workload:
        if not made:
            sample = torch.ones(1, 4, dtype=torch.long)
            batch = {"input_ids": sample, "attention_mask": sample.clone(), "labels": sample.clone()}
            made.append(replace(own, make_batch=lambda size: {name: value.repeat(size, 1) for name, value in batch.items()}))
        return made[0]

    kept = replace(own, build_model=lambda: remake().build_model(), make_batch=lambda size: remake().make_batch(size), remake=remake)
    assert estimate(kept, StepSettings()).curve.peak(8) == estimate(remake(), StepSettings()).curve.peak(8)
    assert {type(value) for value in kept.make_batch(2).values()} == {torch.Tensor}
