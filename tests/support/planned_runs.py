"""User scripts run inside this process: with what `hfopt run` puts around the Trainer, or alone."""

from __future__ import annotations

import json
import logging
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
import yaml

from hfopt.launch.attach import install
from hfopt.launch.handoff import OPTIONS, RunOptions

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of model folders and data files."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_models.models_in(folder)
    tiny_models.data_in(folder)
    return folder


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AbstractContextManager[None]]:
    """While it is entered every Trainer is made and trained as under `hfopt run`."""

    @contextmanager
    def attach(**options: Any) -> Iterator[None]:
        kind = transformers.Trainer
        with monkeypatch.context() as patch:
            patch.setenv(OPTIONS, RunOptions(**{"plan": True, **options}).to_json())
            patch.setattr(kind, "__init__", kind.__init__)
            patch.setattr(kind, "train", kind.train)
            install(kind)
            yield

    return attach


@dataclass
class Desk:
    """Runs a script of tests/support/scripts with a command line of its own."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def run(self, script: str, *words: str) -> None:
        self.monkeypatch.setattr(sys, "argv", [script, *words])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runpy.run_path(str(SCRIPTS / script), run_name="__main__")

    @staticmethod
    def loss(output: Path) -> float:
        return float(json.loads((output / "train_results.json").read_text())["train_loss"])

    @staticmethod
    def planned(output: Path) -> dict[str, Any]:
        """The planned values of the keys that changed, from the configuration that was written."""
        changes = json.loads((output / "hfopt" / "plan.json").read_text())["changes"]
        config = yaml.safe_load((output / "hfopt" / "config.yaml").read_text())
        assert all(config.get(change["key"], change["after"]) == change["after"] for change in changes)
        return {change["key"]: change["after"] for change in changes}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    handlers, verbosity = logging.root.handlers[:], transformers.logging.get_verbosity()
    threads = torch.get_num_threads()
    yield Desk(folder=tmp_path, monkeypatch=monkeypatch)
    logging.root.handlers[:] = handlers
    transformers.logging.set_verbosity(verbosity)
    torch.set_num_threads(threads)
