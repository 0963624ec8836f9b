"""A transformer by arithmetic: recognised by its published size, bounded from above, and close to its trace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hfopt.memory.counted_step import block_sizes, counted_parameters, counted_step, most_bytes
from hfopt.memory.layer_extrapolation import FEW_LAYERS, MORE_LAYERS, RoughStep, rough_step
from hfopt.memory.step_memory import estimate
from hfopt.model.from_config import from_spec
from hfopt.model.known_models import find
from hfopt.schema import BlockSizes, Checkpointing, DataSpec, Lora, ModelSpec, Quantization, StepSettings

SETTINGS = StepSettings(precision="bf16", checkpointing=Checkpointing(every_n_layers=1), optim="adamw_torch_fused", accumulation=2)


def sizes_of(name: str) -> BlockSizes | None:
    entry = find(name)
    assert entry is not None
    return block_sizes(entry)


def test_a_model_is_understood_by_its_published_size() -> None:
    for name in ("meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-8B", "mistralai/Mistral-7B-v0.1", "bert-base-uncased"):
        sizes = sizes_of(name)
        assert sizes is not None and counted_parameters(sizes).elements == sizes.parameters
    for name in ("mistralai/Mixtral-8x7B-v0.1", "allenai/OLMoE-1B-7B-0924", "albert-base-v2"):  # experts, shared blocks
        assert sizes_of(name) is None, name


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch", "length"), [("bert-base-uncased", 32, 128), ("Qwen/Qwen2.5-0.5B", 2, 1024)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_trace_takes_more_than_the_most(name: str, batch: int, length: int, precision: str) -> None:
    sizes = sizes_of(name)
    assert sizes is not None
    workload = from_spec(ModelSpec(name=name, weights_dtype="float32", attn_implementation="eager"), DataSpec(max_length=length))
    settings = replace(SETTINGS, precision=precision, checkpointing=Checkpointing(), optim="adamw_torch")
    most = most_bytes(sizes, tokens=batch * length, length=length, states=2)
    assert 0.3 * most < estimate(workload, settings).curve.peak(batch).device_bytes < most


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length"), [("meta-llama/Llama-3.1-8B", 1024), ("Qwen/Qwen2.5-7B", 4096)])
@pytest.mark.parametrize("adapted", ["whole", "lora", "qlora"])
def test_a_counted_step_is_close_to_a_traced_one(name: str, length: int, adapted: str) -> None:
    packing = Quantization(bits=4, compute_dtype="bfloat16") if adapted == "qlora" else None
    lora = None if adapted == "whole" else Lora(r=16, alpha=32, target_modules="all-linear")
    model = ModelSpec(name=name, weights_dtype="bfloat16", lora=lora, quantization=packing)
    sizes = sizes_of(name)
    assert sizes is not None
    settings = replace(SETTINGS, accumulation=2 if lora is None else 1)
    made = [from_spec(model, DataSpec(max_length=length), layers=layers) for layers in (FEW_LAYERS, MORE_LAYERS)]
    traced, counted = rough_step(made, sizes.layers, settings, 1), counted_step(sizes, model, settings, batch=1, length=length)
    assert counted is not None and counted.count.trained_bytes == pytest.approx(traced.count.trained_bytes, rel=1e-3)
    assert counted.device_bytes(settings) == pytest.approx(traced.device_bytes(settings), rel=0.05)
    assert _flops(counted) == pytest.approx(_flops(traced), rel=0.06)
    assert counted_step(sizes, model, replace(settings, precision="fp32"), batch=1, length=length) is None


def _flops(step: RoughStep) -> float:
    return sum(one.count * one.flops_slope for one in step.ops if one.kind in ("matmul", "attention"))
