"""Fake tensors, fast and true: answers kept by operation and shapes, real values for small integers and booleans, which steer memory.

FakeTensorMode spends most of a trace on hashing arguments into its own cache. Here the key is what decides an output's shape (operation,
sizes, strides, dtypes, plain arguments) and an output is rebuilt from its recorded size, stride and dtype. Views go straight to the meta
kernel, operations in place return their argument, optimizer kernels over lists have nothing to compute. A fake tensor is made as its
constructor makes it, without the constructor's checks: all have the attributes of one that it made.

transformers asks `mask.all()` to choose an attention kernel, skips layers on `torch.rand([]) < layerdrop` and sizes drop-path rates with
`linspace(...).tolist()`. A fake tensor has no data, so each small integer or boolean tensor, and each tiny float one, carries a
real twin, computed beside the fake operation. Random scalars answer just below 1: a layer that could be skipped is not, which is
the step with the highest memory and the one a long run meets. What is not known reads as False, 0 or 1.0 (code divides by it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

_CPU = torch.device("cpu")
_CHANGES_SHAPE = frozenset(
    ("resize_", "resize_as_", "set_", "transpose_", "t_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_", "as_strided_", "detach_")
)
_NO_KEY = object()


@dataclass(frozen=True, slots=True)
class _Output:
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Kind:
    """What can be done with an operation, read off its schema once."""

    __slots__ = ("func", "in_place", "lists_only", "makes_random", "makes_uniform", "remembered", "shaped_by_values", "stands_for", "view")

    def __init__(self, func: Any) -> None:
        self.func = func  # alive as long as its identity is a key
        schema = func._schema
        name = func._overloadpacket.__name__
        written = [argument for argument in schema.arguments if argument.alias_info is not None and argument.alias_info.is_write]
        aliases = any(result.alias_info is not None for result in schema.returns)
        self.lists_only = bool(written) and not schema.returns and name.startswith(("_foreach_", "_fused_", "_amp_"))
        self.in_place = (
            len(written) == 1 and written[0] is schema.arguments[0] and len(schema.returns) == 1 and aliases and name not in _CHANGES_SHAPE
        )
        self.view = (bool(func.is_view) or name == "_unsafe_view") and not written  # the latter shares its storage and says it does not
        self.remembered = not written and not aliases and bool(schema.returns)
        self.shaped_by_values = func in _DYNAMIC or func in _BOOLEAN_INDEX
        self.makes_uniform = func in _RANDOM_UNIFORM
        self.makes_random = func in _RANDOM
        self.stands_for = _COMPARED.get(func)  # what it answers where the numbers are not known


_KINDS: dict[int, _Kind] = {}


def _kind_of(func: Any) -> _Kind:
    """By identity: the hash of an operation is computed in Python, at every look."""
    kind = _KINDS.get(id(func))
    if kind is None:
        kind = _KINDS[id(func)] = _Kind(func)
    return kind


class Answer:
    """What an operation on arguments of these shapes returns, and what its recorder found it to cost."""

    __slots__ = ("output", "price")

    def __init__(self, output: _Output | tuple[_Output | int | None, ...]) -> None:
        self.output = output
        self.price: Any = UNPRICED


UNPRICED = object()


class FastFake:
    """Runs operations for a recorder, through the fake mode the first time and from memory afterwards."""

    def __init__(self, fake_mode: Any) -> None:
        self._mode = fake_mode
        self._attributes = dict(vars(FakeTensor(fake_mode, _on_meta((1,), (1,), torch.float32), _CPU)))
        self._known: dict[Any, Answer] = {}
        self.answer: Answer | None = None  # to the last operation, where it was remembered

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self.answer = None
        kind = _kind_of(func)
        if kind.lists_only:
            return None
        if kind.view and len(args) and isinstance(args[0], FakeTensor) and not kwargs:
            return self._viewed(func, args)
        if not (kind.remembered or kind.in_place):
            return func(*args, **kwargs)
        key = _key(args)
        if key is _NO_KEY:
            return func(*args, **kwargs)
        if kwargs:
            extra = _key(tuple(kwargs.items()))
            if extra is _NO_KEY:
                return func(*args, **kwargs)
            key = (key, extra)
        key = (id(func), key)
        answer = self._known.get(key)
        if answer is None:
            out = func(*args, **kwargs)
            self._remember(key, kind, args, out)
            return out
        self.answer = answer
        if kind.in_place:
            return args[0]
        known = answer.output
        if isinstance(known, _Output):
            return self._fresh(known)
        return tuple(self._fresh(leaf) if isinstance(leaf, _Output) else leaf for leaf in known)

    def _viewed(self, func: Any, args: Sequence[Any]) -> Any:
        mode = self._mode
        with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():  # as in_kernel_invocation_manager, without a generator
            mode.in_kernel_invocation = True
            torch._C._set_meta_in_tls_dispatch_include(True)
            try:
                out = func(*args)
            finally:
                mode.in_kernel_invocation = False
        return self._faked(out) if isinstance(out, torch.Tensor) else type(out)(map(self._faked, out))

    def _fresh(self, output: _Output) -> torch.Tensor:
        return self._faked(_on_meta(output.size, output.stride, output.dtype))

    def _faked(self, on_meta: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.Tensor._make_subclass(
            FakeTensor, on_meta, on_meta.requires_grad, dispatch_device=True, device_for_backend_keys=_CPU
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.__dict__.update(self._attributes)
        return made

    def _remember(self, key: Any, kind: _Kind, args: Sequence[Any], out: Any) -> None:
        if kind.in_place:
            if out is args[0]:
                self._known[key] = Answer(())
        elif isinstance(out, FakeTensor):
            if _is_fresh(out, args):
                self._known[key] = Answer(_output(out))
        elif isinstance(out, tuple) and out and all(_is_plain(leaf) or _is_fresh(leaf, args) for leaf in out):
            self._known[key] = Answer(tuple(leaf if _is_plain(leaf) else _output(leaf) for leaf in out))


def _on_meta(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def _output(tensor: torch.Tensor) -> _Output:
    return _Output(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _is_plain(leaf: Any) -> bool:
    """No tensor: what attention kernels return among others (lengths, None where there is no mask)."""
    return leaf is None or type(leaf) is int


def _is_fresh(tensor: Any, args: Sequence[Any]) -> bool:
    """A fake tensor with a storage of its own, filled from the start and on the device that is traced."""
    if not isinstance(tensor, FakeTensor):
        return False
    storage = tensor.untyped_storage()._cdata
    shared = any(isinstance(arg, torch.Tensor) and arg.untyped_storage()._cdata == storage for arg in args)
    return not shared and tensor.storage_offset() == 0 and tensor.device == _CPU


def _key(values: Sequence[Any]) -> Any:
    """A hashable stand-in for arguments, or _NO_KEY."""
    parts: list[Any] = []
    for value in values:
        if isinstance(value, FakeTensor):
            parts.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, torch.Tensor):
            return _NO_KEY
        elif isinstance(value, (list, tuple)):
            inner = _key(value)
            if inner is _NO_KEY:
                return _NO_KEY
            parts.append(inner)
        elif isinstance(value, (bool, int, float)):
            parts.append((type(value), value))  # 1, 1.0 and True are equal keys but not equal arguments
        elif value is None or isinstance(value, (str, torch.dtype, torch.device, torch.layout, torch.memory_format)):
            parts.append(value)
        else:
            return _NO_KEY
    return tuple(parts)


INTEGER_LIMIT = 1 << 22  # elements; a mask of 2048 × 2048 still fits
FLOAT_LIMIT = 1 << 10
UNIFORM_LIMIT = 1 << 28  # of a tensor whose elements are all alike, which is kept as one number
_TWIN = "_hfopt_twin"
_ALMOST_ONE = 1.0 - 2.0**-24

aten = torch.ops.aten


def _overloads(names: str) -> frozenset[Any]:
    packets = [getattr(aten, name) for name in names.split() if hasattr(aten, name)]
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


_RANDOM_UNIFORM = _overloads("rand rand_like uniform_")
_RANDOM = _overloads(
    "randn randn_like randint randint_like randperm random_ normal normal_ bernoulli bernoulli_ multinomial exponential_ native_dropout "
    "empty empty_like empty_strided new_empty"
)
_DYNAMIC = _overloads("nonzero masked_select unique_dim _unique2 unique_consecutive repeat_interleave bincount")
_COMPARED = {
    aten.eq.Scalar: False,
    aten.ne.Scalar: True,
    aten.ge.Tensor: True,
    aten.le.Tensor: True,
    aten.isnan.default: False,
    aten.isinf.default: False,
}
"""Numbers that are not known are not a constant's: an image is not taken for padding (Idefics). What is checked to be in order is: the
corners of predicted boxes (DETR). And they are numbers: TRL's GRPO logs the least of those that are."""
_BOOLEAN_INDEX = (aten.index.Tensor,)


def twin(tensor: Any) -> torch.Tensor | None:
    """The real value of a fake tensor, or None; a real tensor is its own."""
    if isinstance(tensor, FakeTensor):
        return getattr(tensor, _TWIN, None)
    return tensor if isinstance(tensor, torch.Tensor) else None


def attach(fake: torch.Tensor, real: torch.Tensor | None) -> None:
    if real is not None and not _small(fake):
        real = _collapsed(real)
    if real is not None:
        setattr(fake, _TWIN, real)
    elif hasattr(fake, _TWIN):
        delattr(fake, _TWIN)


def _small(tensor: torch.Tensor) -> bool:
    floating = tensor.is_floating_point() or tensor.is_complex()
    return int(tensor.numel()) <= (FLOAT_LIMIT if floating else INTEGER_LIMIT)


def _of_one_value(args: Any) -> bool:
    real = twin(args[0]) if args else None
    return real is not None and not _small(real) and _uniform(real)


def _uniform(real: torch.Tensor) -> bool:
    """One value for all elements, which costs nothing to keep."""
    return real.numel() <= UNIFORM_LIMIT and not any(real.stride())


def _collapsed(real: torch.Tensor) -> torch.Tensor | None:
    """A large tensor of one value, kept as that value; None when it is not."""
    if real.is_floating_point() or real.numel() > UNIFORM_LIMIT:
        return None
    if _uniform(real):
        return real
    with _disable_current_modes():
        first = real.flatten()[:1].clone()
        return first[0].expand(real.shape) if bool((real == first).all()) else None


class Values:
    """Keeps the twins of one trace in step with the fake tensors."""

    def __init__(self, fake_mode: Any) -> None:
        self._fake_mode = fake_mode
        self._followed = False  # the last operation also ran on the twins

    def read(self, tensor: torch.Tensor) -> Any:
        real = twin(tensor)
        if real is not None:
            with _disable_current_modes():
                return real.item()
        if tensor.dtype == torch.bool:
            return False
        return 1.0 if tensor.is_floating_point() else 0

    def known_output(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The output of an operation whose shape depends on values, when the values are known."""
        if not _kind_of(func).shaped_by_values:
            return None
        if func in _BOOLEAN_INDEX and _indexed_by_mask(args):
            return self._chosen_rows(func, args)
        if func in _DYNAMIC:
            real = self._run_on_twins(func, args, kwargs, demand=True)
            if real is None:
                return None
            return tree_map_only(torch.Tensor, self._faked, real)
        return None

    def _chosen_rows(self, func: Any, args: Any) -> Any:
        """What CUDA does with a mask in an index: nonzero(), here of its true values, and then an index by position."""
        indices: list[Any] = []
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
                continue
            real = twin(index)
            if real is None:
                return None
            with _disable_current_modes():
                positions = real.nonzero(as_tuple=True)
            indices.extend(map(self._faked, positions))
        out = func(args[0], indices)
        attach(out, self._run_on_twins(func, (args[0], indices), {}, demand=False))
        return out

    def _faked(self, real: torch.Tensor) -> torch.Tensor:
        fake = self._fake_mode.from_tensor(real)
        attach(fake, real)
        return fake

    def propagate(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Gives the outputs their twins, or takes stale ones away after an in-place write."""
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if first is None or isinstance(first, (tuple, list)):
            self._follow_lists(func, args, kwargs)
            return
        if not isinstance(first, FakeTensor):
            return
        kind = _kind_of(func)
        if kind.stands_for is not None and args[0].is_floating_point() and twin(args[0]) is None:
            with _disable_current_modes():
                alike = torch.tensor(kind.stands_for).expand(tuple(first.shape))
                attach(first, alike.clone() if _small(first) else alike)
            return
        if not _small(first) and not _of_one_value(args):
            return
        if kind.makes_uniform:
            if first.numel() == 1:
                with _disable_current_modes():
                    attach(first, torch.full(tuple(first.shape), _ALMOST_ONE, dtype=first.dtype))
            return
        if kind.makes_random:
            attach(first, None)
            return
        real = self._run_on_twins(func, args, kwargs, demand=False)
        if isinstance(out, (tuple, list)):
            reals = real if isinstance(real, (tuple, list)) else [None] * len(out)
            for fake, value in zip(out, reals, strict=True):
                if isinstance(fake, FakeTensor):
                    attach(fake, value)
        elif real is not None or hasattr(first, _TWIN):
            attach(first, real)

    def _follow_lists(self, func: Any, args: Any, kwargs: Any) -> None:
        """An in-place operation on a list (`_foreach_add_`): the twins follow if all are known, and are dropped otherwise."""
        changed = args[0] if args and isinstance(args[0], (tuple, list)) else ()
        if any(twin(tensor) is not None for tensor in changed) and self._run_on_twins(func, args, kwargs, demand=False) is None:
            for tensor in changed:
                if isinstance(tensor, FakeTensor) and not self._followed:
                    attach(tensor, None)

    def _run_on_twins(self, func: Any, args: Any, kwargs: Any, *, demand: bool) -> Any:
        """The same operation on the twins, or None when one of them is missing."""
        self._followed = False
        if any(isinstance(value, FakeTensor) and not hasattr(value, _TWIN) for value in args):
            return None
        missing = False

        def host(value: torch.Tensor) -> torch.Tensor:
            nonlocal missing
            real = twin(value)
            if real is None or (not demand and not _small(real) and not _uniform(real)):
                missing = True
                return value
            return real

        real_args = tree_map_only(torch.Tensor, host, args) if args else args
        real_kwargs = tree_map_only(torch.Tensor, host, kwargs) if kwargs else kwargs
        if missing:
            return None
        with _disable_current_modes():
            try:
                out = func(*real_args, **real_kwargs)
                self._followed = True
                return out
            except (RuntimeError, NotImplementedError, IndexError, TypeError):
                return None  # not computable on the host: the value stays unknown


def _indexed_by_mask(args: Any) -> bool:
    return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1] if index is not None)
