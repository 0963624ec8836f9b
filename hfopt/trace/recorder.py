"""Records what a step allocates, and which module each operation belongs to.

Which module an operation belongs to, in forward and in backward, so that the peak can be named. Forward hooks keep the current module. In
backward the running autograd node's sequence number tells in which module's forward it was made.

Records what a step allocates: one dispatch mode over fake tensors, every storage's birth and death in the order CUDA would see them. The
step runs on fake CPU tensors (shapes only, no data). Each operation's outputs become blocks when their storage is first seen; a weak
reference on the storage tells when it is freed. What a CUDA kernel takes besides its outputs, and in which order, comes from
`inner_temporaries`. Values that steer the model (`mask.all()`) come from `values`.

Known limits: garbage collection is off while recording, so reference cycles in the model free their tensors late; tensors that a real
run keeps on the host are recognised only when they are 0-dimensional and made from Python numbers or `torch.rand`.
"""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from hfopt.trace.cuda_allocations import LAID_OUT, RULES, cuda_output
from hfopt.trace.events import FREED, Category, Formula, KeptWorkspace, Kernels, Phase, SizedTemporary, Trace, Where
from hfopt.trace.fake_tensors import UNPRICED, FastFake, Values
from hfopt.trace.fused_head import Tile


class ModuleNames:
    """Keeps `recorder.module` current while entered."""

    def __init__(self, model: Any, recorder: Any) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._recorder = recorder
        self._stack: list[str] = []
        self._sequence: list[int] = []
        self._module_at: list[str] = []
        self._handles: list[Any] = []

    def __enter__(self) -> ModuleNames:
        self._handles = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave, always_call=True)]
        self._recorder.module_of_node = self.module_of_node
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._recorder.module_of_node = None

    def _enter(self, module: Any, _: Any) -> None:
        self._stack.append(self._names.get(id(module), type(module).__name__))
        self._note()

    def _leave(self, module: Any, _: Any, __: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._note()

    def _note(self) -> None:
        name = self._recorder.module = self._stack[-1] if self._stack else ""
        self._sequence.append(torch._C._autograd._get_sequence_nr())
        self._module_at.append(name)

    def module_of_node(self, node: Any) -> str:
        at = bisect_right(self._sequence, node._sequence_nr()) - 1
        return self._module_at[at] if at >= 0 else ""


_HOST = -1

_DEVICE = torch.ops.prim.device.default
_ITEM = torch.ops.aten._local_scalar_dense.default
_ADD = torch.ops.aten.add.Tensor
_ZEROS = frozenset({torch.ops.aten.new_zeros.default, torch.ops.aten.zeros.default, torch.ops.aten.zeros_like.default})
_INTO_ZEROS = frozenset(
    {
        torch.ops.aten.index_add.default,
        torch.ops.aten.scatter_add.default,
        torch.ops.aten.index_put.default,
        torch.ops.aten.scatter.src,
    }
)
_HOST_FACTORIES = (torch.ops.aten.lift_fresh.default, torch.ops.aten.rand.default)


class _Handling:
    """What the recorder does with an operation, looked up once."""

    __slots__ = ("func", "into_zeros", "laid_out", "may_stay_on_host", "name", "rule", "zeros")

    def __init__(self, func: Any) -> None:
        self.func = func  # alive as long as its identity is a key
        self.name = getattr(func, "_overloadpacket", func).__name__
        self.rule = RULES.get(func)
        self.laid_out = func in LAID_OUT
        self.zeros = func in _ZEROS
        self.into_zeros = func in _INTO_ZEROS
        self.may_stay_on_host = func in _HOST_FACTORIES


_HANDLINGS: dict[int, _Handling] = {}


def _handling_of(func: Any) -> _Handling:
    found = _HANDLINGS.get(id(func))
    if found is None:
        found = _HANDLINGS[id(func)] = _Handling(func)
    return found


CostFunction = Callable[[Any, Sequence[Any], dict[str, Any], Any], Any]


AT_WORK: ContextVar[Recorder | None] = ContextVar("at_work", default=None)
"""The recorder of the trace that is being made, for a model whose own parts must say what they do (Liger's slices)."""


@contextmanager
def at_work(recorder: Recorder) -> Iterator[None]:
    token = AT_WORK.set(recorder)
    try:
        with recorder:
            yield
    finally:
        AT_WORK.reset(token)


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Records into `trace` while entered. `cost` is asked for each operation while `costing` is on."""

    def __init__(
        self,
        trace: Trace,
        values: Values,
        kernels: Kernels,
        run: FastFake,
        *,
        cost: CostFunction | None = None,
        in_place_use_count: int | None = None,
    ) -> None:
        super().__init__()
        self.trace = trace
        self.phase: Phase = "load"
        self.module = ""
        self.costing = False
        self.recording = True
        self.module_of_node: Callable[[Any], str] | None = None
        self.tile: Tile | None = None  # of the loop that is run for one tile
        self._values = values
        self._kernels = kernels
        self._run = run
        self._cost = cost
        self._in_place_use_count = in_place_use_count
        self._blocks: dict[int, int] = {}  # storage -> block
        self._owner: dict[int, int] = {}  # block -> storage
        self._references: dict[int, weakref.ref[Any]] = {}
        self._kept: set[tuple[str, bool]] = set()
        self._next = 0
        self._place_of: dict[tuple[str, str, Any], int] = {}
        self.last_operation: Any = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch's wrapper costs more than the recording

    # ------------------------------------------------------------------------------------------ blocks

    def allocate(self, size: int, op: Any = "") -> int:
        block = self._next
        self._next += 1
        self.trace.events.append((block, size, self._place(op)))
        return block

    def release(self, block: int) -> None:
        self.trace.events.append((block, FREED, 0))

    def take(self, tensor: torch.Tensor, category: Category | None = None, op: Any = "", *, size: int | None = None) -> None:
        """The tensor's storage becomes a block now, unless it is one already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._blocks:
            return
        size = storage.nbytes() if size is None else size
        if not size:
            return
        formula = None if self.tile is None else self.tile.size(tensor, size)
        if formula is not None:
            self.trace.formulas[len(self.trace.events)] = formula
        elif tensor.dim() > 1:
            self.trace.shapes[len(self.trace.events)] = tuple(tensor.shape)
        self._watch(storage, key, self.allocate(size if formula is None else formula.bytes(), op))
        if category:
            self.trace.categories[self._blocks[key]] = category

    def leave_on_host(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._blocks:
            self._watch(storage, storage._cdata, _HOST)

    def _watch(self, storage: Any, key: int, block: int) -> None:
        self._blocks[key] = block
        if block != _HOST:
            self._owner[block] = key
        self._references[key] = weakref.ref(storage, functools.partial(self._gone, key))

    def _gone(self, key: int, _: object) -> None:
        block = self._blocks.pop(key)
        del self._references[key]
        if block != _HOST and self._owner.get(block) == key:
            self.release(block)
            del self._owner[block]

    def close(self) -> None:
        """What the model keeps (Qwen-VL's rope_deltas) is freed while another trace runs, and is no event of this one."""
        self._references.clear()

    def forget(self, key: int) -> None:
        """The storage's block is freed now, though the storage lives on: it was shrunk to nothing, or moved to the host."""
        if key in self._blocks:
            self._gone(key, None)

    def _place(self, op: Any) -> int:
        module = self.module
        if self.phase == "backward" and self.module_of_node is not None and not module:
            node = torch._C._current_autograd_node()
            module = self.module_of_node(node) if node is not None else ""
        key = (self.phase, module, op)
        index = self._place_of.get(key)
        if index is None:
            index = self._place_of[key] = len(self.trace.places)
            self.trace.places.append(Where(self.phase, module, op if isinstance(op, str) else op.name()))
        return index

    # ------------------------------------------------------------------------------------------ categories

    def classify(self, tensors: Iterable[Any], category: Category) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                block = self._blocks.get(tensor.untyped_storage()._cdata, _HOST)
                if block != _HOST:
                    self.trace.categories[block] = category

    def classify_live(self, since_block: int, category: Category) -> None:
        """Every block taken since and still alive, unless it is classified already."""
        for block in self._owner:
            if block >= since_block:
                self.trace.categories.setdefault(block, category)

    @property
    def next_block(self) -> int:
        return self._next

    def mark(self, name: str) -> None:
        self.trace.marks[name] = len(self.trace.events)

    # ------------------------------------------------------------------------------------------ dispatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return args[0].fake_device if hasattr(args[0], "fake_device") else func(*args)
        kwargs = kwargs or {}
        before, self.last_operation = self.last_operation, func
        if func is _ITEM:
            return self._values.read(args[0])
        handling, answer = _handling_of(func), None
        known = cuda_output(func, args) if handling.laid_out else self._values.known_output(func, args, kwargs)
        if known is not None:
            out = known
        else:
            out = self._run(func, args, kwargs)
            answer = self._run.answer
            self._values.propagate(func, args, kwargs, out)
        if self.recording:
            if func is _ADD and self._accumulates_in_place(args):
                self._hand_over(args[0], out)
            else:
                if handling.into_zeros and before is not None and _handling_of(before).zeros and self._fills_its_zeros(args[0]):
                    self._hand_over(args[0], out)
                self._take_outputs(handling, args, kwargs, out)
            if self.costing and self._cost is not None:
                if answer is None:
                    priced = self._cost(func, args, kwargs, out)
                elif answer.price is UNPRICED:  # the same arguments cost the same
                    priced = answer.price = self._cost(func, args, kwargs, out)
                else:
                    priced = answer.price
                if priced is not None:
                    priced = priced if self.tile is None else self.tile.whole(priced, (*args, *kwargs.values(), out))
                    self.trace.costs.append((self.phase, handling.name, priced))
        return out

    def _take_outputs(self, handling: _Handling, args: Any, kwargs: Any, out: Any) -> None:
        func = handling.func
        if handling.may_stay_on_host and isinstance(out, torch.Tensor) and out.dim() == 0:
            self.leave_on_host(out)
            return
        steps = None if handling.rule is None else handling.rule(self._kernels, args, kwargs, out)
        if steps is None:
            if isinstance(out, torch.Tensor):
                self.take(out, op=func)
            elif isinstance(out, (tuple, list)):
                for leaf in out:
                    if isinstance(leaf, torch.Tensor):
                        self.take(leaf, op=func)
            return
        inner = []
        for step in steps:
            if isinstance(step, torch.Tensor):
                self.take(step, op=func)
            elif isinstance(step, SizedTemporary):
                self.take(step.tensor, op=func, size=step.bytes)
            elif isinstance(step, KeptWorkspace):
                self._keep(step, func)
            elif isinstance(step, Formula):
                self.trace.formulas[len(self.trace.events)] = step
                inner.append(self.allocate(step.bytes(), func))
            else:
                self.release(inner[step])
                inner[step] = _HOST
        for block in inner:
            if block != _HOST:
                self.release(block)

    def _keep(self, step: KeptWorkspace, func: Any) -> None:
        """On CUDA backward runs in a thread of its own, with its own handles."""
        key = (step.name, torch._C._current_autograd_node() is not None)
        if key not in self._kept:
            self._kept.add(key)
            self.trace.categories[self.allocate(step.bytes, func)] = "temporaries"

    # ------------------------------------------------------------------------------------------ gradients of shared tensors

    def _accumulates_in_place(self, args: Any) -> bool:
        """torch/csrc/autograd/input_buffer.cpp adds into the buffered gradient when nobody else holds it, but never for fake tensors.
        A sum with gradients on is the model's own, recomputed by checkpointing."""
        if self.phase != "backward" or self._in_place_use_count is None or torch._C._current_autograd_node() is None:
            return False
        if torch.is_grad_enabled():
            return False
        old = args[0]
        if (
            not isinstance(old, torch.Tensor)
            or not isinstance(args[1], torch.Tensor)
            or old.shape != args[1].shape
            or old.dtype != args[1].dtype
        ):
            return False
        storage = old.untyped_storage()
        return (
            storage._cdata in self._blocks
            and old._use_count() <= self._in_place_use_count
            and torch._C._storage_Use_Count(storage._cdata) <= 2
            and old.numel() * old.element_size() == storage.nbytes()
        )

    def _fills_its_zeros(self, zeros: Any) -> bool:
        """The backward of index_select, gather, indexing and max writes into the zeros it has just made; for fake tensors, which count as
        tensor subclasses, into a copy of them (torch/csrc/autograd/FunctionsManual.cpp, isTensorSubclassLike)."""
        if self.phase != "backward" or torch._C._current_autograd_node() is None or torch.is_grad_enabled():
            return False
        return isinstance(zeros, torch.Tensor) and self._blocks.get(zeros.untyped_storage()._cdata, _HOST) == self._next - 1

    def _hand_over(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """The new storage takes over the old one's block."""
        block = self._blocks[old.untyped_storage()._cdata]
        storage = new.untyped_storage()
        if block != _HOST:
            self._watch(storage, storage._cdata, block)
