"""A compiled step predicted from 2 and 3 layers against the whole model, compiled on the virtual GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hfopt.config.read_job import load
from hfopt.config.settings import step_settings
from hfopt.errors import DryRunError
from hfopt.memory.step_memory import estimate
from hfopt.model.from_config import from_job
from hfopt.probe.compiled_step import compiled_runs, compiled_step, why_not
from hfopt.schema import Gpu, StepSettings, TrainJob
from hfopt.units import GIB

CARD = Gpu(name="Virtual RTX 3060", vendor="nvidia", memory_bytes=12 * GIB, capability=(8, 6), sms=28, power_limit_w=170)
FACTS = (
    '"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5, '
    '"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 128'
)


def tiny(folder: Path) -> tuple[TrainJob, StepSettings]:
    (folder / "config.json").write_text("{" + FACTS + "}")
    path = folder / "train.yaml"
    path.write_text(f"model_name_or_path: {folder}\nmax_seq_length: 64\nbf16: true\nper_device_train_batch_size: 24\ntorch_compile: true\n")
    job = load(path).job
    assert job is not None
    return job, step_settings(job.settings, capability=(8, 6), multiprocessors=28)


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_a_tiny_llama_is_predicted_as_it_is_compiled(tmp_path: Path) -> None:
    job, settings = tiny(tmp_path)
    workload = from_job(job)
    eager = estimate(workload, settings)
    compiled = replace(settings, torch_compile=True)
    found = compiled_step(job, CARD, workload, compiled, eager)
    (whole,) = compiled_runs(job, CARD, compiled, [((None, 24),)])
    seen = whole["runs"][0]["peaks"][-1][0]
    assert found.curve.replay(24).allocated_bytes == pytest.approx(seen, rel=0.03)
    assert found.compiled is not None and found.compiled.launches < found.compiled.eager_launches
    assert found.compiled.graph_breaks == 0 and found.compiled.compile_s > 0
    products = {op.phase: sum(o.count * o.flops_slope for o in found.ops if o.phase == op.phase and o.kind == "matmul") for op in eager.ops}
    plain = {op.phase: sum(o.count * o.flops_slope for o in eager.ops if o.phase == op.phase and o.kind == "matmul") for op in eager.ops}
    assert products == pytest.approx(plain, rel=0.05), "a compiler leaves the products as they are"
    assert [op for op in found.ops if op.phase == "optimizer"] == [op for op in eager.ops if op.phase == "optimizer"]


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_what_cannot_be_built_there_is_said_in_one_sentence(tmp_path: Path) -> None:
    job, settings = tiny(tmp_path)
    (tmp_path / "config.json").write_text("{" + FACTS.replace('"hidden_size": 64', '"hidden_size": 65') + "}")
    with pytest.raises(DryRunError, match="Error"):
        compiled_runs(job, CARD, replace(settings, torch_compile=True), [((None, 8),)])


def test_only_an_nvidia_card_is_compiled_for() -> None:
    assert why_not(None) == why_not(replace(CARD, vendor="amd")) == "torch.compile is looked at for NVIDIA cards only"
