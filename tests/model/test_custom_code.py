"""Models that are code: never run unasked, built everywhere when trusted, wrong code said clearly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hfopt.errors import WorkloadError
from hfopt.model.from_config import from_spec
from hfopt.schema import DataSpec, ModelSpec

CODE = """
import torch
from torch import nn

class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(8, 16, 3)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x, labels):
        features, _ = self.lstm(self.conv(x).transpose(1, 2))
        return {"loss": nn.functional.cross_entropy(self.head(features[:, -1]), labels)}

def make_batch(samples):
    return {"x": torch.zeros(samples, 8, 20), "labels": torch.zeros(samples, dtype=torch.long)}

def compute_loss(model, batch):
    return model(**batch)["loss"]

def not_a_module():
    return 3
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "audio_model.py"
    path.write_text(CODE)
    return path


def test_code_is_not_run_unasked(tmp_path: Path) -> None:
    path = tmp_path / "harm.py"
    path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(WorkloadError, match="not run unasked"):
        from_spec(ModelSpec(name=f"{path}:Model"), DataSpec())
    assert not (tmp_path / "ran").exists()


def test_a_module_of_the_users_own_becomes_a_workload(code: Path, faked: Any) -> None:
    workload = from_spec(ModelSpec(name=f"{code}:Recogniser", trust_remote_code=True), DataSpec())
    convolution, lstm, head = 16 * 8 * 3 + 16, 4 * 16 * (16 + 16 + 2), 16 * 4 + 4
    assert workload.parameters == convolution + lstm + head
    assert workload.compute_loss is not None
    assert torch.isfinite(workload.compute_loss(workload.build_model(), workload.make_batch(2)))
    with faked():
        model = workload.build_model()
        workload.compute_loss(model, workload.make_batch(3)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "words"), [("Nonesuch", "has no Nonesuch"), ("not_a_module", "returned a int, not an nn.Module")], ids=["missing", "wrong"]
)
def test_wrong_code_is_said(code: Path, name: str, words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        from_spec(ModelSpec(name=f"{code}:{name}", trust_remote_code=True), DataSpec())


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot be imported"):
        from_spec(ModelSpec(name=f"{tmp_path}/nowhere.py:Model", trust_remote_code=True), DataSpec())


def test_what_make_batch_may_not_do_is_said(code: Path) -> None:
    workload = from_spec(ModelSpec(name=f"{code}:Recogniser", trust_remote_code=True), DataSpec())
    with pytest.raises(WorkloadError, match="a batch of 0 samples cannot be made"):
        workload.make_batch(0)
    code.write_text(CODE.replace("def make_batch(samples):\n", "def make_batch(samples):\n    return torch.zeros(samples)\n"))
    with pytest.raises(WorkloadError, match="returned a Tensor, not a dict of tensors"):
        from_spec(ModelSpec(name=f"{code}:Recogniser", trust_remote_code=True), DataSpec()).make_batch(2)
