"""Liger's fused loss in the trace: the logits are gone, the head's arithmetic is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hfopt.errors import TraceError
from hfopt.memory.step_memory import Estimate, estimate
from hfopt.model.from_config import from_spec
from hfopt.schema import DataSpec, Lora, ModelSpec, StepSettings

WIDTH, VOCABULARY, LENGTH = 64, 4096, 128
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": VOCABULARY,
}


def traced(folder: Path, *, fused: bool, lora: Lora | None = None, precision: str = "fp32") -> Estimate:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    workload = from_spec(ModelSpec(name=str(folder), lora=lora), DataSpec(max_length=LENGTH))
    return estimate(workload, StepSettings(fused_loss=fused, precision="bf16" if precision == "bf16" else "fp32"))


def head_flops(made: Estimate) -> float:
    return sum(op.count * op.flops_slope for op in made.ops if op.kind == "matmul")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_logits_never_exist_whole(tmp_path: Path, precision: str) -> None:
    batch = 32
    logits_bytes = batch * LENGTH * VOCABULARY * 4
    plain, fused = traced(tmp_path, fused=False, precision=precision), traced(tmp_path, fused=True, precision=precision)
    saved = plain.curve.peak(batch).allocated_bytes - fused.curve.peak(batch).allocated_bytes
    assert saved > logits_bytes
    assert head_flops(fused) == pytest.approx(head_flops(plain), rel=0.1)


def test_an_adapters_frozen_head_gets_no_gradient(tmp_path: Path) -> None:
    adapted = traced(tmp_path, fused=True, lora=Lora(r=4, target_modules=("q_proj",)))
    whole = traced(tmp_path, fused=True)
    assert adapted.curve.peak(4).allocated_bytes < whole.curve.peak(4).allocated_bytes
    assert head_flops(adapted) < head_flops(whole)


def test_a_head_that_is_not_plain_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="fused loss"):
        traced(tmp_path, fused=True, lora=Lora(r=4, target_modules=("lm_head",)))
