"""The estimate against PyTorch's own allocator: the Trainer on the virtual GPU, at a batch size that was not traced."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from hfopt.estimate.memory import estimate
from hfopt.schema import Gpu, StepSettings, Workload
from hfopt.units import GIB

BATCH = 24
RUN = f"""
import json, sys, tempfile, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=1000, n_positions=256))
ids = torch.ones({BATCH}, 64, dtype=torch.long)
arguments = TrainingArguments(output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size={BATCH}, max_steps=3, bf16=True, optim="adamw_torch",
    report_to=[], save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, remove_unused_columns=False)
Trainer(model=model, args=arguments, train_dataset=list(range({3 * BATCH})),
    data_collator=lambda samples: {{"input_ids": ids.clone(), "labels": ids.clone()}}).train()
print("PEAK", json.dumps([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]))
"""


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_a_trainer_run_in_bf16(tiny_gpt2: Callable[..., Workload]) -> None:
    from hfopt.virtual.launch import environment

    env = environment(Gpu(name="Virtual", memory_bytes=16 * GIB, capability=(8, 6), sms=28))
    done = subprocess.run([sys.executable, "-c", RUN], env=env, capture_output=True, text=True, check=True)
    allocated, reserved = json.loads(done.stdout.rpartition("PEAK")[2])
    settings = StepSettings(precision="bf16", capability=(8, 6), multiprocessors=28)
    peak = estimate(tiny_gpt2(n_embd=256), settings).curve.peak(BATCH)
    assert peak.allocated_bytes == pytest.approx(allocated, rel=0.01)
    assert peak.reserved_bytes == pytest.approx(reserved, rel=0.06)
