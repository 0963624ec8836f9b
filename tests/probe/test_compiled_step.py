"""A compiled step predicted from 2 and 3 layers against the whole model, compiled on the virtual GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from versions import needs_graded_checkpointing

from hfopt.config.read_job import load
from hfopt.config.settings import step_settings
from hfopt.errors import DryRunError
from hfopt.memory.step_memory import estimate
from hfopt.model.from_config import from_job
from hfopt.probe.compiled_step import compiled_depths, compiled_runs, compiled_step, why_not
from hfopt.schema import Checkpointing, Gpu, StepSettings, TrainJob
from hfopt.units import GIB

CARD = Gpu(name="Virtual RTX 3060", vendor="nvidia", memory_bytes=12 * GIB, capability=(8, 6), sms=28, power_limit_w=170)
FACTS = (
    '"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, '
    '"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 128'
)


EACH_SECOND = "gradient_checkpointing: true\ngradient_checkpointing_kwargs: {every_n_layers: 2}\n"


def tiny(folder: Path, more: str = "", **fields: Any) -> tuple[TrainJob, StepSettings]:
    (folder / "config.json").write_text(json.dumps({**json.loads("{" + FACTS + "}"), **fields}))
    path = folder / "train.yaml"
    common = "max_seq_length: 64\nbf16: true\nper_device_train_batch_size: 24\ntorch_compile: true\n"
    path.write_text(f"model_name_or_path: {folder}\n{common}{more}")
    job = load(path).job
    assert job is not None
    return job, step_settings(job.settings, capability=(8, 6), multiprocessors=28)


@pytest.mark.slow
@pytest.mark.virtual_gpu
@pytest.mark.parametrize(
    "more", ["", "torch_compile_mode: reduce-overhead\n", pytest.param(EACH_SECOND, marks=needs_graded_checkpointing)], ids=str.strip
)
def test_a_tiny_llama_is_predicted_as_it_is_compiled(tmp_path: Path, more: str) -> None:
    """With CUDA graphs and with every second layer checkpointed, memory was once told as half of it and less."""
    job, settings = tiny(tmp_path, more)
    workload = from_job(job)
    eager = estimate(workload, settings)
    compiled = replace(settings, torch_compile=True)
    found = compiled_step(job, CARD, workload, compiled, eager)
    (whole,) = compiled_runs(job, CARD, compiled, [((None, 24),)])
    allocated, reserved = (max(counted) for counted in zip(*whole["runs"][0]["peaks"][1:], strict=True))
    assert found.curve.replay(24).allocated_bytes == pytest.approx(allocated, rel=0.03)
    assert found.curve.replay(24).reserved_bytes >= 0.97 * reserved
    assert found.compiled is not None and found.compiled.launches < found.compiled.eager_launches
    assert found.compiled.graph_breaks == 0 and found.compiled.compile_s > 0
    products = {op.phase: sum(o.count * o.flops_slope for o in found.ops if o.phase == op.phase and o.kind == "matmul") for op in eager.ops}
    plain = {op.phase: sum(o.count * o.flops_slope for o in eager.ops if o.phase == op.phase and o.kind == "matmul") for op in eager.ops}
    assert products == pytest.approx(plain, rel=0.05), "a compiler leaves the products as they are"
    assert [op for op in found.ops if op.phase == "optimizer"] == [op for op in eager.ops if op.phase == "optimizer"]


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_attention_with_dropout_is_computed_again_where_it_is_checkpointed(tmp_path: Path) -> None:
    """Inductor wraps it, to restore the random state that it began with: such a step was not compiled at all."""
    bert = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "num_key_value_heads": None, "num_hidden_layers": 2}
    job, settings = tiny(tmp_path, "gradient_checkpointing: true\n", **bert)
    (found,) = compiled_runs(job, CARD, replace(settings, torch_compile=True), [((None, 8),)])
    costs = found["runs"][0]["costs"]
    attention = [(phase, name.rpartition("_")[2]) for phase, name, _ in costs if name.startswith("aten::_scaled_dot")]
    assert sorted(attention) == 2 * [("backward", "attention")] + 2 * [("backward", "backward")] + 2 * [("forward", "attention")]


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_tensors_that_wait_for_pythons_collector_are_counted_and_told_apart(tmp_path: Path) -> None:
    """GPT-2's loss warns of its name, which cuts its graph: the frames of that first forward stay in cycles, with its logits."""
    gpt2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "num_hidden_layers": 2, "vocab_size": 8192}
    job, settings = tiny(tmp_path, **gpt2)
    logits = 64 * 8192 * (2 + 4)  # of one sample: in bfloat16, and in float32 for the loss
    (found,) = compiled_runs(job, CARD, replace(settings, torch_compile=True), [((None, 8), (None, 16))])
    low, high = (run["uncollected_bytes"] for run in found["runs"])
    assert (high - low) / 8 == pytest.approx(logits, rel=0.1) and low >= 8 * logits
    peaks = [run["peaks"][-1][0] for run in found["runs"]]
    assert peaks[1] - high < peaks[1] - 0.9 * 16 * logits, "they are part of what is counted"


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_what_cannot_be_built_there_is_said_in_one_sentence(tmp_path: Path) -> None:
    job, settings = tiny(tmp_path, hidden_size=65)
    with pytest.raises(DryRunError, match="Error"):
        compiled_runs(job, CARD, replace(settings, torch_compile=True), [((None, 8),)])


@pytest.mark.parametrize(
    ("layers", "every", "depths"),
    [(6, 0, (2, 3)), (6, 1, (2, 3)), (6, 2, (2, 4)), (7, 2, (3, 5)), (12, 3, (3, 6)), (4, 2, None), (3, 1, None)],
)
def test_shallow_models_end_in_the_pattern_of_checkpointed_layers_as_the_whole_one(
    tmp_path: Path, layers: int, every: int, depths: tuple[int, int] | None
) -> None:
    job, _ = tiny(tmp_path, num_hidden_layers=layers)
    assert compiled_depths(from_job(job), Checkpointing(every_n_layers=every)) == depths


def test_only_an_nvidia_card_is_compiled_for() -> None:
    assert why_not(None) == why_not(replace(CARD, vendor="amd")) == "torch.compile is looked at for NVIDIA cards only"
