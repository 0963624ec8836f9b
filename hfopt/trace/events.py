"""What a trace holds: blocks taken and freed, in order, and their sizes, which are formulas where they are no line over the batch.

Plain values: they are recorded with torch (`recorder`), and read without it. Sizes of kernels' temporaries that are no straight line over
the batch are functions of dimensions that are. Each mirrors the C++ that computes it. A `Formula` keeps the dimensions, so that a timeline
can evaluate it at any batch size; what it asks of a card is noted, so that a trace answers for every card that answers alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from hfopt.compat.versions import installed_torch
from hfopt.units import KIB, MIB

if TYPE_CHECKING:
    import torch


Phase = Literal["load", "forward", "backward", "optimizer", "evaluation"]
Category = Literal["weights", "gradients", "optimizer", "activations", "logits", "inputs", "temporaries"]

FREED = -1


@dataclass(frozen=True, slots=True)
class Where:
    """What ran when a block was taken."""

    phase: Phase
    module: str
    op: str


@dataclass(slots=True)
class Trace:
    """One recorded run: events in order, each (block, bytes or FREED, index into places)."""

    batch: int
    events: list[tuple[int, int, int]] = field(default_factory=list)
    formulas: dict[int, Formula] = field(default_factory=dict)  # by event: sizes that are no affine function of the batch
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by event, of tensors with several dimensions
    places: list[Where] = field(default_factory=list)
    categories: dict[int, Category] = field(default_factory=dict)  # by block
    costs: list[tuple[Phase, str, Any]] = field(default_factory=list)  # phase, op and cost of each kernel while `costing` is on
    marks: dict[str, int] = field(default_factory=dict)  # named moments, as event indices
    streams: dict[int, int] = field(default_factory=dict)  # by block, where it is not the usual stream

    def sort_frees(self) -> None:
        """Blocks freed one after the other leave the same free memory in any order; sorted, two traces compare. Marks stay between."""
        start = 0
        events, marked = self.events, set(self.marks.values())
        for index, (_, size, _) in enumerate([*events, (0, 0, 0)]):
            if size != FREED or index in marked:
                if index - start > 1:
                    events[start:index] = sorted(events[start:index])
                start = index if size == FREED else index + 1


Capability: TypeAlias = tuple[int, int]
Answer: TypeAlias = tuple[str, tuple[Capability, ...], bool]
"""A question to a card's capability, what it was compared with, and what came of it."""
_listening: list[set[Answer]] = []


@contextmanager
def answers_noted() -> Iterator[set[Answer]]:
    """What is asked of the card's capability in here: a trace holds for every card that answers alike."""
    noted: set[Answer] = set()
    _listening.append(noted)
    try:
        yield noted
    finally:
        _listening.remove(noted)


def at_least(capability: Capability, least: Capability) -> bool:
    return _answered("at_least", capability, (least,))


def one_of(capability: Capability, some: Sequence[Capability]) -> bool:
    return _answered("one_of", capability, tuple(some))


def answers_alike(capability: Capability, noted: Sequence[Answer]) -> bool:
    return all(_answer(question, capability, others) == answer for question, others, answer in noted)


def _answered(question: str, capability: Capability, others: tuple[Capability, ...]) -> bool:
    answer = _answer(question, capability, others)
    for noted in _listening:
        noted.add((question, others, answer))
    return answer


def _answer(question: str, capability: Capability, others: Sequence[Capability]) -> bool:
    return capability >= others[0] if question == "at_least" else capability in others


@dataclass(frozen=True, slots=True)
class Formula:
    """A size that `FORMULAS[name]` computes from dimensions; each dimension is affine in the batch."""

    name: str
    dims: tuple[int, ...]

    def bytes(self) -> int:
        return FORMULAS[self.name](*self.dims)


def constant(size: int) -> Formula:
    return Formula("bytes", (size,))


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _embedding_partials(tokens: int, rows: int, row_bytes: int) -> int:
    """EmbeddingBackwardKernel.cu: one row per partial segment at most (NROWS_PER_THREAD is 10); few tokens take another kernel."""
    return 0 if tokens <= 3072 else (tokens // 10 + min(tokens, rows)) * row_bytes


def _embedding_indices(tokens: int, token_bytes: int) -> int:
    return 0 if tokens <= 3072 else tokens * token_bytes


def _column_reduction(outputs: int, inputs: int, vector: int, multiprocessors: int, threads: int) -> int:
    """setReduceConfig and global_memory_size of ATen/native/cuda/Reduce.cuh, for a reduction over the slower dimension."""
    most_threads = 512 // vector
    across = outputs // vector
    width = min(_power_of_two_below(across, most_threads), 32)
    height = min(_power_of_two_below(inputs, most_threads), most_threads // width)
    width = min(_power_of_two_below(across, most_threads), most_threads // height)
    if inputs < min(height * 16, 256):
        return 0
    values = -(-inputs // height)
    grid = -(-across // width)
    target = multiprocessors * (threads // (width * height))
    if values < 256 or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // 16)), -(-values // 256))
    return 4 * outputs * blocks * width * vector if blocks > 1 else 0


def efficient_tile(half: bool, width: int, roomy: bool) -> tuple[int, int, bool]:
    """Rows and columns of a tile of memory-efficient attention's backward (mem_eff_attention/kernel_backward.h), and whether keys and
    values accumulate outside registers: a matter of shared memory."""
    if width <= 64:
        return 64, 64, False
    if not half:
        return (128, 64, False) if roomy else (64, 64, False)
    if width <= 128 and roomy:
        return 128, 128, False
    if width <= 96:
        return 128, 64, False
    return (64, 64, True) if width <= 128 else (128, 64, True)


def _efficient_backward(blocks: int, length: int, keys: int, width: int, half: int, roomy: int) -> int:
    rows, columns, accumulates = efficient_tile(bool(half), width, bool(roomy))
    tile = (rows * columns * 4 + 16) * -(-width // columns)
    extra = 2 * round_up(keys, 64) * round_up(width, rows) * 4 if accumulates else 0
    return blocks * (-(-length // rows) * tile + extra)


COLUMN_REDUCTION, CUBLAS, EFFICIENT_BACKWARD = "column_reduction", "cublas", "efficient_backward"  # these depend on the card


def of_card(name: str, dims: Sequence[int], kernels: Kernels) -> tuple[int, ...]:
    """The dimensions of a formula that was recorded for some card, as another one has them."""
    if name == COLUMN_REDUCTION:
        return (*dims[:3], kernels.multiprocessors, kernels.threads)
    if name == EFFICIENT_BACKWARD:
        return (*dims[:5], kernels.roomy)
    return (kernels.cublas_bytes,) if name == CUBLAS else tuple(dims)


def _power_of_two_below(value: int, most: int) -> int:
    return most if value >= most else 1 << (max(value, 1).bit_length() - 1)


def _tiles(blocks: int, rows: int, tile_rows: int, tile_bytes: int) -> int:
    """Memory-efficient attention's gradient of the query: one tile of float32 and a lock per block of rows."""
    return blocks * -(-rows // tile_rows) * tile_bytes


def _slice(total: int, slices: int, row_bytes: int) -> int:
    """liger-kernel's ops/fused_linear_cross_entropy.py: a slice of all rows, of a length that is a power of two."""
    rows = -(-total // slices)
    return min(1 << (rows - 1).bit_length(), total) * row_bytes


TILE, SLICE = "tile", "slice"
FORMULAS: dict[str, Callable[..., int]] = {
    "bytes": lambda size: size,
    "embedding_partials": _embedding_partials,
    "embedding_indices": _embedding_indices,
    COLUMN_REDUCTION: _column_reduction,
    CUBLAS: lambda size: size,
    EFFICIENT_BACKWARD: _efficient_backward,
    "tiles": _tiles,
    "product": lambda *dims: math.prod(dims),
    TILE: lambda total, most, row_bytes: min(total, most) * row_bytes,  # one tile of a loop over rows
    SLICE: _slice,
}


@dataclass(frozen=True, slots=True)
class SizedTemporary:
    tensor: torch.Tensor
    bytes: int


@dataclass(frozen=True, slots=True)
class KeptWorkspace:
    """Taken at the first use in each thread and never returned."""

    name: str
    bytes: int


Step: TypeAlias = "torch.Tensor | SizedTemporary | Formula | KeptWorkspace | int"

# multiprocessors of a common card and threads per multiprocessor (CUDA C programming guide, technical specifications per capability)
_MULTIPROCESSORS = {(7, 0): 80, (7, 5): 40, (8, 0): 108, (8, 6): 82, (8, 9): 128, (9, 0): 132, (10, 0): 148, (12, 0): 170}
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}


def resident_threads(capability: tuple[int, int], multiprocessors: int | None = None) -> int:
    """Threads that can be on the card at once."""
    return (multiprocessors or _MULTIPROCESSORS.get(capability, 80)) * _THREADS.get(capability, 2048)


class Kernels:
    """The allocation order of CUDA's kernels for one capability and one version of PyTorch (the installed one by default).

    Who owns the workspaces of cuBLAS and cublasLt has changed (ATen/cuda/CublasHandlePool.cpp): cuBLAS kept one per thread until 2.14;
    cublasLt took 1 MiB per call until 2.8, kept it from 2.9 on (pytorch#156495), shared cuBLAS's from 2.11 on (pytorch#168175); 2.15 takes
    both anew for each call (pytorch#194311). Checked: 2.15 on the virtual GPU, 2.6 by published runs; the rest is read there.
    """

    def __init__(
        self,
        *,
        capability: tuple[int, int] = (8, 0),
        multiprocessors: int | None = None,
        torch_version: tuple[int, int] | None = None,
    ) -> None:
        self.capability = capability
        self.multiprocessors = multiprocessors or _MULTIPROCESSORS.get(capability, 80)
        self.threads = _THREADS.get(capability, 2048)
        self.torch_version = torch_version or installed_torch()
        self.roomy = int(capability in ((8, 0), (9, 0), (10, 0)))  # shared memory for the larger tiles of memory-efficient attention
        # getChosenWorkspaceSize: 32 MiB on sm_90 and later, else 4096 KiB × 2 + 16 KiB × 8
        self.cublas_bytes = 32 * MIB if capability >= (9, 0) else 8 * MIB + 128 * KIB

    def workspace(self) -> list[Step]:
        if self.torch_version >= (2, 15):
            return [Formula(CUBLAS, (self.cublas_bytes,))]
        at_least(self.capability, (9, 0))  # a block that is kept has the size of this card
        return [KeptWorkspace("cublas", self.cublas_bytes)]

    def lt_workspace(self) -> list[Step]:
        if self.torch_version >= (2, 15) or self.torch_version < (2, 9):
            return [constant(MIB)]
        return self.workspace() if self.torch_version >= (2, 11) else [KeptWorkspace("cublaslt", MIB)]
