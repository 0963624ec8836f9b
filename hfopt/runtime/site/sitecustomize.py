"""Runs first in every Python process under `hfopt run`: has each Trainer the script makes protected, then gives way to the next
sitecustomize.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib would cost every process its import
_WATCHED = "transformers.trainer"


class _AfterTrainer(importlib.abc.MetaPathFinder):
    """Once, right after transformers' Trainer was imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                from hfopt.runtime.inside import install

                install(module.Trainer)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _next_sitecustomize() -> None:
    """Python imports one sitecustomize; this one hid those behind it. It leaves the path, so that none of them finds it again."""
    entries = [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100
    behind = sys.path[entries.index(_HERE) + 1 :] if _HERE in entries else []
    sys.path[:] = [entry for entry, full in zip(sys.path, entries, strict=True) if full != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", behind)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


sys.meta_path.insert(0, _AfterTrainer())
_next_sitecustomize()
