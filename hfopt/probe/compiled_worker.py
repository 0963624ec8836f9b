"""The child of a compiled estimate: a few of the Trainer's compiled steps on the virtual GPU, and what the allocator noted of them.

Started by compiled_step.py through `dry_run_worker`; reads FOLDER/order.pickle, writes FOLDER/steps.json. The
kernels are written by Inductor and not made (`compat.torch_patches`): nothing would run them.

The first step of each run is eager, so that what a model decides in its first forward (BERT's kind of problem) costs no second compile.
Where the order asks how often a run compiles, Dynamo alone traces two more steps, the first one too: counting needs no Inductor.

A compile may leave tensors in cycles (of a graph that is cut, the frames of the functions around the cut), which live until Python's
collector next looks at old objects: in one run at once, in another after hundreds of steps. Here they stay, and are counted at the end.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import pickle
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from hfopt.compat.torch_patches import FusedKernel, compilations, forget_compiled, kernels_unmade
from hfopt.errors import HfoptError
from hfopt.model.from_config import from_job
from hfopt.probe.compiled_step import CompileOrder
from hfopt.probe.dry_run import COMPILE_ORDER, Extent
from hfopt.probe.training_steps import CudaMeter, MeasuredSteps, Order, brief, build_on, make_trainer
from hfopt.schema import Workload
from hfopt.trace.op_cost import Cost, cost

MOST_EVENTS = 10_000_000
Costs = list[tuple[str, str, Cost]]


class _Log:
    """The moments of one run, and the kernels of the micro-batch that launched most: one that replays a CUDA graph launches none."""

    def __init__(self) -> None:
        self.moments: list[tuple[str, int]] = []
        self.costs: Costs = []
        self._noted: Costs = []
        self.peaks: list[tuple[int, int]] = []
        self.cpu_s: list[float] = []
        self.uncollected_bytes = 0
        self.phase: str | None = None  # None: kernels are not noted

    def begin(self, what: str) -> None:
        self.moments.append((what, _events_so_far()))

    def note_kernels(self) -> None:
        self._noted, self.phase = [], "forward"

    def end_of_kernels(self) -> None:
        self.phase = None
        if len(self._noted) >= len(self.costs):
            self.costs = self._noted

    def launched(self, kernel: FusedKernel) -> None:
        if self.phase is not None:
            kind: Any = "reduction" if kernel.reduces else "elementwise"
            self._noted.append((self.phase, kernel.name, Cost(kind, kernel.flops, kernel.moved_bytes, kernel.dtype)))

    def called(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        made = cost(func, args, kwargs, out) if self.phase is not None else None
        if made is not None and self.phase is not None:
            self._noted.append((self.phase, func.name(), made))


class _Calls(TorchDispatchMode):  # type: ignore[misc]
    """torch's own kernels inside of a compiled graph: products, attention, convolutions; with dropout in them, those that a checkpointed
    graph runs again come wrapped, with the random state that they began with."""

    supports_higher_order_operators = True

    def __init__(self, log: _Log) -> None:
        super().__init__()
        self._log = log

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.HigherOrderOperator):
            place = next((index for index, one in enumerate(args) if isinstance(one, torch._ops.OpOverload)), None)
            if place is None:
                return out
            func, args = args[place], args[place + 1 :]
            kwargs = {key: value for key, value in (kwargs or {}).items() if key != "rng_state"}
        self._log.called(func, args, kwargs or {}, out)
        return out


def _events_so_far() -> int:
    stats = torch.cuda.memory_stats()
    return int(stats["allocation.all.allocated"]) + int(stats["allocation.all.freed"])


def _collected_bytes() -> int:
    """Of tensors that nothing but Python's cycle collector gives back, and that now are."""
    before = torch.cuda.memory_allocated()
    gc.unfreeze()
    gc.collect()
    return int(before - torch.cuda.memory_allocated())


class _Moments(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, log: _Log, steps: int) -> None:
        self._log, self._steps = log, steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        gc.collect()
        gc.disable()
        self._log.begin("step")
        self._log.cpu_s.append(time.process_time())
        torch.compiler.set_stance("force_eager")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            torch.compiler.set_stance("default")
            gc.collect()
            torch.cuda.empty_cache()  # what the eager step reserved is not the compiled ones'
        elif state.global_step == 2:
            gc.freeze()  # what compiling left behind stays to the end, what a step leaves is collected as ever
            gc.enable()
        self._log.peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
        torch.cuda.reset_peak_memory_stats()
        self._log.cpu_s.append(time.process_time())
        self._log.begin("step" if state.global_step < self._steps else "end")
        if state.global_step == self._steps:
            self._log.uncollected_bytes = _collected_bytes()


def _watched(trainer: Any, log: _Log, first_measured: int) -> None:
    """Notes where forward, backward and update begin."""
    step, backward = trainer.training_step, trainer.accelerator.backward

    def training_step(*args: Any, **kwargs: Any) -> Any:
        log.begin("forward")
        if trainer.state.global_step >= first_measured:
            log.note_kernels()
        loss = step(*args, **kwargs)
        if log.phase is not None:
            log.end_of_kernels()
        log.begin("optimizer")
        return loss

    def backwards(*args: Any, **kwargs: Any) -> Any:
        log.begin("backward")
        log.phase = "backward" if log.phase is not None else None
        return backward(*args, **kwargs)

    trainer.training_step, trainer.accelerator.backward = training_step, backwards


def _run(order: CompileOrder, workload: Workload, batch: int, output: Path) -> dict[str, Any]:
    forget_compiled()
    log = _Log()
    log.begin("run")
    with kernels_unmade(log.launched, lambda: _Calls(log)):
        model = build_on(workload, "virtual")
        log.begin("built")
        choice = dataclasses.replace(order.candidate, per_device_batch=batch), None
        asked = Order(job=order.job, device="virtual", extent=Extent(steps=order.steps))
        trainer = make_trainer(workload, model, asked, choice, output, MeasuredSteps(CudaMeter()))
        trainer.add_callback(_Moments(log, order.steps))
        _watched(trainer, log, order.first_measured)
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
    steady_s = log.cpu_s[-1] - log.cpu_s[-2]
    return {
        "batch": batch,
        "layers": workload.layers,
        "moments": log.moments,
        "costs": [(phase, name, dataclasses.astuple(one)) for phase, name, one in log.costs],
        "peaks": log.peaks,
        "uncollected_bytes": log.uncollected_bytes,
        "compile_s": max(0.0, log.cpu_s[-3] - log.cpu_s[0] - (order.steps - 2) * steady_s),
    }


def _counted(order: CompileOrder, workload: Workload, batch: int, output: Path) -> dict[str, int]:
    """How many graphs a run compiles, and at how many places they are cut."""
    forget_compiled()
    job = dataclasses.replace(order.job, raw={**order.job.raw, "torch_compile_backend": "eager", "torch_compile_mode": None})
    asked = Order(job=job, device="virtual", extent=Extent(steps=2))
    choice = dataclasses.replace(order.candidate, per_device_batch=batch), None
    make_trainer(workload, build_on(workload, "virtual"), asked, choice, output, MeasuredSteps(CudaMeter())).train()
    graphs, breaks = compilations()
    return {"graphs": graphs, "graph_breaks": breaks}


def _runs(order: CompileOrder, output: Path) -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise HfoptError("there is no virtual GPU in this process")
    torch.cuda.memory._record_memory_history(context=None, max_entries=MOST_EVENTS)
    whole = from_job(order.job)
    found: list[dict[str, Any]] = []
    counted: dict[str, int] = {}
    for layers, batch in order.runs:
        workload = whole if layers is None or whole.with_layers is None else whole.with_layers(layers)
        assert workload is not None, "the parent has built it at this depth"
        found.append(_run(order, workload, batch, output))
        if order.counts_compilations and not counted:
            counted = _counted(order, workload, batch, output)
        gc.collect()
        torch.cuda.empty_cache()
    return {"events": _events(torch.cuda.memory._snapshot()["device_traces"][0]), "runs": found, **counted}


def _events(history: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """(address, bytes or -1) of every block that was taken or given back."""
    sizes: dict[str, Callable[[dict[str, Any]], int]] = {"alloc": lambda one: int(one["size"]), "free_requested": lambda one: -1}
    return [(int(one["addr"]), sizes[one["action"]](one)) for one in history if one["action"] in sizes]


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    order: CompileOrder = pickle.loads((folder / COMPILE_ORDER).read_bytes())
    try:
        facts = _runs(order, folder / "output")
    except Exception as error:  # the parent tells it in one sentence; the traceback stays in its log
        (folder / "steps.json").write_text(json.dumps({"error": f"{type(error).__name__}: {brief(error)}"}))
        raise
    (folder / "steps.json").write_text(json.dumps(facts))
