"""Runs first in every Python process below `hfopt run` or on the virtual GPU, then gives way to the next sitecustomize.

What it does is said by the environment: HFOPT_HANDOFF has each Trainer that the script makes protected, HFOPT_VIRTUAL_STATE prepares torch
for a card that computes nothing. Both wait for the module they are about, so a process without it pays nothing.
"""

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
    """Calls `act(module)` once, right after the module of that name was imported; only being looked for does not count."""

    class Finder(importlib.abc.MetaPathFinder):
        looking = False

        def find_spec(
            self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
        ) -> importlib.machinery.ModuleSpec | None:
            if fullname != name or self.looking:
                return None
            self.looking = True
            try:
                spec = importlib.util.find_spec(fullname)
            finally:
                self.looking = False
            if spec is not None and spec.loader is not None:
                load = spec.loader.exec_module

                def exec_module(module: ModuleType) -> None:
                    sys.meta_path.remove(self)
                    load(module)
                    act(module)

                spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, Finder())


class OnlyHfopt(importlib.abc.MetaPathFinder):
    """Asked last, for a Python that has no hfopt: its folder on the path would bring all that is installed beside it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.PathFinder.find_spec(fullname, [os.environ["HFOPT_HOME"]]) if fullname == "hfopt" else None


def _protect(trainer_module: ModuleType) -> None:
    from hfopt.launch.attach import install

    install(trainer_module.Trainer)


def _make_virtual(torch: ModuleType) -> None:
    compiler = importlib.import_module("hfopt_virtual_compiler")
    if os.environ.get("HFOPT_VIRTUAL_VALUES", "1") != "0":
        values = importlib.import_module("hfopt_virtual_values")
        values.install()
        if compiler.REFUSED in os.environ:
            compiler.refuse()
        else:
            after_import("torch._dynamo.eval_frame", lambda module: compiler.install(module, values.TrueValues))
    importlib.import_module("hfopt_virtual_objects").install()
    torch.cuda._lazy_call(importlib.import_module("hfopt_virtual_kernels").choose)  # asked now, no fork could use the card any more
    after_import("triton", lambda module: compiler.spare_kernels(module))
    after_import("deepspeed.ops.adam.cpu_adam", lambda module: compiler.spare_host_adam(module))
    if "HFOPT_REHEARSAL" in os.environ:
        recorder = importlib.import_module("hfopt_rehearsal").install()
        follow = importlib.import_module("hfopt_rehearsal_trainer").install
        after_import("transformers.trainer", lambda module: follow(module, recorder))


def _next_sitecustomize() -> None:
    """Python imports one sitecustomize; this one hid those behind it. It leaves the path, so that none of them finds it again."""
    entries = [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100
    behind = [entry for entry in entries[entries.index(_HERE) + 1 :] if entry != _HERE] if _HERE in entries else []
    sys.path[:] = [entry for entry, full in zip(sys.path, entries, strict=True) if full != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", behind)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if "HFOPT_HOME" in os.environ:
    sys.meta_path.append(OnlyHfopt())
if "HFOPT_HANDOFF" in os.environ:
    after_import("transformers.trainer", _protect)
if "HFOPT_VIRTUAL_JOURNAL" in os.environ and (clock := importlib.import_module("hfopt_rehearsal_clock").clock) is not None:
    clock.show()
if "HFOPT_VIRTUAL_STATE" in os.environ:
    after_import("torch", _make_virtual)
_next_sitecustomize()
