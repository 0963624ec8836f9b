"""Preference training: pairs, the reference beside the policy, losses that compare."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hfopt.errors import WorkloadError
from hfopt.memory.step_memory import estimate
from hfopt.model.from_config import from_spec
from hfopt.model.losses import over_the_batch
from hfopt.schema import DataSpec, Lora, ModelSpec, StepSettings

Tiny = Callable[..., str]
DATA = DataSpec(max_length=16)


def _loss(workload: Any, samples: int) -> tuple[Any, torch.Tensor]:
    model = workload.build_model()
    return model, workload.compute_loss(model, workload.make_batch(samples))


def test_dpo_holds_a_frozen_reference_and_runs_pairs(tiny: Tiny, faked: Any) -> None:
    name = tiny("llama")
    plain = from_spec(ModelSpec(name=name), DATA)
    workload = from_spec(ModelSpec(name=name), DATA, trainer="DPO")
    assert workload.parameters == plain.parameters and workload.tokens_per_sample == 32
    assert workload.make_batch(3)["input_ids"].shape == (6, 16)
    model, loss = _loss(workload, 2)
    assert sum(p.numel() for p in model.parameters()) == 2 * plain.parameters
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == plain.parameters == workload.trainable_parameters
    loss.backward()
    assert torch.isfinite(loss)
    with faked():
        model, loss = _loss(workload, 2)
        loss.backward()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())


def test_equal_pairs_and_equal_models_cost_log_two(tiny: Tiny) -> None:
    workload = from_spec(ModelSpec(name=tiny("llama", architectures=["LlamaForCausalLM"])), DATA, trainer="DPO")
    model = workload.build_model()
    model.reference_model.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("reference_model.")})
    assert workload.compute_loss is not None
    assert workload.compute_loss(model, workload.make_batch(1)).item() == pytest.approx(math.log(2), abs=1e-4)


def test_with_lora_the_model_is_its_own_reference(tiny: Tiny) -> None:
    workload = from_spec(ModelSpec(name=tiny("llama"), lora=Lora(r=4, target_modules=("q_proj",))), DATA, trainer="DPO")
    model, loss = _loss(workload, 2)
    loss.backward()
    assert not hasattr(model, "reference_model") and loss.item() == pytest.approx(math.log(2), abs=1e-5)


def test_answers_asked_for_before_cost_neither_a_reference_nor_its_pass(tiny: Tiny) -> None:
    name = tiny("llama")
    before, during = (from_spec(ModelSpec(name=name, reference=asked), DATA, trainer="DPO") for asked in (False, None))
    passes: list[Any] = []
    with torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: passes.append(module) if type(module).__name__ == "LlamaModel" else None
    ):
        model, loss = _loss(before, 2)
        assert len(passes) == 1
        _loss(during, 2)
    loss.backward()
    assert len(passes) == 3 and sum(p.numel() for p in model.parameters()) == before.parameters


def test_grpo_keeps_a_reference_for_its_kl_term_alone(tiny: Tiny) -> None:
    sizes = []
    for reference in (False, True):
        model = from_spec(ModelSpec(name=tiny("llama"), reference=reference), DATA, trainer="GRPO").build_model()
        sizes.append(sum(p.numel() for p in model.parameters()))
    assert sizes[1] == 2 * sizes[0]


def test_reward_scores_both_of_a_pair(tiny: Tiny) -> None:
    workload = from_spec(ModelSpec(name=tiny("llama")), DATA, trainer="Reward")
    assert workload.model_class == "LlamaForSequenceClassification"
    assert set(workload.make_batch(2)) == {"input_ids", "attention_mask"}
    model, loss = _loss(workload, 2)
    loss.backward()
    assert model.score.out_features == 1 and torch.isfinite(loss)


def test_a_value_head_makes_logits_too(tiny: Tiny) -> None:
    """As LLaMA-Factory's reward models do: they stand on a causal model."""
    name = tiny("llama", vocab_size=8000)  # so that the logits are the peak, whichever torch is installed
    plain, valued = (from_spec(ModelSpec(name=name, task=task), DATA, trainer="Reward") for task in (None, "causal_lm"))
    assert valued.model_class == "LlamaForCausalLM" and set(valued.make_batch(2)) == {"input_ids", "attention_mask"}
    model, loss = _loss(valued, 2)
    loss.backward()
    assert torch.isfinite(loss) and model.lm_head.weight.grad is None, "no loss asks for the logits"
    peaks = [estimate(one, StepSettings()).curve.peak(64).allocated_bytes for one in (plain, valued)]
    logits = 4 * 2 * 64 * 16 * model.config.vocab_size
    assert peaks[1] - peaks[0] > logits / 2


@pytest.mark.parametrize(("trainer", "words"), [("KTO", "KL term"), ("GRPO", "generation")])
def test_what_is_left_out_is_said(tiny: Tiny, trainer: str, words: str) -> None:
    workload = from_spec(ModelSpec(name=tiny("llama")), DATA, trainer=trainer)
    assert any(words in note for note in workload.notes)
    assert workload.make_batch(2)["input_ids"].shape == (2, 16)


def test_no_pairs_no_batch(tiny: Tiny) -> None:
    with pytest.raises(WorkloadError, match="batch of 0 pairs"):
        from_spec(ModelSpec(name=tiny("llama")), DATA, trainer="DPO").make_batch(0)


def test_layers_that_take_statistics_over_the_batch_are_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.LayerNorm(2))
    assert [name for name, _ in over_the_batch(model)] == ["1"]
