"""How fast a device is: a card by its peaks, shares and power, a CPU by measuring it.

A card's peaks and bandwidth times the shares of `efficiency.toml`, its board's power and what the host needs to launch a kernel, in one
value the step-time model reads.

`speed_of` needs the card's facts (bandwidth, SMs, dense peaks); a card the catalog does not know has no speed, and None says so.

The speed of this CPU, measured in a fraction of a second: a matmul, a large copy, and many tiny operations.

On the CPU host and device are one, so launching and computing add up. The matmul gives the arithmetic rate, the copy the bandwidth, the
tiny operations what every operation costs besides. Known limits: clocks and caches shift from run to run, and other processes
take their share, so ratios between settings hold better than rates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hfopt.compat import installed_torch
from hfopt.schema import Gpu
from hfopt.speed.board_power import Board, board_of
from hfopt.speed.efficiency import card_error, efficiency

FLASH_2 = (2, 2)  # the torch whose own flash attention is FlashAttention-2 (its release notes)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCost:
    """Seconds the host spends per launched kernel, per wait for the device and per optimizer step."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    sync_s: float
    step_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """A device as the step-time model sees it. Rates are reachable ones at the nominal clock: peak × efficiency."""

    name: str
    matmul_flops: Mapping[str, float]  # by arithmetic: fp32, tf32, fp16, bf16
    peak_flops: Mapping[str, float]  # the data sheet's, for MFU
    flash_share: float  # of the matmul rate
    efficient_share: float  # the memory-efficient attention kernel's
    conv_share: float
    memory_bytes_per_s: float
    reduction_bytes_per_s: float
    sms: int
    kernel_floor_s: float
    host: HostCost
    asynchronous: bool = True  # the host runs ahead of the device
    link_bytes_per_s: float | None = None  # between devices, one direction
    board: Board | None = None  # None: nothing is known to hold the clock
    card_error: float | None = None  # that eight of ten rates stay within; None: not known


def architecture(capability: tuple[int, int] | None) -> tuple[str, dict[str, Any]]:
    """The row for a capability, filled up with what all share: (name of the architecture, its shares)."""
    rows: dict[str, dict[str, Any]] = efficiency()["architectures"]
    wanted = "8.0" if capability is None else f"{capability[0]}.{capability[1]}"
    name = next((key for key, row in rows.items() if wanted in row["capabilities"]), None)
    if name is None:
        major = int(wanted.split(".")[0])
        name = next((key for key, row in rows.items() if any(c.startswith(f"{major}.") for c in row["capabilities"])), "hopper")
    shared: dict[str, Any] = efficiency()["shared"]
    return name, {**shared, **rows[name], "matmul": {**shared["matmul"], **rows[name].get("matmul", {})}}


def speed_of(gpu: Gpu, *, torch_version: tuple[int, int] | None = None) -> Speed | None:
    """The card's speed under this version of torch (None: the installed one); None when the catalog has no peak or bandwidth for it."""
    fp32 = gpu.peak_flops.get("fp32")
    if gpu.bandwidth_bytes_per_s is None or fp32 is None:
        return None
    version = torch_version or installed_torch()
    _, shares = architecture(gpu.capability)
    kernel, matmul = efficiency()["kernel"], shares["matmul"]
    flash = shares["flash"] if version >= FLASH_2 else min(shares["flash"], shares["flash_before_2"])
    return Speed(
        name=gpu.name,
        matmul_flops={kind: gpu.peak_flops[kind] * share for kind, share in matmul.items() if kind in gpu.peak_flops},
        peak_flops=dict(gpu.peak_flops),
        flash_share=flash / matmul["fp16"],
        efficient_share=shares["efficient"] / matmul["fp16"],
        conv_share=kernel["conv_share"],
        memory_bytes_per_s=gpu.bandwidth_bytes_per_s * shares["memory"],
        reduction_bytes_per_s=gpu.bandwidth_bytes_per_s * shares["reduction"],
        sms=gpu.sms or max(1, round(fp32 / 1.6e11)),
        kernel_floor_s=kernel["floor_us"] * 1e-6,
        host=host_cost(version),
        link_bytes_per_s=gpu.nvlink_bytes_per_s or gpu.pcie_bytes_per_s,
        board=board_of(gpu, efficiency()["power"]),
        card_error=card_error(gpu.catalog_name or gpu.name),
    )


def host_cost(torch_version: tuple[int, int]) -> HostCost:
    """Seconds per launch under this version of torch."""
    host = efficiency()["host"]
    slower = 1e-6 * (host["before_torch_2"] if torch_version < (2, 0) else 1.0)
    return HostCost(
        forward_s=host["forward_us"] * slower,
        backward_s=host["backward_us"] * slower,
        optimizer_s=host["optimizer_us"] * slower,
        sync_s=host["sync_us"] * slower,
        step_s=host["step_us"] * slower,
    )


REPEATS = 5


def cpu_speed() -> Speed:
    """Measured now, with the threads torch would use."""
    import torch

    left, right = torch.rand(512, 512), torch.rand(512, 512)
    flops = 2 * 512**3 / _best(lambda: left @ right)
    source = torch.rand(4 << 20)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() * 4 / _best(lambda: target.copy_(source))
    op_s = _tiny_op_s()
    return Speed(
        name="this CPU",
        matmul_flops={"fp32": flops, "bf16": flops, "fp16": flops},
        peak_flops={"fp32": flops},
        flash_share=0.5,
        efficient_share=0.5,
        conv_share=0.5,
        memory_bytes_per_s=bandwidth,
        reduction_bytes_per_s=bandwidth,
        sms=1,
        kernel_floor_s=0.0,
        host=HostCost(forward_s=2 * op_s, backward_s=2 * op_s, optimizer_s=2 * op_s, sync_s=0.0, step_s=1e-3),
        asynchronous=False,
    )


def _tiny_op_s() -> float:
    import torch

    one = torch.zeros(8)

    def many() -> None:
        for _ in range(200):
            one.add(1)

    return _best(many) / 200


def _best(run: Callable[[], object]) -> float:
    """The fastest of a few runs: everything else on the machine only ever slows it."""
    run()
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
