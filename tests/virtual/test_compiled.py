"""Compiled, fused and quantized code on the virtual GPU: made by the real libraries, launched, and not run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hfopt.virtual.environment import SITE

OnVirtual = Callable[..., Any]

CHAIN = """
import warnings
warnings.simplefilter("ignore")
import torch

def chain(x):
    return torch.tanh(torch.sigmoid(x * 2.0) + 1.0) * 3.0

def peak(function, steps=3):
    x = torch.zeros(1 << 20, device="cuda", requires_grad=True)
    for _ in range(steps):
        x.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function(x).sum().backward()
    return (torch.cuda.max_memory_allocated() - before) / x.nbytes
"""

MODES = """
facts["eager"] = peak(chain)
facts["compiled"] = peak(torch.compile(chain))
torch._dynamo.reset()
graphs = torch.compile(chain, mode="reduce-overhead")
facts["graphs"] = peak(graphs, steps=5)
facts["pools"] = len({tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()})
mask = torch.ones(8, dtype=torch.long, device="cuda")
facts["true"] = bool((mask == 1).all())

@torch.compiler.disable
def left_alone(mask):
    return bool((mask == 1).all())

facts["left alone"] = left_alone(mask)
"""


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_compiled_code_holds_less_than_eager_code_also_from_a_warm_cache(on_virtual: OnVirtual, tmp_path: Path) -> None:
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    found = on_virtual(CHAIN + MODES, TORCHINDUCTOR_COMPILE_THREADS="1", **folders)
    assert found["eager"] > found["compiled"], "the fused kernel keeps its input alone"
    assert found["pools"] > 1, "a captured graph has a pool of its own"
    assert found["true"] and found["left alone"], "values are known again outside of what was compiled"
    assert on_virtual(CHAIN + MODES, TORCHINDUCTOR_COMPILE_THREADS="1", **folders) == found


@pytest.mark.virtual_gpu
def test_where_nothing_can_be_compiled_it_runs_eagerly_and_says_why(on_virtual: OnVirtual) -> None:
    code = (
        CHAIN + 'with warnings.catch_warnings(record=True) as said:\n    warnings.simplefilter("always")\n    made = torch.compile(chain)\n'
    )
    code += 'facts["same"] = peak(made) == peak(chain)\nfacts["said"] = [str(one.message) for one in said]'
    found = on_virtual(code, TORCHDYNAMO_DISABLE="1", HFOPT_VIRTUAL_NO_COMPILE="there is no ptxas")
    assert found == {"same": True, "said": ["virtual GPU: there is no ptxas; what follows runs eagerly"]}


@pytest.mark.slow
def test_what_a_rehearsal_does_otherwise_is_said_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SITE))
    said = importlib.import_module("hfopt_rehearsal_trainer")._not_as_on_a_card
    assert list(said(SimpleNamespace(torch_compile=False))) == []
    assert list(said(SimpleNamespace(torch_compile=True, torch_compile_mode=None))) == []
    (sentence,) = said(SimpleNamespace(torch_compile=True, torch_compile_mode="max-autotune"))
    assert "max-autotune" in sentence and "timed" in sentence
    monkeypatch.setenv("HFOPT_VIRTUAL_NO_COMPILE", "there is no ptxas")
    (sentence,) = said(SimpleNamespace(torch_compile=True, torch_compile_mode=None))
    assert sentence.startswith("there is no ptxas: rehearsed without torch.compile")


@pytest.mark.slow
def test_deepspeed_keeps_its_states_elsewhere_and_its_host_adam_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SITE))
    files, compiler = (importlib.import_module(name) for name in ("hfopt_rehearsal_files", "hfopt_virtual_compiler"))
    flat = torch.zeros(1000)
    states = {"zero_stage": 3, "optimizer_state_dict": {"state": {0: {"step": 1, "exp_avg": flat}}}, "fp32_flat_groups": [flat, flat]}
    trainer = SimpleNamespace(optimizer=SimpleNamespace(state_dict=lambda: states), model=torch.nn.Linear(10, 10, bias=False))
    assert files._checkpoint_bytes(trainer) == 3 * flat.nbytes + 400
    cpu_adam: Any = ModuleType("cpu_adam")
    compiler.spare_host_adam(cpu_adam)
    library = cpu_adam.CPUAdamBuilder().load()
    assert library.create_adam(0, 1e-3) is None and library.adam_update(0, 1, flat) is None


REGIONS = """
import warnings
warnings.simplefilter("ignore")
import torch
from accelerate.utils import compile_regions
from torch._dynamo.utils import counters

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
    def forward(self, x):
        return x + torch.tanh(self.linear(x)).sigmoid()

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def live(model):
    x = torch.zeros(4096, 64, device="cuda", requires_grad=True)
    model(x).sum().backward()
    before = torch.cuda.memory_allocated()
    y = model(x)
    return (torch.cuda.memory_allocated() - before) / x.nbytes

model = Model().cuda()
facts["eager"] = live(model)
facts["regions"] = live(compile_regions(model))
facts["graphs"] = counters["stats"]["unique_graphs"]
"""


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_equal_regions_are_compiled_once(on_virtual: OnVirtual) -> None:
    found = on_virtual(REGIONS, TORCHINDUCTOR_COMPILE_THREADS="1")
    assert found["graphs"] == 1 and found["regions"] < found["eager"]


FLEX = """
import warnings
warnings.simplefilter("ignore")
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    attn_implementation="flex_attention")
model = LlamaForCausalLM(config).cuda()
ids = torch.ones(2, 128, dtype=torch.long, device="cuda")
model(input_ids=ids, attention_mask=ids, labels=ids).loss.backward()
facts["gradients"] = sum(parameter.grad is not None for parameter in model.parameters()) == len(list(model.parameters()))
"""


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_flex_attention_is_compiled_and_run(on_virtual: OnVirtual) -> None:
    assert on_virtual(FLEX, TORCHINDUCTOR_COMPILE_THREADS="1") == {"gradients": True}


BITSANDBYTES = """
import warnings
warnings.simplefilter("ignore")
import torch
import bitsandbytes as bnb
plain = 1024 * 1024
four = bnb.nn.Linear4bit(1024, 1024, bias=False, quant_type="nf4", compress_statistics=True, compute_dtype=torch.bfloat16).cuda()
facts["4 bits"] = torch.cuda.memory_allocated() / plain
x = torch.zeros(4, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)
four(x).sum().backward()
before = torch.cuda.memory_allocated()
eight = bnb.nn.Linear8bitLt(1024, 1024, bias=False, has_fp16_weights=False, threshold=6.0).cuda()
facts["8 bits"] = (torch.cuda.memory_allocated() - before) / plain
garbage = torch.arange(1, 1 << 18, device="cuda")
del garbage  # what lies in memory is nobody's value
out = [eight(x.detach().half()) for _ in range(4)]
facts["outliers"] = 0 if eight.state.idx is None else eight.state.idx.numel()
def state_bytes(name):
    weight = torch.nn.Parameter(torch.zeros(1024, 1024, device="cuda"))
    weight.grad = torch.zeros_like(weight)
    before = torch.cuda.memory_allocated()
    optimizer = getattr(bnb.optim, name)([weight])
    optimizer.step()
    return round((torch.cuda.memory_allocated() - before) / plain, 1)

for name in ("AdamW", "AdamW8bit", "PagedAdamW", "PagedAdamW8bit"):
    facts[name] = state_bytes(name)
"""


@pytest.mark.slow
@pytest.mark.virtual_gpu
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed: it is in the test extra")
def test_bitsandbytes_packs_weights_and_keeps_small_states_with_its_own_library(on_virtual: OnVirtual) -> None:
    found = on_virtual(BITSANDBYTES)
    assert 0.5 < found["4 bits"] < 0.6, "half a byte for each weight, and the scales of each block"
    assert 1.0 < found["8 bits"] < 1.1
    assert found["outliers"] == 0, "which columns stand out follows from values that nobody knows"
    assert (found["AdamW"], found["AdamW8bit"]) == (8.0, 2.0), "bytes of state for each weight"
    assert (found["PagedAdamW"], found["PagedAdamW8bit"]) == (0.0, 0.0), "paged states are not in torch's memory"
