"""The random numbers of a whole micro-batch, given to its pieces: dropout masks and noise are those that the whole would have drawn.

A generator is a stream: a whole micro-batch draws its first mask for all samples, then its second. So each piece starts from the state in
which the micro-batch began, every draw is made for the whole, and the piece takes its rows of it. When the last piece has run, the
generator stands where the whole would have left it. Which dimension of a draw runs over the samples is learned: two samples are run
together and alone, and the shapes of their draws are compared.

Limits: what draws within a fused kernel (dropout in flash attention), from a generator of its own, from numpy or Python, or a
permutation of the samples cannot be given; `other` says so. A draw for the whole needs that much memory for a moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Shape = tuple[int, ...]
Part = tuple[int, int, int]  # of a tensor: dimension, start, length
Dimension = int | Literal["shared"]


@dataclass(slots=True)
class Learned:
    """The draws of two samples in their order, and for each kind of draw the dimension that runs over the samples.

    A kind is the operation and its number of dimensions, whatever the place: a layer that is run again in backward draws as in forward.
    """

    pair: list[tuple[str, Shape]] = field(default_factory=list)
    dimensions: dict[tuple[str, int], Dimension] = field(default_factory=dict)
    other: str | None = None  # a draw that no piece can be given

    @property
    def givable(self) -> bool:
        return bool(self.dimensions) and self.other is None

    @property
    def permutes(self) -> bool:
        return self.other is not None and "randperm" in self.other

    def compare(self, number: int, name: str, alone: Shape) -> None:
        """One sample's draw beside that of two in the same place."""
        kind = (name, len(alone))
        two = self.pair[number][1] if number < len(self.pair) and self.pair[number][0] == name else None
        found = _over_the_samples(two, alone) if two is not None else None
        if found is None or self.dimensions.setdefault(kind, found) != found:
            self.other = f"{name} of a shape that does not follow from the number of samples"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The samples of a piece within its micro-batch."""

    start: int
    count: int
    of: int


class Draws(TorchDispatchMode):  # type: ignore[misc]
    """Around one training step. Without `rows` it notes the draws of two samples; with them it gives a piece its part of each."""

    def __init__(self, learned: Learned, rows: Rows | None, *, learns: bool = False) -> None:
        super().__init__()
        self._learned, self._rows, self._learns = learned, rows, learns
        self._number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or _draws_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        name, shape = func._schema.name, _shape_of(func, args, kwargs)
        if shape is None:
            self._learned.other = name
        elif self._rows is None:
            self._learned.pair.append((name, shape))
        else:
            if self._learns:
                self._learned.compare(self._number, name, shape)
                self._number += 1
            whole = self._whole(name, shape, self._rows)
            if whole is not None:
                return _drawn(func, args, kwargs, *whole)
        return func(*args, **kwargs)

    def _whole(self, name: str, shape: Shape, rows: Rows) -> tuple[Shape, Part] | None:
        """The shape for the whole, and this piece's part of it; None: drawn as it is."""
        dimension = self._learned.dimensions.get((name, len(shape)))
        if dimension == "shared":
            return None
        if dimension is None or shape[dimension] % rows.count:
            self._learned.other = f"{name} of a shape that two samples did not draw"
            return None
        each = shape[dimension] // rows.count
        return (*shape[:dimension], each * rows.of, *shape[dimension + 1 :]), (dimension, each * rows.start, shape[dimension])


def _over_the_samples(pair: Shape, alone: Shape) -> Dimension | None:
    if pair == alone:
        return "shared"
    differing = [place for place, (two, one) in enumerate(zip(pair, alone, strict=False)) if two != one]
    if len(pair) != len(alone) or len(differing) != 1 or pair[differing[0]] != 2 * alone[differing[0]]:
        return None
    return differing[0]


def _draws_nothing(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Attention that may drop out and is asked not to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return not given
    return False


def _shape_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Shape | None:
    """Of what is drawn; None where it cannot be drawn for more samples than there are."""
    if kwargs.get("generator") is not None:
        return None
    if _place_of_size(func) is not None:
        return tuple(args[_place_of_size(func)])
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    fills = func._schema.name.endswith(("_", "_like")) or func is torch.ops.aten.native_dropout.default
    return tuple(tensors[0].shape) if fills and len(tensors) == 1 and tensors[0] is args[0] else None


def _place_of_size(func: Any) -> Any:
    return next((place for place, argument in enumerate(func._schema.arguments) if argument.name == "size"), None)


def _drawn(func: Any, args: Sequence[Any], kwargs: dict[str, Any], shape: Shape, part: Part) -> Any:
    """Drawn for the whole, in the memory order of the piece; this piece's part of it."""
    place = _place_of_size(func)
    if place is not None:
        return func(*args[:place], list(shape), *args[place + 1 :], **kwargs).narrow(*part).contiguous()
    own = args[0]
    order = sorted(range(own.dim()), key=own.stride, reverse=True)
    whole = torch.empty_permuted(shape, order, dtype=own.dtype, device=own.device)
    if func is torch.ops.aten.native_dropout.default:
        _, kept = func(whole.fill_(1), *args[1:], **kwargs)
        mask, share = kept.narrow(*part).clone(), args[1]
        return own * mask * (1 / (1 - share) if share < 1 else 0.0), mask
    drawn = func(whole, *args[1:], **kwargs).narrow(*part)
    return own.copy_(drawn) if func._schema.name.endswith("_") else drawn.clone()
