"""`use_liger_kernel`: the estimate compared with liger-kernel itself on the virtual GPU, where its kernels do nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest
from transformers import AutoConfig
from virtual_peaks import peaks_of_cases

from hfopt.memory.step_memory import estimate
from hfopt.model.from_config import from_spec
from hfopt.schema import Checkpointing, DataSpec, Lora, ModelSpec, StepSettings

BATCH, LENGTH = 16, 128
SHAPE = {"vocab_size": 4000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}


@dataclass(frozen=True)
class Case:
    kind: str
    weights: str = "float32"
    lora: bool = False
    checkpointing: bool = False
    more: dict[str, Any] = field(default_factory=dict)


CASES = {
    "llama": Case("llama"),
    "llama in bfloat16, checkpointing": Case("llama", weights="bfloat16", checkpointing=True),
    "mistral with an adapter": Case("mistral", lora=True, more={"num_key_value_heads": 2}),
    "qwen2": Case("qwen2", more={"num_key_value_heads": 2}),
    "qwen3, checkpointing": Case("qwen3", checkpointing=True, more={"num_key_value_heads": 2, "head_dim": 64}),
    "gemma2": Case("gemma2", more={"num_key_value_heads": 2, "head_dim": 64}),
    "phi3": Case("phi3", more={"num_key_value_heads": 2, "pad_token_id": 0}),
}
RUN = """
import gc, json, sys, tempfile, warnings
warnings.simplefilter("ignore")
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from test_liger_against_allocator import BATCH, CASES, LENGTH
from hfopt.model.from_config import from_spec
from hfopt.schema import DataSpec, ModelSpec

def run(case, folder):
    made = from_spec(ModelSpec(name=folder), DataSpec(max_length=LENGTH)).make_batch(BATCH)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=getattr(torch, case.weights))
    if case.lora:
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    arguments = TrainingArguments(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=BATCH, max_steps=3, bf16=True, report_to=[],
        use_liger_kernel=True, optim="adamw_torch", save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        remove_unused_columns=False, gradient_checkpointing=case.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if case.checkpointing else None)
    Trainer(model=model, args=arguments, train_dataset=[0] * 3 * BATCH, data_collator=lambda _: made).train()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

found = {}
for name, folder in json.loads(sys.argv[1]).items():
    found[name] = run(CASES[name], folder)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
print("PEAKS", json.dumps(found))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {}
    for name, case in CASES.items():
        folder = tmp_path_factory.mktemp("model")
        AutoConfig.for_model(case.kind, **{**SHAPE, **case.more}).save_pretrained(folder)
        made[name] = str(folder)
    return made


@pytest.fixture(scope="module")
def real(folders: dict[str, str]) -> dict[str, tuple[int, int]]:
    return peaks_of_cases(RUN, json.dumps(folders), __file__)


@pytest.mark.slow
@pytest.mark.virtual_gpu
@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed: it is in the test extra")
@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_what_liger_takes(name: str, folders: dict[str, str], real: dict[str, tuple[int, int]]) -> None:
    case = CASES[name]
    adapter = Lora(target_modules="all-linear") if case.lora else None
    spec = ModelSpec(name=folders[name], lora=adapter, task="causal_lm", weights_dtype=case.weights)
    settings = StepSettings(
        precision="bf16",
        capability=(8, 6),
        multiprocessors=28,
        fused_loss=True,
        checkpointing=Checkpointing(every_n_layers=int(case.checkpointing)),
    )
    peak = estimate(from_spec(spec, DataSpec(max_length=LENGTH)), settings).curve.peak(BATCH)
    allocated, reserved = real[name]
    assert peak.allocated_bytes == pytest.approx(allocated, rel=0.01)
    assert peak.reserved_bytes == pytest.approx(reserved, rel=0.03)
