"""One model on fake tensors, prepared as the Trainer prepares it and ready to be stepped.

The model as the Trainer prepares it: attention implementation, checkpointing and training mode put in when it is built. One model on fake
tensors, ready to be stepped: builds it without weights, moves it as `.to("cuda")` would, records what a script does. A script is a callable
that runs steps on the session; `trainer_step` holds the Trainer's, a benchmark may bring its own loop.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import CellType
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hfopt.compat.torch_patches import lists_of_scalars, swaps_allowed, unvalidated_distributions
from hfopt.compat.transformers_patches import (
    assignments_by_shape,
    checkpoints_every_n_layers,
    enable_checkpointing,
    let_gradients_through,
    masks_read,
    quietly,
    trainer_turns_cache_off,
)
from hfopt.compat.versions import package_version
from hfopt.errors import TraceError
from hfopt.model.loading import card_loads
from hfopt.model.stored_workload import whole
from hfopt.schema import StepSettings, Workload
from hfopt.trace.cuda_choices import cuda_rules, grouped_windows
from hfopt.trace.events import Kernels, Trace
from hfopt.trace.fake_tensors import FastFake, Values, attach
from hfopt.trace.fused_head import tiled_heads
from hfopt.trace.liger import use_liger
from hfopt.trace.op_cost import cost
from hfopt.trace.recorder import CostFunction, ModuleNames, Recorder, at_work


def prepared(workload: Workload, settings: StepSettings) -> Callable[[], Any]:
    """A build function for the tracer; kept facts are made whole before it: within it their batches would be made of fake tensors."""
    workload = whole(workload)

    def build() -> Any:
        model = workload.build_model()
        if settings.attn_implementation is not None and hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation(settings.attn_implementation)
        _set_cache(model)
        _set_checkpointing(model, settings)
        if settings.fused_loss and not use_liger(model, settings):
            raise TraceError(f"the head of {type(model).__name__} is not one that liger's fused loss can take over")
        return model.train()

    return build


def _set_cache(model: Any) -> None:
    if trainer_turns_cache_off() and hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False


def _set_checkpointing(model: Any, settings: StepSettings) -> None:
    checkpointing = settings.checkpointing
    if not checkpointing.on or settings.sharding_recomputes:
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise TraceError(
            f"{type(model).__name__} does not support gradient checkpointing", hint="leave gradient_checkpointing off for this model"
        )
    graded: dict[str, int] = {}
    if checkpointing.every_n_layers > 1:
        _require_grades(checkpointing.every_n_layers)
        graded["every_n_layers"] = checkpointing.every_n_layers
    enable_checkpointing(model, {"use_reentrant": checkpointing.use_reentrant}, **graded)
    if checkpointing.use_reentrant:
        let_gradients_through(model)


def _require_grades(every_n_layers: int) -> None:
    if not checkpoints_every_n_layers():
        raise TraceError(
            f"transformers {package_version('transformers')} cannot checkpoint every n-th layer (n = {every_n_layers})",
            hint="remove every_n_layers from gradient_checkpointing_kwargs, or install transformers 5.22 or later",
        )


_EMPTY_CELL = CellType()
_PLAIN = frozenset((bool, int, float, str, type(None), dict, OrderedDict, list, tuple, set))  # most of what a module holds
Script = Callable[["TraceSession"], None]
Change = Callable[[dict[str, Any]], dict[str, Any]]


class TraceSession:
    """What a script works with: the fake model, a way to make batches, the recorder with its phases."""

    def __init__(self, model: Any, batch: Callable[[], dict[str, Any]], recorder: Recorder) -> None:
        self.model = model
        self.recorder = recorder
        self._batch = batch

    def to_device(self, category: Any = "inputs") -> dict[str, Any]:
        """A fresh batch, taken onto the device tensor by tensor as `send_to_device` does."""
        batch = self._batch()
        for tensor in tree_leaves(batch):
            if isinstance(tensor, torch.Tensor):
                self.recorder.take(tensor, category, "to_device")
        self.recorder.classify(tree_leaves(batch), category)
        return batch

    @contextlib.contextmanager
    def phase(self, name: Any) -> Iterator[None]:
        before, self.recorder.phase = self.recorder.phase, name
        try:
            yield
        finally:
            self.recorder.phase = before


class Tracer:
    """Builds the model once and records scripts on it at several batch sizes."""

    def __init__(
        self,
        build_model: Callable[[], Any],
        make_batch: Callable[[int], dict[str, Any]],
        kernels: Kernels,
        *,
        cost: CostFunction | None = None,
        recorder: type[Recorder] = Recorder,
        weights_on_host: bool = False,
        loads_onto_card: bool = True,
    ) -> None:
        self._weights_on_host = weights_on_host  # or counted by the script itself
        self._loads_onto_card = loads_onto_card  # weights that are marked so
        self._recorder = recorder
        self._make_batch = make_batch
        self._kernels = kernels
        self._cost = cost
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._fake_mode.cache_enabled = False  # FastFake has a cheaper one in front of it
        self._values = Values(self._fake_mode)
        self._run = FastFake(self._fake_mode)
        with self._fake_mode, self._recorder(Trace(0), self._values, kernels, self._run) as quiet, swaps_allowed():
            quiet.recording = False
            self.model = build_model()
            for parameter in self.model.parameters():
                attach(parameter, None)  # a step would change it, and the next trace would start elsewhere
            self._in_place_use_count = _probe_use_count(kernels, self._values, self._run)
        self._checkpointed = _checkpointing_of(self.model)

    def record(self, script: Script, batch_size: int, *, change: Change = dict) -> Trace:
        """`change` makes another batch of the usual one, for example a shorter one."""
        trace = Trace(batch_size)
        recorder = self._recorder(
            trace, self._values, self._kernels, self._run, cost=self._cost, in_place_use_count=self._in_place_use_count
        )
        plain = torch.jit.optimized_execution(False)  # scripted functions (DeBERTa) profile their first call: it would differ from the next
        undisturbed = _no_garbage_collection(), quietly(), plain
        with contextlib.ExitStack() as around, torch.random.fork_rng(devices=[]), _read_as_in_a_run(self._values):
            for one in undisturbed:
                around.enter_context(one)
            torch.manual_seed(0)
            _forget_answers(self.model)
            for module, state in self._checkpointed:
                vars(module).update(state)
            real = change(self._make_batch(batch_size))
            cuda = cuda_rules(self._kernels.capability)
            heads = tiled_heads(recorder) if "trl" in sys.modules else contextlib.nullcontext()
            with self._fake_mode, cuda, heads, at_work(recorder), ModuleNames(self.model, recorder):
                self._load(recorder)
                session = TraceSession(self.model, lambda: self._fake_batch(real), recorder)
                try:
                    script(session)
                except (
                    RuntimeError,
                    NotImplementedError,
                    ValueError,
                    TypeError,
                    IndexError,
                    AttributeError,
                    KeyError,
                    ImportError,
                ) as error:
                    raise _explained(error, recorder) from error
                finally:
                    recorder.recording = False
                    _forget_answers(self.model)
                    self.model.zero_grad(set_to_none=True)
        recorder.close()
        trace.sort_frees()
        return trace

    def _fake_batch(self, real: dict[str, Any]) -> dict[str, Any]:
        def faked(value: torch.Tensor) -> torch.Tensor:
            fake: torch.Tensor = self._fake_mode.from_tensor(value.clone())
            attach(fake, value)
            return fake

        batch: dict[str, Any] = tree_map_only(torch.Tensor, faked, real)
        return batch

    def _load(self, recorder: Recorder) -> None:
        """nn.Module._apply: children first, then a module's own parameters, then its buffers; before it, what is loaded onto the card."""
        for load in card_loads(self.model) if self._loads_onto_card else ():
            if load.block_bytes:
                recorder.release(recorder.allocate(load.block_bytes, "to_device"))
            for parameter in load.weights:
                recorder.take(parameter, "weights", "to_device")

        def move(module: Any) -> None:
            for child in module.children():
                move(child)
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and self._weights_on_host and isinstance(tensor, torch.nn.Parameter):
                    recorder.leave_on_host(tensor)
                elif tensor is not None:
                    recorder.take(tensor, "weights", "to_device")

        move(self.model)


def kernels_of(settings: StepSettings) -> Kernels:
    """The card's, as the sizes of what they take go by it."""
    return Kernels(capability=settings.capability, multiprocessors=settings.multiprocessors)


@contextlib.contextmanager
def tracer_of(workload: Workload, settings: StepSettings) -> Iterator[Tracer]:
    """Of one device, or of one rank in a world that is not there; ready to record."""
    if settings.sharding is None:
        yield Tracer(prepared(workload, settings), workload.make_batch, kernels_of(settings), cost=cost)
        return
    from hfopt.trace.rank_step import rank_tracer

    with rank_tracer(workload, settings, settings.sharding) as tracer:
        yield tracer


def _explained(error: BaseException, recorder: Recorder) -> TraceError:
    """The operation that failed and the user's line it was called from."""
    import traceback

    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename and "/hfopt/" not in frame.filename
    ]
    line = f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
    op = recorder.last_operation.name() if recorder.last_operation is not None else "the first operation"
    what = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, ImportError) or (isinstance(error, ValueError) and "image size" in what.lower()):
        return TraceError(
            f"the model refuses this step: {what}", hint="state what it takes in the YAML (image_size), or install what it names"
        )
    if isinstance(error, ValueError) and frames and "/trl/" in frames[-1].filename:
        return TraceError(
            f"TRL's own trainer refuses this config: {what}", hint="the run itself would stop there too: change what it names"
        )
    return TraceError(
        f"the model cannot be traced: {op} in {recorder.module or 'the model'}{line}: {what}",
        hint="an operation whose result decides a shape or a branch needs real data; measure this model with a dry run instead",
    )


def _checkpointing_of(model: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Which layers checkpoint, before a step: TRL switches all of them on again after a reference's forward."""
    names = ("gradient_checkpointing", "_gradient_checkpointing_func")
    kept = ((module, {name: vars(module)[name] for name in names if name in vars(module)}) for module in model.modules())
    return [(module, state) for module, state in kept if state]


def _forget_answers(model: Any) -> None:
    """Methods with an lru_cache (RT-DETR's position embedding) answer anew in each trace, as in the first step of a run, and keep no fake
    tensor for a real one."""
    for module in model.modules():
        for cached in (
            *_answering_methods(cast(Any, type(module))),
            *(one for value in vars(module).values() if type(value) not in _PLAIN for one in _answering(value)),
        ):
            cached.cache_clear()


@functools.cache
def _answering_methods(kind: Any) -> tuple[Any, ...]:
    return tuple(one for value in vars(kind).values() for one in _answering(value))


def _answering(method: Any) -> tuple[Any, ...]:
    function = getattr(method, "__func__", method)
    inside = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != _EMPTY_CELL]
    return tuple(cached for cached in (function, *inside) if callable(getattr(cached, "cache_clear", None)))


@contextlib.contextmanager
def _read_as_in_a_run(values: Values) -> Iterator[None]:
    """Code that reads tensors on the host gets the values that are known, or an answer of the right shape."""
    with masks_read(), assignments_by_shape(), unvalidated_distributions(), lists_of_scalars(values.read), grouped_windows():
        yield


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _probe_use_count(kernels: Kernels, values: Values, run: FastFake) -> int:
    """How many references an unshared gradient shows inside a dispatch mode, read off a graph where the sum is known to be unshared."""
    seen: list[int] = []

    class Probe(Recorder):
        def _accumulates_in_place(self, args: Any) -> bool:
            seen.append(args[0]._use_count())
            return False

    with Probe(Trace(0), values, kernels, run):
        weight = torch.nn.Parameter(torch.zeros(4, 4))
        x = torch.zeros(2, 4)
        ((x @ weight) @ weight).sum().backward()
    return min(seen)
