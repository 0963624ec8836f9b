"""Adapters against PyTorch's own allocator: LoRA, DoRA, and LoRA on packed weights (our stand-ins for bitsandbytes, on both sides)."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig

from hfopt.memory.step_memory import estimate
from hfopt.model.from_config import from_spec
from hfopt.schema import DataSpec, Gpu, Lora, ModelSpec, Quantization, StepSettings
from hfopt.units import GIB

BATCH, LENGTH = 12, 128
SHAPE = {"vocab_size": 2000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
ADAPTED = {
    "lora": ModelSpec(name="", lora=Lora(target_modules="all-linear")),
    "dora": ModelSpec(name="", lora=Lora(target_modules="all-linear", use_dora=True)),
    "packed": ModelSpec(name="", lora=Lora(target_modules="all-linear"), quantization=Quantization(bits=4, compute_dtype="bfloat16")),
}
RUN = """
import json, sys, tempfile, warnings
warnings.simplefilter("ignore")
import torch
from dataclasses import replace
from transformers import Trainer, TrainingArguments
from test_adapters_against_allocator import ADAPTED, BATCH, LENGTH
from hfopt.schema import DataSpec
from hfopt.model.from_config import from_spec
workload = from_spec(replace(ADAPTED[sys.argv[1]], name=sys.argv[2]), DataSpec(max_length=LENGTH))
arguments = TrainingArguments(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=BATCH, max_steps=3, bf16=True, optim="adamw_torch",
    report_to=[], save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, remove_unused_columns=False)
made = workload.make_batch(BATCH)
Trainer(model=workload.build_model(), args=arguments, train_dataset=[0] * 3 * BATCH, data_collator=lambda _: made).train()
print("PEAK", json.dumps([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]))
"""


@pytest.mark.slow
@pytest.mark.virtual_gpu
@pytest.mark.parametrize("kind", ADAPTED)
def test_an_adapter_trained_in_bf16(kind: str, tmp_path: Path) -> None:
    from hfopt.virtual.environment import environment

    LlamaConfig(architectures=["LlamaForCausalLM"], **SHAPE).save_pretrained(tmp_path)
    env = environment(Gpu(name="Virtual", memory_bytes=16 * GIB, capability=(8, 6), sms=28))
    env["PYTHONPATH"] = f"{env['PYTHONPATH']}:{Path(__file__).parent}:{Path(__file__).parents[2]}"
    done = subprocess.run([sys.executable, "-c", RUN, kind, str(tmp_path)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    allocated, reserved = json.loads(done.stdout.rpartition("PEAK")[2])
    workload = from_spec(replace(ADAPTED[kind], name=str(tmp_path)), DataSpec(max_length=LENGTH))
    peak = estimate(workload, StepSettings(precision="bf16", capability=(8, 6), multiprocessors=28)).curve.peak(BATCH)
    assert peak.allocated_bytes == pytest.approx(allocated, rel=0.01)
    assert peak.reserved_bytes == pytest.approx(reserved, rel=0.03)
