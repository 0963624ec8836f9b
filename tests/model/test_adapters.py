"""LoRA, DoRA, packed weights and freezing: counts worked out by hand, and a step on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hfopt.errors import WorkloadError
from hfopt.model.from_config import from_spec
from hfopt.schema import DataSpec, Lora, ModelSpec, Quantization

Tiny = Callable[..., str]
DATA = DataSpec(max_length=16)
HIDDEN, KEY_VALUE, LAYERS, RANK = 32, 16, 2, 4  # of the tiny llama: 4 heads of 8, 2 of them for keys and values


def _step(workload: Any) -> torch.nn.Module:
    model = workload.build_model()
    model(**workload.make_batch(2)).loss.backward()
    return model


def test_lora_trains_two_thin_matrices_per_target(tiny: Tiny, faked: Any) -> None:
    spec = ModelSpec(name=tiny("llama"), lora=Lora(r=RANK, target_modules=("q_proj", "v_proj")))
    workload = from_spec(spec, DATA)
    plain = from_spec(ModelSpec(name=spec.name), DATA)
    adapters = LAYERS * RANK * ((HIDDEN + HIDDEN) + (HIDDEN + KEY_VALUE))
    assert workload.trainable_parameters == adapters
    assert workload.parameters == plain.parameters + adapters
    assert (workload.model_class, workload.layers, workload.checkpointable) == ("LlamaForCausalLM", LAYERS, True)
    with faked():
        model = _step(workload)
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())


def test_dora_adds_a_magnitude_per_output(tiny: Tiny, faked: Any) -> None:
    name = tiny("llama")
    lora = from_spec(ModelSpec(name=name, lora=Lora(r=RANK, target_modules=("q_proj",))), DATA)
    dora = from_spec(ModelSpec(name=name, lora=Lora(r=RANK, target_modules=("q_proj",), use_dora=True)), DATA)
    assert dora.trainable_parameters == lora.trainable_parameters + LAYERS * HIDDEN
    with faked():
        _step(dora)


def test_adapters_on_half_precision_weights_are_float32(tiny: Tiny) -> None:
    model = from_spec(ModelSpec(name=tiny("llama"), weights_dtype="bfloat16", lora=Lora(target_modules="all-linear")), DATA).build_model()
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad} == {torch.bfloat16}


def test_lora_on_a_classifier_trains_its_new_head(tiny: Tiny) -> None:
    spec = ModelSpec(name=tiny("bert"), task="sequence_classification", lora=Lora(r=2, target_modules=("query",)), num_labels=3)
    head = 3 * HIDDEN + 3
    assert from_spec(spec, DATA).trainable_parameters == 3 * 2 * 2 * HIDDEN + head


def test_a_target_that_is_not_there_is_said(tiny: Tiny) -> None:
    with pytest.raises(WorkloadError, match="LoRA cannot be put on GPT2LMHeadModel"):
        from_spec(ModelSpec(name=tiny("gpt2"), lora=Lora(target_modules=("nonesuch",))), DATA)


@pytest.mark.parametrize("double_quant", [False, True])
def test_four_bit_weights_take_their_true_bytes(tiny: Tiny, faked: Any, double_quant: bool) -> None:
    how = Quantization(bits=4, double_quant=double_quant, compute_dtype="bfloat16")
    spec = ModelSpec(name=tiny("llama"), weights_dtype="bfloat16", quantization=how, lora=Lora(r=RANK, target_modules=("q_proj",)))
    workload = from_spec(spec, DATA)
    model = workload.build_model()
    weights = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEY_VALUE + 3 * HIDDEN * 64)
    packed = [parameter for parameter in model.parameters() if parameter.dtype == torch.uint8]
    assert sum(parameter.numel() for parameter in packed) == weights // 2
    scales = sum(buffer.nbytes for name, buffer in model.named_buffers() if name.endswith(".absmax"))
    assert scales == weights // 64 * (1 if double_quant else 4)
    assert workload.parameters == from_spec(ModelSpec(name=spec.name), DATA).parameters + workload.trainable_parameters
    with faked():
        fake = _step(workload)
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in fake.parameters())
    unpacked = {parameter.dtype for parameter in fake.parameters() if parameter.dtype != torch.uint8}
    assert unpacked == {torch.float32}, "embeddings, norms and the head go to float32"


def test_eight_bit_weights_take_one_byte_each(tiny: Tiny, faked: Any) -> None:
    spec = ModelSpec(name=tiny("llama"), quantization=Quantization(bits=8), lora=Lora(r=RANK, target_modules=("q_proj",)))
    workload = from_spec(spec, DATA)
    with faked():
        model = _step(workload)
    bytes_packed = sum(parameter.nbytes for parameter in model.parameters() if parameter.dtype == torch.int8)
    assert bytes_packed == LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEY_VALUE + 3 * HIDDEN * 64)


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_packed_models_train_for_real(tiny: Tiny, use_dora: bool) -> None:
    for how in (Quantization(bits=4), Quantization(bits=4, double_quant=True), Quantization(bits=8)):
        lora = Lora(target_modules=("q_proj",), use_dora=use_dora)
        workload = from_spec(ModelSpec(name=tiny("llama"), quantization=how, lora=lora), DATA)
        model = workload.build_model()
        loss = model(**workload.make_batch(2)).loss
        loss.backward()
        assert torch.isfinite(loss)
        assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"quantization": Quantization(bits=4)}, "packed and there is no adapter"),
        ({"frozen": ("model", "lm_head")}, "everything is frozen"),
        ({"lora": Lora(r=0)}, "must be at least 1"),
    ],
    ids=["packed alone", "all frozen", "rank 0"],
)
def test_what_cannot_train_is_refused(tiny: Tiny, spec: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        from_spec(ModelSpec(name=tiny("llama"), **spec), DATA)


def test_frozen_modules_do_not_train(tiny: Tiny) -> None:
    name = tiny("bert")
    whole = from_spec(ModelSpec(name=name, task="sequence_classification"), DATA)
    part = from_spec(ModelSpec(name=name, task="sequence_classification", frozen=("embeddings", "bert.encoder.layer.0")), DATA)
    model = part.build_model()
    still = {parameter_name for parameter_name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert all(name.startswith(("bert.embeddings.", "bert.encoder.layer.0.")) for name in still) and still
    assert part.trainable_parameters == whole.parameters - sum(p.numel() for p in model.parameters() if not p.requires_grad)


def test_freezing_what_is_not_there_is_said(tiny: Tiny) -> None:
    with pytest.raises(WorkloadError, match="no module 'encoderr' to freeze") as caught:
        from_spec(ModelSpec(name=tiny("bert"), frozen=("encoderr",)), DATA)
    assert "bert.encoder" in (caught.value.hint or "")
