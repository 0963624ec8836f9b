"""The time of one optimizer step: a roofline per kernel on the device, a launch cost per kernel on the host, and the two overlaid.

Device, per kernel: max(arithmetic, memory, floor). A matmul's arithmetic is its tiles in whole waves over the SMs (the best of a few tile
shapes and split-K factors, as cuBLAS picks; each tile also takes its time to begin and to be written), at the clock that the board's power
lets the step sustain (`device_speed`); everything else is its bytes over the bandwidth its kind reaches. Host, per kernel: a constant by
phase. In a phase the device starts when the host has launched, and runs no faster than it is fed:
end = max(max(host, device) + busy, host + launch).
Trainer reads the loss back once per micro-batch (`logging_nan_inf_filter`), so host and device meet there; accumulation repeats that.

Gradients are all-reduced over the last backward, sharded weights are gathered in every micro-batch; what cannot be hidden is added. What is
hidden takes SMs from the kernels beside it, and all ranks wait for the slowest: two constants, both from measurements that are no training
rows of ours. Known limits: kernels of one phase are taken as evenly mixed, caches are in the efficiency only; over PCIe collectives need
fewer SMs than are charged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from hfopt.schema import OpCost, Precision, StepTime
from hfopt.speed.device_speed import Speed, rate_error, sustained_clock

Floats = Any  # a numpy array of float64
PHASES: tuple[Literal["forward", "backward", "optimizer"], ...] = ("forward", "backward", "optimizer")
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.80), (64, 128, 0.80), (64, 64, 0.62), (32, 32, 0.30))
"""Tile shapes of cuBLAS/CUTLASS kernels and their rate against the largest: a smaller tile reuses each loaded value less often."""
SPLIT_K = (1, 2, 4, 8, 16)
COMPILED_LAUNCHES, COMPILED_BYTES = 0.35, 0.45
"""What torch.compile leaves of the memory-bound kernels of forward and backward, by fusing them: a chain of elementwise kernels becomes one
that reads its inputs and writes its result. Set from torchtune's and torchtitan's published rows with and without compile, together."""
HIDDEN_SHARE = 0.8  # of the backward's time that communication can overlap with: the last bucket cannot
TAKEN_SMS = 24 / 132
"""What collectives take from the kernels they are hidden behind: NCCL's all-gather on an H100 is 24 blocks for its 132 SMs
(forums.developer.nvidia.com/t/337991); steps of GPT and Llama on four cards computed 18.9 % slower beside them (arXiv 2507.03114)."""
RANK_SPREAD = 0.015
"""One standard deviation of the time that equal cards take for equal work: 8 % between the whiskers of a box plot, which are 5.4 of them
apart, on five clusters (arXiv 2208.11035). All wait for the slowest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTraffic:
    """What each device sends: in every micro-batch (sharded weights, their gradients) and once per step (gradients, updated weights).

    `host_s` is what offloading adds to a step: copies to and from the host, and the update there."""

    world_size: int = 1
    micro_batch_bytes: float = 0.0
    step_bytes: float = 0.0
    host_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """Of each group of kernels: arithmetic at the nominal clock, how much of it the matrix units multiply, memory traffic or the shortest
    time, bytes."""

    arithmetic_s: Floats
    multiplying_s: Floats
    other_s: Floats
    moved_bytes: Floats

    def seconds(self, clock: float) -> Floats:
        return np.maximum(self.arithmetic_s / clock, self.other_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Spent:
    step_s: float
    busy_s: float
    exposed_s: float  # communication that nothing hides


class StepTimer:
    """Prices one trace on one device: built once, asked for any batch and accumulation."""

    def __init__(
        self,
        ops: Sequence[OpCost],
        speed: Speed,
        precision: Precision,
        *,
        ranks: RankTraffic | None = None,
        tokens_per_sample: int | None = None,
        compiled: bool = False,
        captured: bool = False,
    ) -> None:
        """compiled: the ops are the eager step's, which a rule makes compiled ones. captured: one graph for each phase is launched."""
        self._ops, self._speed, self._ranks = tuple(ops), speed, ranks or RankTraffic()
        self._tokens = tokens_per_sample
        self._count = np.array([op.count * (_compiled_share(op, COMPILED_LAUNCHES) if compiled else 1) for op in ops])
        self._flops = np.array([(op.flops_constant, op.flops_slope) for op in ops]).reshape(-1, 2)
        self._bytes = np.array([(op.bytes_constant, op.bytes_slope) for op in ops]).reshape(-1, 2)
        if compiled:
            self._bytes *= np.array([_compiled_share(op, COMPILED_BYTES) / _compiled_share(op, COMPILED_LAUNCHES) for op in ops])[:, None]
        self._shapes = np.array([op.shape if len(op.shape) == 4 else ((0, 0),) * 4 for op in ops], dtype=float).reshape(-1, 4, 2)
        self._rate = np.array([_arithmetic_rate(op, speed, precision) for op in ops])
        self._bandwidth = np.array([speed.reduction_bytes_per_s if op.kind == "reduction" else speed.memory_bytes_per_s for op in ops])
        self._tiled = np.array([op.kind in ("matmul", "conv") and len(op.shape) == 4 for op in ops])
        self._phase = {phase: np.array([op.phase == phase for op in ops], dtype=bool) for phase in PHASES}
        self._sync = np.array([op.name.split(".")[0].split("::")[-1] == "_local_scalar_dense" for op in ops], dtype=bool)
        self._launches = {phase: float((self._count * ~self._sync)[mask].sum()) for phase, mask in self._phase.items()}
        if captured:
            self._launches |= {phase: min(1.0, self._launches[phase]) for phase in ("forward", "backward")}
        self._syncs = float(self._count[self._sync].sum()) + 1
        self._arithmetic = np.array([op.kind in ("matmul", "attention", "conv") for op in ops], dtype=bool)
        self._width = np.array([_width_weight(op, speed, precision) for op in ops])
        self._multiplying_rate = np.array([_multiplying_rate(op, speed, precision) for op in ops])
        self._peak = speed.peak_flops.get(_main_arithmetic(ops, precision)) or speed.peak_flops.get("fp32")

    def at(self, batch: int, accumulation: int = 1) -> StepTime:
        """One optimizer step of `accumulation` micro-batches of `batch` samples on each device."""
        work = self._work(batch)
        clock, power_w = self._sustained(work, accumulation)
        kernel_s = work.seconds(clock)
        spent = self._spent(kernel_s, accumulation)
        samples = batch * accumulation * self._ranks.world_size
        shares = self._shares(kernel_s, accumulation, spent.step_s)
        return StepTime(
            step_s=spent.step_s,
            busy_s=min(spent.busy_s, spent.step_s),
            samples_per_s=samples / spent.step_s,
            tokens_per_s=None if self._tokens is None else samples * self._tokens / spent.step_s,
            mfu=self._mfu(batch, accumulation, spent.step_s),
            bound=self._bound(kernel_s, spent),
            shares=shares,
            clock_share=clock if power_w is not None else None,
            power_w=power_w,
            rate_error=None if self._speed.card_error is None else rate_error(self._speed.card_error, shares),
        )

    def each_kernel_s(self, batch: int, accumulation: int = 1) -> list[float]:
        """Device seconds of one kernel of each group, at the clock the step sustains."""
        work = self._work(batch)
        kernel_s = work.seconds(self._sustained(work, accumulation)[0])
        return [float(seconds) for seconds in kernel_s / np.maximum(self._count, 1e-9)]

    def recomputing_s(self, batch: int, accumulation: int, share: float) -> float:
        """The step where each backward runs this share of the forward again: its kernels on the device, its launches on the host."""
        work = self._work(batch)
        return self._spent(work.seconds(self._sustained(work, accumulation)[0]), accumulation, recomputed=share).step_s

    def uncompiled_s(self, batch: int, accumulation: int) -> float:
        """Device seconds of what no compiler makes quicker: products, attention, convolutions, and the update."""
        work = self._work(batch)
        kernel_s = work.seconds(self._sustained(work, accumulation)[0])
        update = self._phase["optimizer"]
        return accumulation * float(kernel_s[self._arithmetic & ~update].sum()) + float(kernel_s[update].sum())

    def _work(self, batch: int) -> _Work:
        """What each group of kernels asks of the device at this batch."""
        flops = self._flops[:, 0] + self._flops[:, 1] * batch
        moved = self._bytes[:, 0] + self._bytes[:, 1] * batch
        arithmetic = np.where(self._arithmetic, flops / self._rate, 0.0)
        if self._tiled.any():
            shapes = self._shapes[self._tiled, :, 0] + self._shapes[self._tiled, :, 1] * batch
            quantised = _tiled_seconds(shapes, self._rate[self._tiled], self._speed)
            repeats = np.maximum(flops[self._tiled] / np.maximum(2 * shapes.prod(axis=1), 1), 1)  # a convolution's two gradients are one op
            arithmetic[self._tiled] = np.maximum(quantised * repeats, arithmetic[self._tiled])
        running = self._count * ~self._sync
        waiting = np.maximum(moved / self._bandwidth, self._speed.kernel_floor_s)
        multiplying = np.where(self._arithmetic, flops / self._multiplying_rate, 0.0)
        return _Work(
            arithmetic_s=arithmetic * running,
            multiplying_s=multiplying * running,
            other_s=waiting * running,
            moved_bytes=moved * running,
        )

    def _sustained(self, work: _Work, accumulation: int) -> tuple[float, float | None]:
        """(the clock as a share of the nominal one, the board's average power): 1 and None where nothing is known of its power."""
        board = self._speed.board
        if board is None:
            return 1.0, None
        repeat = np.where(self._phase["optimizer"], 1, accumulation)
        moved_bytes = float((work.moved_bytes * repeat).sum())

        def average_w(clock: float) -> float:
            kernel_s = work.seconds(clock)
            multiplying_s = work.multiplying_s / clock
            drawn = board.joules(
                plain_s=float((kernel_s * repeat).sum()),
                weighted_s=float((multiplying_s * self._width * repeat).sum()),
                moved_bytes=moved_bytes,
                clock=clock,
            )
            return board.static_w + drawn / self._spent(kernel_s, accumulation).step_s

        clock = sustained_clock(board, average_w)
        return clock, average_w(clock)

    def _spent(self, kernel_s: Floats, accumulation: int, *, recomputed: float = 0.0) -> _Spent:
        """Host and device laid over each other, what is sent and what is waited for added."""
        cost, launch = self._speed.host, self._launches
        busy = {phase: float(kernel_s[mask].sum()) for phase, mask in self._phase.items()}
        forward_host_s = launch["forward"] * cost.forward_s
        busy["backward"] += recomputed * busy["forward"]
        backward_host_s = launch["backward"] * cost.backward_s + recomputed * forward_host_s
        phases = [(forward_host_s, busy["forward"]), (backward_host_s, busy["backward"])]
        micro_s = _overlap(phases, self._speed.asynchronous) + self._syncs * cost.sync_s + cost.micro_batch_s
        update_s = _overlap([(launch["optimizer"] * cost.optimizer_s, busy["optimizer"])], self._speed.asynchronous) + cost.step_s
        busy_s = accumulation * (busy["forward"] + busy["backward"]) + busy["optimizer"]
        own_s = accumulation * micro_s + update_s
        sent_s, exposed_s = self._communication(busy["backward"], micro_s, accumulation)
        exposed_s += lost_to_ranks_s(self._ranks.world_size, own_s + exposed_s, sent_s - exposed_s, busy_share=min(1.0, busy_s / own_s))
        exposed_s += self._ranks.host_s
        return _Spent(step_s=own_s + exposed_s, busy_s=busy_s + exposed_s, exposed_s=exposed_s)

    def _communication(self, backward_s: float, micro_s: float, accumulation: int) -> tuple[float, float]:
        """Seconds on the link, and those of them that neither forward nor backward can hide."""
        ranks, link = self._ranks, self._speed.link_bytes_per_s
        if ranks.world_size < 2 or not link:
            return 0.0, 0.0
        gathered_s, reduced_s = ranks.micro_batch_bytes / link, ranks.step_bytes / link
        exposed_s = accumulation * max(0.0, gathered_s - HIDDEN_SHARE * micro_s) + max(0.0, reduced_s - HIDDEN_SHARE * backward_s)
        return accumulation * gathered_s + reduced_s, exposed_s

    def _mfu(self, batch: int, accumulation: int, step_s: float) -> float | None:
        """Useful arithmetic over the peak: recomputation does not count, so at most three times the forward's."""
        if not self._peak:
            return None
        flops = (self._flops[:, 0] + self._flops[:, 1] * batch) * self._count * self._arithmetic
        forward = float(flops[self._phase["forward"]].sum())
        useful = min(forward + float(flops[self._phase["backward"]].sum()), 3 * forward)
        return useful * accumulation / step_s / self._peak

    def _bound(self, kernel_s: Floats, spent: _Spent) -> Literal["compute", "bandwidth", "launch", "communication"]:
        if spent.exposed_s > 0.3 * spent.step_s:
            return "communication"
        if spent.busy_s < 0.7 * spent.step_s:
            return "launch"
        arithmetic_s = float(kernel_s[self._arithmetic].sum())
        return "compute" if arithmetic_s >= 0.5 * float(kernel_s.sum()) else "bandwidth"

    def _shares(self, kernel_s: Floats, accumulation: int, step_s: float) -> dict[str, float]:
        repeat = np.where(self._phase["optimizer"], 1, accumulation)
        shares: dict[str, float] = {}
        for op, seconds in zip(self._ops, kernel_s * repeat, strict=True):
            kind = "optimizer" if op.phase == "optimizer" else op.kind
            shares[kind] = shares.get(kind, 0.0) + float(seconds) / step_s
        return dict(sorted(shares.items(), key=lambda item: -item[1]))


def step_time(ops: Sequence[OpCost], speed: Speed, precision: Precision, *, batch: int, accumulation: int = 1) -> StepTime:
    """One question, one answer; a `StepTimer` answers many on the same trace."""
    return StepTimer(ops, speed, precision).at(batch, accumulation)


def _compiled_share(op: OpCost, share: float) -> float:
    fused = op.kind in ("elementwise", "copy", "reduction") and op.phase != "optimizer"
    return share if fused else 1.0


def _overlap(phases: Sequence[tuple[float, float]], asynchronous: bool) -> float:
    """Seconds until both host and device are through the phases, each given as (host, device)."""
    if not asynchronous:
        return sum(host + device for host, device in phases)
    host_s = device_s = 0.0
    for launch_s, busy_s in phases:
        device_s = max(max(host_s, device_s) + busy_s, host_s + launch_s)
        host_s += launch_s
    return device_s


def lost_to_ranks_s(world_size: int, step_s: float, hidden_s: float, *, busy_share: float) -> float:
    """Of a step: kernels slower beside communication, where the card does not wait for its host, and waiting for the slowest rank."""
    slowed_s = TAKEN_SMS * hidden_s * busy_share
    return slowed_s + RANK_SPREAD * _slowest(world_size) * (step_s + slowed_s)


@cache
def _slowest(ranks: int) -> float:
    """By how many standard deviations the slowest of so many is expected to be slower than their mean (Blom's formula)."""
    return 0.0 if ranks < 2 else NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def _arithmetic_of(dtype: str, precision: Precision) -> str:
    return {"float16": "fp16", "bfloat16": "bf16"}.get(dtype, "tf32" if precision == "tf32" else "fp32")


def _main_arithmetic(ops: Sequence[OpCost], precision: Precision) -> str:
    weights: dict[str, float] = {}
    for op in ops:
        if op.kind in ("matmul", "conv", "attention"):
            name = _arithmetic_of(op.dtype, precision)
            weights[name] = weights.get(name, 0.0) + op.count * (op.flops_constant + op.flops_slope)
    return max(weights, key=lambda name: weights[name], default="fp32")


def _arithmetic_rate(op: OpCost, speed: Speed, precision: Precision) -> float:
    rate = speed.matmul_flops.get(_arithmetic_of(op.dtype, precision)) or speed.matmul_flops["fp32"]
    attention = speed.efficient_share if "efficient" in op.name else speed.flash_share
    return rate * {"attention": attention, "conv": speed.conv_share}.get(op.kind, 1.0)


def _width_weight(op: OpCost, speed: Speed, precision: Precision) -> float:
    """What a product in this arithmetic adds to an SM's energy, in shares of what it takes anyway."""
    if speed.board is None or op.kind not in ("matmul", "conv", "attention"):
        return 0.0
    kind = _arithmetic_of(op.dtype, precision)
    kind = kind if kind in speed.peak_flops else "fp32"
    return speed.board.width_weight(speed.peak_flops[kind], kind)


def _multiplying_rate(op: OpCost, speed: Speed, precision: Precision) -> float:
    """While nothing else is waited for."""
    kind = _arithmetic_of(op.dtype, precision)
    if speed.board is None or kind == "fp32" or kind not in speed.peak_flops:
        return speed.matmul_flops.get(kind) or speed.matmul_flops["fp32"]
    return speed.peak_flops[kind] * speed.board.reached


def _tiled_seconds(shapes: Floats, rates: Floats, speed: Speed) -> Floats:
    """A matmul as tiles in whole waves: the fastest of the tile shapes, with the inner dimension split where that fills the card."""
    m, n, k, batch = np.maximum(shapes, 1).T
    best = np.full(m.shape, np.inf)
    per_sm = rates / speed.sms
    for tile_m, tile_n, share in TILES:
        tiles = batch * np.ceil(m / tile_m) * np.ceil(n / tile_n)
        for split in SPLIT_K:
            inner = np.ceil(k / split / 32) * 32
            waves = np.ceil(tiles * split / speed.sms)
            seconds = waves * tile_m * tile_n * (2 * inner / (per_sm * share) + speed.tile_element_s)
            if split > 1:
                seconds = seconds + batch * m * n * 4 * 2 * split / speed.memory_bytes_per_s  # partial sums, written and read in float32
            best = np.minimum(best, seconds)
    return best
