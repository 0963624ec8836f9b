"""What torch.compile needs beside torch, and the sentence when it is not there. Nothing is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hfopt.virtual import build
from hfopt.virtual.build import Torch


@pytest.fixture
def torch_beside_triton(tmp_path: Path) -> Torch:
    ptxas = tmp_path / "triton" / "backends" / "nvidia" / "bin" / "ptxas"
    ptxas.parent.mkdir(parents=True)
    ptxas.touch()
    return Torch(root=tmp_path / "torch", version="2.15.0", cuda="13.2")


@pytest.fixture
def headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    (tmp_path / "Python.h").touch()
    return tmp_path / "Python.h"


def test_with_triton_ptxas_and_headers_nothing_is_missing(torch_beside_triton: Torch, headers: Path, tmp_path: Path) -> None:
    assert build.missing(torch_beside_triton, {}) is None
    found = build.variables(torch_beside_triton, tmp_path, {})
    assert found["TRITON_LIBCUDA_PATH"] == str(tmp_path)
    assert str(tmp_path) in found["TORCHINDUCTOR_CACHE_DIR"], "what is learned on the virtual card must not reach a real one"


@pytest.mark.parametrize("gone", ["triton", "ptxas", "Python.h"])
def test_what_is_missing_is_named_and_the_run_is_eager(torch_beside_triton: Torch, headers: Path, tmp_path: Path, gone: str) -> None:
    if gone == "triton":
        (tmp_path / "triton").rename(tmp_path / "elsewhere")
    elif gone == "ptxas":
        (tmp_path / "triton" / "backends" / "nvidia" / "bin" / "ptxas").unlink()
    else:
        headers.unlink()
    sentence = build.missing(torch_beside_triton, {})
    assert sentence is not None and gone.lower() in sentence.lower()
    assert build.variables(torch_beside_triton, tmp_path, {}) == {
        "TORCHDYNAMO_DISABLE": "1",
        "HFOPT_VIRTUAL_NO_COMPILE": sentence,
    }


def test_a_ptxas_of_ones_own_is_looked_at(torch_beside_triton: Torch, headers: Path, tmp_path: Path) -> None:
    sentence = build.missing(torch_beside_triton, {"TRITON_PTXAS_PATH": str(tmp_path / "nowhere")})
    assert sentence is not None and "TRITON_PTXAS_PATH" in sentence
