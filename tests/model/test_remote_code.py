"""A folder that brings its own modelling code: refused unless trusted, then built like any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hfopt.errors import WorkloadError
from hfopt.model.from_config import from_spec
from hfopt.schema import DataSpec, ModelSpec

CODE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

class PlainConfig(PretrainedConfig):
    model_type = "plain-thing"
    def __init__(self, width=8, vocab_size=50, **kwargs):
        self.width, self.vocab_size = width, vocab_size
        super().__init__(**kwargs)

class PlainForSequenceClassification(PreTrainedModel):
    config_class = PlainConfig
    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.head = nn.Linear(config.width, config.num_labels)
        self.post_init()
    def _init_weights(self, module):
        pass
    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.head(self.embedding(input_ids).mean(1))
        return SequenceClassifierOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = tmp_path / "plain_model"
    path.mkdir()
    (path / "modeling_plain.py").write_text(CODE)
    auto_map = {
        "AutoConfig": "modeling_plain.PlainConfig",
        "AutoModelForSequenceClassification": "modeling_plain.PlainForSequenceClassification",
    }
    (path / "config.json").write_text(json.dumps({"model_type": "plain-thing", "width": 16, "auto_map": auto_map}))
    return str(path)


def test_it_is_refused_unless_trusted(folder: str) -> None:
    with pytest.raises(WorkloadError, match="brings its own code") as caught:
        from_spec(ModelSpec(name=folder), DataSpec())
    assert "trust_remote_code" in (caught.value.hint or "")


def test_trusted_it_is_built(folder: str) -> None:
    workload = from_spec(ModelSpec(name=folder, trust_remote_code=True), DataSpec(max_length=4))
    assert (workload.task, workload.parameters) == ("sequence_classification", 50 * 16 + 16 * 2 + 2)
    assert workload.build_model()(**workload.make_batch(3)).loss.ndim == 0


def test_a_head_its_code_lacks_is_said(folder: str) -> None:
    with pytest.raises(WorkloadError, match="no head for causal_lm"):
        from_spec(ModelSpec(name=folder, trust_remote_code=True, task="causal_lm"), DataSpec())


def test_code_that_is_missing_or_broken_is_said(folder: str) -> None:
    config = Path(folder) / "config.json"
    fields = json.loads(config.read_text())
    fields["auto_map"]["AutoModelForSequenceClassification"] = ["modeling_plain.NoSuchClass", None]
    config.write_text(json.dumps(fields))
    with pytest.raises(WorkloadError, match=r"modeling_plain\.NoSuchClass\) cannot be loaded"):
        from_spec(ModelSpec(name=folder, trust_remote_code=True), DataSpec())
    del fields["auto_map"]["AutoConfig"]
    config.write_text(json.dumps(fields))
    with pytest.raises(WorkloadError, match="names no AutoConfig in its auto_map"):
        from_spec(ModelSpec(name=folder, trust_remote_code=True), DataSpec())
