"""True values for small integer and boolean fake tensors, because values steer memory.

transformers asks `mask.all()` to choose an attention kernel, skips layers on `torch.rand([]) < layerdrop` and sizes drop-path rates with
`linspace(...).tolist()`. A fake tensor has no data, so each small integer or boolean tensor, and each tiny float one, carries a
real twin, computed beside the fake operation. Random scalars answer just below 1: a layer that could be skipped is not, which is
the step with the highest memory and the one a long run meets. What is not known reads as False, 0 or 1.0 (code divides by it).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

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
        if func in _COMPARED and args[0].is_floating_point() and twin(args[0]) is None:
            with _disable_current_modes():
                alike = torch.tensor(_COMPARED[func]).expand(tuple(first.shape))
                attach(first, alike.clone() if _small(first) else alike)
            return
        if not _small(first) and not _of_one_value(args):
            return
        if func in _RANDOM_UNIFORM:
            if first.numel() == 1:
                with _disable_current_modes():
                    attach(first, torch.full(tuple(first.shape), _ALMOST_ONE, dtype=first.dtype))
            return
        if func in _RANDOM:
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
