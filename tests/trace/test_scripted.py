"""Models with TorchScript functions trace alike at every batch size, though the first call of such a function is a profiling one."""

from __future__ import annotations

import json
from pathlib import Path

from hfopt.memory.step_memory import estimate
from hfopt.model.from_config import from_spec
from hfopt.schema import DataSpec, ModelSpec, StepSettings


def test_deberta_is_traced(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "max_relative_positions": 16}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deberta-v2", **sizes, **relative}))
    workload = from_spec(ModelSpec(name=str(tmp_path), task="sequence_classification"), DataSpec(max_length=16))
    curve = estimate(workload, StepSettings(precision="bf16")).curve
    assert curve.peak(64).allocated_bytes > curve.peak(8).allocated_bytes
