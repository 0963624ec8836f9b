"""The cost of an op is checked against what can be counted by hand, and against PyTorch's own FLOP counter on whole models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hfopt.trace.op_cost import Cost, cost

aten = torch.ops.aten


class Collect(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.costs: list[tuple[str, Cost | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.costs.append((func.__name__, cost(func, args, kwargs or {}, out)))
        return out

    @property
    def flops(self) -> float:
        return sum(c.flops * c.launches for _, c in self.costs if c and c.kind in ("matmul", "conv", "attention"))


def costs_of(func: Any, *args: Any, **kwargs: Any) -> Cost | None:
    return cost(func, args, kwargs, func(*args, **kwargs))


def test_a_matmul_is_2mnk_and_reads_and_writes_each_operand_once() -> None:
    found = costs_of(aten.addmm.default, torch.zeros(7), torch.zeros(5, 3), torch.zeros(3, 7))
    assert found is not None
    assert (found.kind, found.flops, found.shape, found.dtype) == ("matmul", 2 * 5 * 3 * 7, (5, 7, 3, 1), "float32")
    assert found.moved_bytes == 4 * (5 * 3 + 3 * 7 + 5 * 7)


def test_a_batched_matmul_keeps_its_batch() -> None:
    found = costs_of(aten.bmm.default, torch.zeros(6, 5, 3, dtype=torch.bfloat16), torch.zeros(6, 3, 7, dtype=torch.bfloat16))
    assert found is not None and found.shape == (5, 7, 3, 6) and found.dtype == "bfloat16" and found.flops == 2 * 6 * 5 * 3 * 7


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.view.default, (torch.zeros(4), [2, 2])),
        (aten.transpose.int, (torch.zeros(2, 2), 0, 1)),
        (aten.empty.memory_format, ([4],)),
        (aten.detach.default, (torch.zeros(4),)),
    ],
)
def test_views_and_empty_memory_launch_nothing(func: Any, args: Any) -> None:
    assert costs_of(func, *args) is None


def test_an_expanded_dimension_is_read_once() -> None:
    row = torch.zeros(1, 8).expand(100, 8)
    found = costs_of(aten.add.Tensor, torch.zeros(100, 8), row)
    assert found is not None and found.moved_bytes == 4 * (800 + 8 + 800)


def test_a_gather_reads_what_it_returns_and_not_the_table() -> None:
    found = costs_of(aten.embedding.default, torch.zeros(10_000, 4), torch.zeros(3, dtype=torch.long))
    assert found is not None and found.kind == "embedding" and found.moved_bytes == 3 * 8 + 2 * 3 * 4 * 4


def test_in_place_ops_read_and_write() -> None:
    found = costs_of(aten.add_.Tensor, torch.zeros(10), torch.zeros(10))
    assert found is not None and found.moved_bytes == 3 * 40
    filled = costs_of(aten.zero_.default, torch.zeros(10))
    assert filled is not None and filled.moved_bytes == 40


def test_multi_tensor_kernels_are_few_and_move_everything() -> None:
    tensors = [torch.zeros(100) for _ in range(250)]
    found = costs_of(aten._foreach_mul_.Scalar, tensors, 0.5)
    assert found is not None and found.kind == "optimizer" and found.launches == 3  # 110 tensors a launch
    assert found.moved_bytes * found.launches == pytest.approx(2 * 250 * 400)


def test_reading_a_number_back_is_kept_as_a_synchronisation() -> None:
    found = costs_of(aten._local_scalar_dense.default, torch.zeros(()))
    assert found is not None and found.kind == "other" and found.moved_bytes == 0


@pytest.mark.parametrize("causal", [False, True])
def test_attention_counts_scores_and_values(causal: bool) -> None:
    q = torch.zeros(2, 3, 16, 8)
    found = costs_of(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, q, 0.0, causal)
    assert found is not None and found.kind == "attention"
    assert found.flops == 4 * 2 * 3 * 16 * 16 * 8 * (0.5 if causal else 1)


def test_whole_networks_agree_with_pytorchs_flop_counter() -> None:
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 25, 10),
    )
    data = torch.zeros(2, 3, 16, 16, requires_grad=True)
    with FlopCounterMode(display=False) as reference, Collect() as ours:
        network(data).sum().backward()
    assert ours.flops == reference.get_total_flops()


def test_a_grouped_convolution_sees_only_its_own_channels() -> None:
    with Collect() as ours:
        torch.nn.Conv2d(8, 8, 3, groups=4, bias=False)(torch.zeros(2, 8, 7, 7))
    assert ours.flops == 2 * (2 * 8 * 5 * 5) * (2 * 9)


def test_a_recurrent_layer_is_one_launch_per_time_step() -> None:
    layer = torch.nn.LSTM(8, 16, batch_first=True)
    with Collect() as ours:
        layer(torch.zeros(2, 5, 8))
    recurrent = [c for _, c in ours.costs if c and c.kind == "matmul"]
    assert sum(c.launches for c in recurrent) >= 5
    assert ours.flops == pytest.approx(2 * 2 * 5 * (4 * 16 * 8 + 4 * 16 * 16), rel=0.1)
