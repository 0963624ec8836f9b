"""Runs first in every Python process on the virtual GPU: prepares torch, then gives way to the user's own sitecustomize."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib would cost every process its import


def after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Calls `act(module)` once, right after the module of that name was imported."""

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(
            self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
        ) -> importlib.machinery.ModuleSpec | None:
            if fullname != name:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(fullname)
            if spec is not None and spec.loader is not None:
                load = spec.loader.exec_module

                def exec_module(module: ModuleType) -> None:
                    load(module)
                    act(module)

                spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, Finder())


def _after_torch(_torch: ModuleType) -> None:
    if os.environ.get("HFOPT_VIRTUAL_VALUES", "1") != "0":
        importlib.import_module("hfopt_virtual_values").install()
    importlib.import_module("hfopt_virtual_kernels").choose()
    if "HFOPT_REHEARSAL" in os.environ:
        recorder = importlib.import_module("hfopt_rehearsal").install()
        follow = importlib.import_module("hfopt_rehearsal_trainer").install
        after_import("transformers.trainer", lambda module: follow(module, recorder))


def _run_the_users_own() -> None:
    """Python imports one sitecustomize; this one hid the next on the path."""
    path = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


after_import("torch", _after_torch)
_run_the_users_own()
