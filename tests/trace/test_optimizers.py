"""The optimizer the Trainer would make: its groups, and what it keeps for each weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hfopt.errors import TraceError
from hfopt.trace.trainer_step import make_optimizer, parameter_groups

MODEL = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5))


class CountOps(TorchDispatchMode):  # type: ignore[misc]
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def state_bytes(optim: str, options: str | None = None) -> int:
    """What the optimizer keeps for each weight after a step."""
    optimizer = make_optimizer(MODEL, optim, options)
    MODEL(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor) and value.ndim]
    return sum(value.nbytes for value in states)


@pytest.mark.parametrize(
    ("optim", "options", "copies"),
    [
        ("adamw_torch", None, 2),
        ("adamw_torch_fused", None, 2),
        ("adagrad", None, 1),
        ("sgd", None, 0),
        ("sgd", "momentum=0.9", 1),
        ("rmsprop", None, 1),
        ("rmsprop", "momentum=0.9, centered=True", 3),
    ],
)
def test_the_states_of_each_optimizer(optim: str, options: str | None, copies: int) -> None:
    assert state_bytes(optim, options) == copies * sum(parameter.nbytes for parameter in MODEL.parameters())


def test_a_loop_over_the_parameters_launches_more_than_one_kernel_for_all() -> None:
    def kernels(optim: str) -> int:
        model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(8)))
        optimizer = make_optimizer(model, optim)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()  # makes the states
        with CountOps() as counted:
            optimizer.step()
        return counted.calls

    assert kernels("adamw_hf") > 2 * kernels("adamw_torch") > 2 * kernels("adamw_torch_fused")


@pytest.mark.parametrize("optim", ["adamw_8bit", "lion_8bit", "paged_adamw_8bit"])
def test_the_update_of_bitsandbytes_goes_through_every_weight(optim: str) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = make_optimizer(model, optim)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    with CountOps() as counted:
        optimizer.step()
    assert counted.calls >= 2, "a second step costs kernels, though it allocates nothing"


def test_norms_and_biases_do_not_decay_and_nothing_to_train_is_said() -> None:
    decaying, others = parameter_groups(MODEL)
    assert [parameter.shape for parameter in decaying["params"]] == [(5, 3)] and others["weight_decay"] == 0 and len(others["params"]) == 3
    with pytest.raises(TraceError, match="no parameter of the model is trained"):
        make_optimizer(torch.nn.ReLU(), "sgd")
    with pytest.raises(TraceError, match="'lomo' cannot be traced"):
        make_optimizer(MODEL, "lomo")
