"""The rates of a handful of kernels on a device that is here: matrix products by dtype, a copy, a reduction, tiny operations.

Each is repeated and the fastest counts: everything else on the machine only ever slows it. Sizes grow until one run is long enough to be
timed, so that the same code serves a laptop's CPU and a data centre's card.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hfopt.compat.torch_patches import set_tf32, tf32_is_on

REPEATS = 5
LONG_ENOUGH_S = 0.01
_SIDES = {"cpu": (256, 2048), "cuda": (1024, 16384)}
_COPIED = {"cpu": 1 << 26, "cuda": 1 << 30}  # bytes: beyond the caches
_TINY = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRates:
    matmul_flops: dict[str, float]
    memory_bytes_per_s: float
    reduction_bytes_per_s: float
    op_s: float


def kernel_rates(device: torch.device) -> KernelRates:
    """Measured now, in some seconds."""
    matmul = {name: rate for name, dtype in _arithmetics(device) if (rate := _matmul_rate(device, name, dtype)) is not None}
    if device.type == "cpu":
        matmul.setdefault("fp16", matmul.get("bf16", matmul["fp32"]))
        matmul.setdefault("bf16", matmul["fp32"])
    count = _COPIED[device.type] // 4
    source = torch.rand(count, device=device)
    target = torch.empty_like(source)
    copy_s = best_s(lambda: target.copy_(source), device)
    sum_s = best_s(lambda: source.sum(), device)
    return KernelRates(
        matmul_flops=matmul,
        memory_bytes_per_s=2 * 4 * count / copy_s,
        reduction_bytes_per_s=4 * count / sum_s,
        op_s=_tiny_s(device),
    )


def best_s(run: Callable[[], object], device: torch.device) -> float:
    """The fastest of a few runs, the device waited for."""
    run()
    _wait(device)
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        run()
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _arithmetics(device: torch.device) -> Iterator[tuple[str, torch.dtype]]:
    yield "fp32", torch.float32
    if device.type != "cuda":
        yield "bf16", torch.bfloat16
        return
    capability = torch.cuda.get_device_capability(device)
    yield "fp16", torch.float16
    if capability >= (8, 0):
        yield "tf32", torch.float32
        yield "bf16", torch.bfloat16


def _matmul_rate(device: torch.device, name: str, dtype: torch.dtype) -> float | None:
    """Operations of a second; None where this build cannot multiply in that dtype."""
    side, largest = _SIDES[device.type]
    with _tf32(name == "tf32", device):
        while True:
            try:
                left, right = (torch.rand(side, side, device=device).to(dtype) for _ in range(2))
                spent_s = best_s(lambda left=left, right=right: left @ right, device)  # type: ignore[misc]
            except RuntimeError:
                return None
            if spent_s >= LONG_ENOUGH_S or side >= largest:
                return 2 * side**3 / spent_s
            side *= 2


@contextmanager
def _tf32(on: bool, device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    before = tf32_is_on()
    set_tf32(on)
    try:
        yield
    finally:
        set_tf32(before)


def _tiny_s(device: torch.device) -> float:
    one = torch.zeros(8, device=device)

    def many() -> None:
        for _ in range(_TINY):
            one.add(1)

    return best_s(many, device) / _TINY


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
