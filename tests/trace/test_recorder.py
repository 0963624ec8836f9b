"""What the recorder sees: values that steer, gradients added in place, models that cannot be traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hfopt.errors import TraceError
from hfopt.memory.step_memory import estimate
from hfopt.schema import Checkpointing, StepSettings, Workload
from hfopt.trace.fake_tensors import FastFake
from hfopt.trace.tracer import _explained

Make = Callable[..., Workload]


class _Model(torch.nn.Module):
    """A linear layer and whatever a test does with its output."""

    def __init__(self, then: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(256, 256)
        self.then = then

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.then(self.linear(x), mask).float().sum()}


def _workload(make: Make, then: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Workload:
    def batch(size: int) -> dict[str, Any]:
        return {"x": torch.zeros(size, 256), "mask": torch.ones(size, 4, dtype=torch.long)}

    return replace(make(), build_model=lambda: _Model(then), make_batch=batch)


def test_a_branch_on_the_mask_follows_its_true_values(tiny_gpt2: Make) -> None:
    def branch(y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return y if bool(mask.all()) else torch.cat([y] * 64)

    cheap = estimate(_workload(tiny_gpt2, branch), StepSettings()).curve.peak(1024)
    dear = estimate(_workload(tiny_gpt2, lambda y, mask: branch(y, mask * 0)), StepSettings()).curve.peak(1024)
    assert dear.allocated_bytes > cheap.allocated_bytes + 1024 * 50 * 256 * 4


def test_a_layer_that_may_be_skipped_is_not(tiny_gpt2: Make) -> None:
    def skip(y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return y if torch.rand([]) < 0.9 else torch.cat([y] * 64)

    assert estimate(_workload(tiny_gpt2, skip), StepSettings()).curve.peak(1024).allocated_bytes > 1024 * 64 * 256 * 4


def test_rows_chosen_by_a_known_mask_have_their_true_number(tiny_gpt2: Make) -> None:
    def choose(y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return y[mask[:, 0].bool()]

    assert estimate(_workload(tiny_gpt2, choose), StepSettings()).curve.peak(8).allocated_bytes > 0


def test_a_shape_that_depends_on_unknown_data_is_refused_with_the_line(tiny_gpt2: Make) -> None:
    def choose(y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return y[y > 0]  # the offending line

    with pytest.raises(TraceError, match=r"test_recorder\.py.*the offending line"):
        estimate(_workload(tiny_gpt2, choose), StepSettings())


def test_half_precision_keeps_half_the_activations(tiny_gpt2: Make) -> None:
    workload = tiny_gpt2(n_embd=256, n_layer=3, vocab_size=64)
    full, half = (estimate(workload, StepSettings(precision=p)).curve.peak(64).breakdown for p in ("fp32", "bf16"))
    assert full is not None
    assert half is not None
    assert 0.4 < half.activations_bytes / full.activations_bytes < 0.9  # norms and softmax stay in float32


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adafactor", "sgd", "paged_adamw_8bit", "lion_8bit", "adamw_bnb_8bit"])
def test_optimizers_keep_their_own_state(tiny_gpt2: Make, optim: str) -> None:
    workload = tiny_gpt2(n_embd=512, vocab_size=128)
    weights = sum(p.numel() * 4 for p in workload.build_model().parameters())
    state = estimate(workload, StepSettings(optim=optim)).curve.peak(1).breakdown
    assert state is not None
    share = {"adamw_torch_fused": 2, "adafactor": 0, "sgd": 0, "paged_adamw_8bit": 0, "lion_8bit": 0.25, "adamw_bnb_8bit": 0.5}[optim]
    assert state.optimizer_bytes / weights == pytest.approx(share, abs=0.08)


def test_an_optimizer_that_cannot_be_traced_is_named(tiny_gpt2: Make) -> None:
    with pytest.raises(TraceError, match="galore_adamw"):
        estimate(tiny_gpt2(), StepSettings(optim="galore_adamw"))


def test_accumulation_keeps_gradients_through_the_second_micro_batch(tiny_gpt2: Make) -> None:
    workload = tiny_gpt2(n_embd=256)
    once, often = (estimate(workload, StepSettings(accumulation=n)).curve.peak(32).allocated_bytes for n in (1, 4))
    assert often > once


@pytest.mark.parametrize("reentrant", [True, False])
def test_fp16_with_a_scaler_and_both_kinds_of_checkpointing(tiny_gpt2: Make, reentrant: bool) -> None:
    settings = StepSettings(precision="fp16", checkpointing=Checkpointing(every_n_layers=1, use_reentrant=reentrant))
    assert estimate(tiny_gpt2(), settings).curve.peak(8).reserved_bytes > 0


def test_a_gradient_is_written_into_the_zeros_made_for_it(tiny_gpt2: Make) -> None:
    """As on CUDA: for fake tensors, autograd's formulas write into a copy."""
    wide = 64 * 256
    chosen: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {  # with how many tensors of this width live at the peak
        "index_select": (1, lambda z: z.index_select(1, torch.arange(4))),
        "gather": (2, lambda z: z.gather(1, torch.zeros(len(z), 4, dtype=torch.long))),  # its backward keeps the input
        "indexing": (1, lambda z: z[:, torch.arange(4)]),
    }
    for name, (live, choose) in chosen.items():
        workload = _workload(tiny_gpt2, lambda y, mask, choose=choose: choose(torch.cat([y] * 64, dim=1)))
        peak = estimate(workload, StepSettings()).curve.peak(1024)
        assert live < peak.allocated_bytes / (1024 * wide * 4) < live + 0.5, name


def test_what_trl_itself_refuses_is_no_fault_of_the_trace() -> None:
    code = compile("raise ValueError('Unknown loss type: kto_pair')", "/site-packages/trl/trainer/dpo_trainer.py", "exec")
    with pytest.raises(ValueError, match="kto_pair") as raised:
        exec(code)
    words = str(_explained(raised.value, SimpleNamespace(last_operation=None, module="")))  # type: ignore[arg-type]
    assert words == "TRL's own trainer refuses this config: Unknown loss type: kto_pair"


def test_a_quickly_made_fake_tensor_is_what_its_constructor_makes() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    run = FastFake(mode)
    with mode:
        weight = torch.empty(4, 6)
        slow = torch.empty(6, 4)
    view = run(torch.ops.aten.t.default, (weight,), {})
    unsafe = run(torch.ops.aten._unsafe_view.default, (weight, [2, 12]), {})
    for _ in range(2):  # computed, then remembered
        fresh = run(torch.ops.aten.add.Tensor, (slow, slow), {})
        for made in (view, unsafe, fresh):
            assert type(made) is FakeTensor and made.device.type == "cpu" and vars(made) == vars(slow)
            assert torch._C._dispatch_keys(made) == torch._C._dispatch_keys(slow)
    assert view.shape == (6, 4) and view.stride() == (1, 6) and unsafe.shape == (2, 12)
    assert view.untyped_storage()._cdata == unsafe.untyped_storage()._cdata == weight.untyped_storage()._cdata
    assert not mode.in_kernel_invocation
