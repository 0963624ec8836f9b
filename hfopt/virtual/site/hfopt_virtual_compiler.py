"""torch.compile on the virtual GPU: Dynamo, Inductor, Triton and ptxas work as they are; what they make is loaded, launched and not run.

Compiled code runs without the values layer (hfopt_virtual_values): Dynamo would trace into it, and a compiled model does not look at
values either. Whatever Inductor learns here stays in a cache of its own (`hfopt.virtual.environment`): times of a card that computes
nothing must not choose kernels for one that does.

Kernels that a library writes in Triton and launches by itself (TRL's, liger's) are not even compiled: launching one does nothing, as with
all others, and what they read and write is allocated outside of them, by torch, so memory is counted as on a card.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

REFUSED = "HFOPT_VIRTUAL_NO_COMPILE"
"""The reason why nothing can be compiled here, where there is one (`hfopt.virtual.build`)."""


def launch_nothing(*_: Any, **__: Any) -> None:
    """In place of every launch through Triton's JIT."""


def spare_kernels(triton: ModuleType) -> None:
    """Every such kernel comes from the JIT; the autotuner would time its launches. Inductor's take another way."""
    runtime = triton.runtime
    runtime.jit.JITFunction.run = runtime.autotuner.Autotuner.run = launch_nothing


class _HostAdam:
    """In place of DeepSpeed's builder of Adam on the host, C++ that takes minutes to compile: updates do nothing, as all kernels here."""

    def load(self, *_: Any, **__: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return launch_nothing


def spare_host_adam(cpu_adam: Any) -> None:
    cpu_adam.CPUAdamBuilder = _HostAdam


def refuse() -> None:
    """What is to be compiled runs eagerly, and says why."""
    run_eagerly = torch.compile

    @functools.wraps(run_eagerly)
    def compile_loudly(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(f"virtual GPU: {os.environ[REFUSED]}; what follows runs eagerly", stacklevel=2)
        return run_eagerly(*args, **kwargs)

    torch.compile = compile_loudly


def install(eval_frame: ModuleType, values: type[TorchFunctionMode]) -> None:
    """Changes what `torch.compile` makes of a function; those that Dynamo is told to leave alone keep the values layer."""
    context: Any = eval_frame.OptimizeContext
    compile_function = context.__call__

    @functools.wraps(compile_function)
    def __call__(self: Any, function: Any) -> Any:  # noqa: N807
        compiled = compile_function(self, function)
        if isinstance(compiled, (torch.nn.Module, type)) or not callable(compiled):
            if (timed := sys.modules.get("hfopt_rehearsal_journal")) is not None:
                timed.journal.cannot_time("torch.compile")
            return compiled  # a module's call comes here by itself

        @functools.wraps(compiled)
        def without_values(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not isinstance(_get_current_function_mode(), values):
                return compiled(*args, **kwargs)
            with _pop_mode_temporarily():
                return compiled(*args, **kwargs)

        return without_values

    context.__call__ = __call__
