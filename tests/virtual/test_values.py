"""Small integer and boolean tensors keep their true values on the virtual GPU, because models choose their kernels by them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from hfopt.virtual.environment import SITE

CODE = """
import torch
mask = torch.ones(4, 8, dtype=torch.long).cuda()
facts["all"] = [bool(mask.all()), mask.sum().item()]
padded = mask.clone()
padded[1, 5:] = 0
facts["padded"] = [bool(padded.bool().all()), padded.to(torch.bool).sum(-1).tolist()]
x = torch.randn(4, 8, 16, device="cuda")
facts["selected"] = list(x[padded.bool()].shape)
facts["nonzero"] = list(torch.nonzero(padded).shape)
facts["view"] = torch.arange(6, device="cuda").view(2, 3)[:, 1].cpu().tolist()
facts["labels"] = (torch.tensor([[1, -100, 3]]).to("cuda", non_blocking=True) != -100).sum().item()
facts["floats"] = [x.mean().item(), bool(torch.isnan(x).any())]
unknown = torch.ones(3, dtype=torch.long, device="cuda")
unknown.random_()
facts["unknown"] = unknown.sum().item()
weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=1.0)
counted = torch.arange(3, device="cuda")

def closure():
    facts["in_closure"] = counted.sum().item()
    weight.grad = torch.ones_like(weight)
    return weight.sum()

optimizer.step(closure)
optimizer.step()
optimizer.zero_grad()
facts["after_step"] = counted.sum().item()
picked = torch.arange(6, device="cuda")
facts["picked"] = [picked[picked > 3].tolist(), picked.masked_select(picked < 2).tolist()]
facts["selected_floats"] = list(x.masked_select(padded[..., None] > 0).shape)
facts["by_shape"] = [torch.ones_like(x, dtype=torch.long).sum().item(), x.new_full((2,), 3, dtype=torch.long).tolist()]
chosen = torch.randn(5, device="cuda", requires_grad=True)
chosen.new_zeros(4, 3).masked_scatter((torch.arange(12).view(4, 3) > 6).cuda(), chosen).sum().backward()
facts["scattered"] = list(chosen.grad.shape)
scores = torch.randn(2, 100, device="cuda")
facts["finite"] = list(scores[~torch.isnan(scores)].shape)
with torch.no_grad():
    facts["chosen"] = [scores.argmax(-1).tolist(), scores.argmax().item(), torch.multinomial(scores.softmax(-1), 1).tolist()]
with torch.device("cuda"):
    facts["default_device"] = torch.arange(3).tolist()
"""


@pytest.mark.virtual_gpu
def test_values_that_follow_from_the_host_are_true(on_virtual: Callable[..., Any]) -> None:
    assert on_virtual(CODE) == {
        "all": [True, 32],
        "padded": [False, [8, 5, 8, 8]],
        "selected": [29, 16],
        "nonzero": [29, 2],
        "view": [1, 4],
        "labels": 2,
        "floats": [0.0, False],
        "unknown": 0,
        "in_closure": 3,
        "after_step": 3,
        "picked": [[4, 5], [0, 1]],
        "selected_floats": [29 * 16],
        "by_shape": [512, [3, 3]],
        "scattered": [5],
        "finite": [200],
        "chosen": [[50, 50], 100, [[50], [50]]],
        "default_device": [0, 1, 2],
    }


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hfopt_virtual_kernels", SITE / "hfopt_virtual_kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("capability", "built_for", "loaded"),
    [
        ((8, 6), ["sm_80", "sm_90"], (8, 0)),
        ((8, 9), ["sm_80", "sm_86", "sm_90"], (8, 6)),
        ((8, 0), ["sm_86", "sm_90"], None),
        ((7, 0), ["sm_75", "sm_80"], None),
        ((12, 0), ["sm_100", "sm_120"], (12, 0)),
        ((12, 1), ["sm_80", "compute_90"], (9, 0)),
        ((9, 0), ["sm_90a"], (9, 0)),
        ((6, 0), [], None),
    ],
)
def test_which_kernels_a_card_loads(
    kernels: ModuleType, capability: tuple[int, int], built_for: list[str], loaded: tuple[int, int] | None
) -> None:
    assert kernels.loaded_on(capability, built_for) == loaded
