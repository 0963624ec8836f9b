"""The speed of this CPU, measured in a fraction of a second: a matmul, a large copy, and many tiny operations.

On the CPU host and device are one, so launching and computing add up. The matmul gives the arithmetic rate, the copy the bandwidth, the
tiny operations what every operation costs besides. Known limits: clocks and caches shift from run to run, and other processes
take their share, so ratios between settings hold better than rates.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hfopt.speed.speed import HostCost, Speed

REPEATS = 5


def cpu_speed() -> Speed:
    """Measured now, with the threads torch would use."""
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
        attention_share=0.5,
        conv_share=0.5,
        memory_bytes_per_s=bandwidth,
        reduction_bytes_per_s=bandwidth,
        sms=1,
        kernel_floor_s=0.0,
        host=HostCost(forward_s=2 * op_s, backward_s=2 * op_s, optimizer_s=2 * op_s, sync_s=0.0, step_s=1e-3),
        asynchronous=False,
        fitted_on="measured",
    )


def _tiny_op_s() -> float:
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
