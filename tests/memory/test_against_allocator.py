"""The estimate against PyTorch's own allocator: the Trainer on the virtual GPU, at a batch size that was not traced."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from hfopt.memory.allocator import CachingAllocator
from hfopt.memory.curve import replay_events
from hfopt.memory.step_memory import estimate
from hfopt.schema import Gpu, LengthSpread, StepSettings, Workload
from hfopt.units import GIB

BATCH = 24
LONGEST = 128
SAME = [LONGEST] * 3
MIXED = [88, 112, 96, 120, 104, 128, 72, 128]
RUN = """
import json, sys, tempfile, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
batch, lengths = json.loads(sys.argv[1])
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=1000, n_positions=256))
class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)
def pad(samples):
    ids = torch.ones(len(samples), max(samples), dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}
arguments = TrainingArguments(output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=batch, max_steps=len(lengths), bf16=True, optim="adamw_torch",
    report_to=[], save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, remove_unused_columns=False)
InOrder(model=model, args=arguments, train_dataset=[n for n in lengths for _ in range(batch)], data_collator=pad).train()
print("PEAK", json.dumps([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]))
"""


@pytest.mark.slow
@pytest.mark.virtual_gpu
@pytest.mark.parametrize("lengths", [SAME, MIXED], ids=["one length", "lengths that vary"])
def test_a_trainer_run_in_bf16(tiny_gpt2: Callable[..., Workload], lengths: list[int]) -> None:
    from hfopt.virtual.environment import environment

    env = environment(Gpu(name="Virtual", memory_bytes=16 * GIB, capability=(8, 6), sms=28))
    command = [sys.executable, "-c", RUN, json.dumps([BATCH, lengths])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    allocated, reserved = json.loads(done.stdout.rpartition("PEAK")[2])
    workload = replace(tiny_gpt2(LONGEST, n_embd=256), lengths=LengthSpread(longest=LONGEST, lengths=(64, 96, 128)))
    varying = estimate(workload, StepSettings(precision="bf16", capability=(8, 6), multiprocessors=28)).curve.varying
    assert varying is not None
    found = replay_events(varying.timeline, varying.events(BATCH, lengths), CachingAllocator())
    assert found.allocated_bytes == pytest.approx(allocated, rel=0.01)
    assert found.reserved_bytes == pytest.approx(reserved, rel=0.03)
