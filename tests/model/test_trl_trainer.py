"""TRL's own trainers around models from configs: the loss they compute, the reference they keep, the batches they make."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hfopt.errors import WorkloadError
from hfopt.facts.argument_effects import not_modelled
from hfopt.memory.step_memory import estimate
from hfopt.model.from_config import from_spec
from hfopt.model.trl_trainer import carried_trainer
from hfopt.schema import DataSpec, Lora, ModelSpec, StepSettings, Workload

pytest.importorskip("trl", reason="TRL is not installed: its 1.0 asks for a newer transformers than the oldest here")
Tiny = Callable[..., str]
DATA = DataSpec(max_length=16)


def _made(kind: str, name: str, *, data: DataSpec = DATA, lora: Lora | None = None, **arguments: Any) -> Workload:
    return from_spec(ModelSpec(name=name, lora=lora), data, trainer=kind, trl_arguments=arguments)


def _loss(workload: Workload, samples: int) -> tuple[Any, torch.Tensor]:
    model = workload.build_model()
    assert workload.compute_loss is not None
    return model, workload.compute_loss(model, workload.make_batch(samples))


def test_sft_computes_the_models_own_loss_without_its_logits(tiny: Tiny) -> None:
    workload = _made("SFT", tiny("llama"))
    model, loss = _loss(workload, 2)
    batch = workload.make_batch(2)
    assert loss.item() == pytest.approx(model(**batch).loss.item(), rel=1e-5)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert any("SFTTrainer computes it" in note for note in workload.notes)


@pytest.mark.parametrize("arguments", [{"packing": True}, {"padding_free": True}])
def test_one_row_holds_all_samples(tiny: Tiny, arguments: dict[str, Any]) -> None:
    batch = _made("SFT", tiny("llama"), data=DataSpec(max_length=16, packing=True), **arguments).make_batch(3)
    assert batch["input_ids"].shape == (1, 48) and "attention_mask" not in batch
    assert batch["position_ids"].max() == 15


def test_a_padded_batch_is_as_full_as_it_can_be(tiny: Tiny) -> None:
    batch = _made("SFT", tiny("llama")).make_batch(3)
    assert batch["attention_mask"].sum() == 3 * 16 - 1


def _reference(model: Any) -> Any:
    return getattr(model, "reference_model", None)


def test_dpo_keeps_a_reference_of_its_own(tiny: Tiny) -> None:
    workload = _made("DPO", tiny("llama"))
    assert workload.make_batch(3)["input_ids"].shape == (6, 16) and workload.tokens_per_sample == 32
    model, loss = _loss(workload, 2)
    loss.backward()
    reference = _reference(model)
    assert reference is not None and all(parameter.grad is None for parameter in reference.parameters())


@pytest.mark.parametrize(
    ("kind", "arguments", "kept"),
    [
        ("DPO", {}, True),
        ("DPO", {"precompute_ref_log_probs": True}, False),
        ("KTO", {}, True),
        ("CPO", {"loss_type": "simpo"}, False),
        ("ORPO", {}, False),
        ("GRPO", {}, False),
        ("GRPO", {"beta": 0.04}, True),
        ("RLOO", {}, True),
        ("Reward", {}, False),
    ],
)
def test_who_keeps_a_reference(tiny: Tiny, kind: str, arguments: dict[str, Any], kept: bool) -> None:
    data = DataSpec(max_length=24)
    model, loss = _loss(_made(kind, tiny("llama"), data=data, **arguments), 2)
    assert (_reference(model) is not None) is kept
    loss.backward()
    assert torch.isfinite(loss)


def test_with_lora_the_model_is_its_own_reference(tiny: Tiny) -> None:
    model, loss = _loss(_made("DPO", tiny("llama"), lora=Lora(r=4, target_modules=("q_proj",))), 2)
    assert _reference(model) is None and loss.item() == pytest.approx(math.log(2), abs=1e-5)
    assert sorted(model.peft_config) == ["default"]


def test_lengths_come_from_the_installed_config_where_none_is_stated(tiny: Tiny) -> None:
    name = tiny("llama", max_position_embeddings=4096)
    workload = from_spec(ModelSpec(name=name), DataSpec(), trainer="SFT", trl_arguments={})
    assert workload.shape.length == 1024
    assert [one.guessed for one in workload.assumed if one.what == "length"] == [True]
    workload = from_spec(ModelSpec(name=name), DataSpec(), trainer="GRPO", trl_arguments={"max_completion_length": 100})
    assert workload.shape.length == 612 and workload.make_batch(2)["completion_ids"].shape == (2, 100)
    assert any("completions of 100 tokens after prompts of 512" in note for note in workload.notes)


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_completions_of_any_length_are_traced(tiny: Tiny, kind: str) -> None:
    """Beyond a thousand numbers no values are kept, and the metrics ask which of them are NaN."""
    name = tiny("llama", max_position_embeddings=4096)
    workload = from_spec(ModelSpec(name=name), DataSpec(max_length=1300), trainer=kind, trl_arguments={"max_completion_length": 1200})
    assert estimate(workload, StepSettings(precision="bf16")).curve.peak(2).device_bytes > 0


def test_what_is_not_in_the_figures_is_said(tiny: Tiny) -> None:
    args = {"activation_offloading": True, "assistant_only_loss": True}
    notes = (*not_modelled(args, "SFT"), *_made("SFT", tiny("llama"), **args).notes)
    assert all(sum(key in note for note in notes) == 1 for key in args), "once, not twice"


def test_arguments_that_trl_refuses_end_in_its_own_sentence(tiny: Tiny) -> None:
    with pytest.raises(WorkloadError, match=r"TRL's SFTTrainer does not take these arguments: .*nonsense"):
        _made("SFT", tiny("llama"), loss_type="nonsense")


def test_a_tool_with_a_trainer_of_its_own_is_traced_by_rule(tiny: Tiny) -> None:
    model = from_spec(ModelSpec(name=tiny("llama")), DATA, trainer="DPO").build_model()
    assert carried_trainer(model) is None and _reference(model) is not None


def test_float32_weights_of_a_bfloat16_checkpoint_are_said(tiny: Tiny) -> None:
    spec = ModelSpec(name=tiny("llama", dtype="bfloat16"), weights_dtype="float32")
    assert any("the weights are float32" in note for note in from_spec(spec, DATA, trainer="SFT", trl_arguments={}).notes)


def test_nothing_of_the_process_is_changed(tiny: Tiny) -> None:
    from accelerate.state import AcceleratorState

    environment, seeded = dict(os.environ), torch.random.get_rng_state()
    shared = dict(AcceleratorState._shared_state)
    _made("SFT", tiny("llama"))
    assert dict(os.environ) == environment and dict(AcceleratorState._shared_state) == shared
    assert torch.equal(torch.random.get_rng_state(), seeded)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("ORPO", {}),
        ("CPO", {}),
        ("CPO", {"loss_type": "simpo", "cpo_alpha": 0.0}),
        ("DPO", {}),
        ("DPO", {"loss_type": ["sigmoid", "sft"]}),
    ],
)
def test_batch_is_not_traded_where_a_token_mean_is_in_the_loss(tiny: Tiny, kind: str, arguments: dict[str, Any]) -> None:
    """The real trainer's gradients of 8 × 1 and 2 × 4 differ for these alone, and only where samples are of different lengths."""
    workload = _made(kind, tiny("llama"), **arguments)
    model, compute = workload.build_model(), workload.compute_loss
    assert compute is not None
    batch = workload.make_batch(2)
    for name, tensor in batch.items():  # the first chosen completion ends early
        if name in ("chosen_labels", "chosen_attention_mask", "completion_mask"):
            tensor[0, 5:] = -100 if name == "chosen_labels" else 0
    rows = {name: len(tensor) for name, tensor in batch.items() if isinstance(tensor, torch.Tensor)}
    single = [{name: batch[name][one :: size // (size // 2)][: size // 2] for name, size in rows.items()} for one in (0, 1)]
    with torch.no_grad():
        whole, parts = compute(model, dict(batch)).item(), [compute(model, dict(part)).item() for part in single]
    differs = abs(whole - sum(parts) / 2) > 2e-5 * abs(whole)
    assert differs == (workload.batch_dependent_loss is not None), (whole, parts, workload.batch_dependent_loss)
