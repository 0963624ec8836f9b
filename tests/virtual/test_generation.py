"""Text written on the virtual GPU, and kernels in Triton: what GRPO, `predict_with_generate` and fused losses need of a card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hfopt.pricing.grpo import Writing

WRITE = """
import warnings
warnings.simplefilter("ignore")
import torch
import transformers
shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, eos_token_id=0, pad_token_id=1, **shape)).cuda()
prompts = torch.ones(3, 5, dtype=torch.long, device="cuda")
for how in (True, False):
    written = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=7, do_sample=how)
    facts[f"sampled {how}"] = [list(written.shape), written[0, 5:].tolist()]
"""

HOLD = """
import warnings
warnings.simplefilter("ignore")
import torch
import transformers
shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
for dtype in (torch.float32, torch.bfloat16):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=4096, pad_token_id=1, **shape)).to("cuda", dtype).eval()
    prompts = torch.ones(256, 16, dtype=torch.long, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype is torch.float32):
        model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=112, do_sample=True)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    facts[str(dtype)] = [torch.cuda.max_memory_allocated() - before, parameters]
    del model
"""

KERNEL = """
import torch
import triton
import triton.language as tl

@triton.jit
def double(x, y, size: tl.constexpr):
    places = tl.arange(0, size)
    tl.store(y + places, 2 * tl.load(x + places))

@triton.autotune(configs=[triton.Config({}, num_warps=warps) for warps in (1, 2)], key=[])
@triton.jit
def tuned(x, y, size: tl.constexpr):
    tl.store(y, tl.load(x))

def run():
    x = torch.zeros(1 << 18, device="cuda")
    before = torch.cuda.memory_allocated()
    y = torch.empty_like(x)
    double[(1,)](x, y, size=1 << 18)
    tuned[(1,)](x, y, size=1)
    return torch.cuda.max_memory_allocated() - before, card()

def card():
    driver = triton.runtime.driver.active
    driver.set_current_device(0)
    named = [driver.get_current_target().arch, driver.get_current_device(), str(driver.get_active_torch_device())]
    return [*named, driver.get_current_stream(0) == torch.cuda.current_stream().cuda_stream, driver.get_device_interface() is torch.cuda]
"""


@pytest.mark.virtual_gpu
def test_a_text_is_written_to_its_full_length(on_virtual: Callable[..., Any]) -> None:
    full = [[3, 12], [32] * 7]  # the middle of the vocabulary: never a token that would end it
    assert on_virtual(WRITE) == {"sampled True": full, "sampled False": full}


@pytest.mark.virtual_gpu
@pytest.mark.slow
def test_what_writing_takes_is_met_by_the_rule_that_plans_it(on_virtual: Callable[..., Any]) -> None:
    held = on_virtual(HOLD)
    assert set(held) == {"torch.float32", "torch.bfloat16"}
    for dtype, (counted, parameters) in held.items():
        mixed = dtype == "torch.float32"
        copies = parameters - 4096 * 256 if mixed else 0
        rule = Writing(layers=4, kv_width=128, vocabulary=4096, copied_weights=copies, number_bytes=4 if mixed else 2)
        assert rule.bytes_for(256, 128) == pytest.approx(counted, rel=0.08), dtype


@pytest.mark.virtual_gpu
def test_a_kernel_in_triton_takes_no_memory_and_no_compiler(on_virtual: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    code = f"sys.path.insert(0, {str(tmp_path)!r})\nimport kernel\nfacts['added'], facts['card'] = kernel.run()"
    assert on_virtual(code) == {"added": 4 << 18, "card": [86, 0, "cuda:0", True, True]}
