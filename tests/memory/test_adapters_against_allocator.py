"""Adapters, packed weights, their optimizers: the estimate compared with peft and bitsandbytes themselves on the virtual GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from virtual_peaks import peaks_of_cases

from hfopt.memory.step_memory import estimate
from hfopt.model.from_config import from_spec
from hfopt.schema import Checkpointing, DataSpec, Lora, ModelSpec, Quantization, StepSettings

BATCH, LENGTH = 16, 128  # more than 1536 tokens: below that a 4-bit forward may unpack nothing
SHAPE = {"vocab_size": 2000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
LORA, DORA = Lora(target_modules="all-linear"), Lora(target_modules="all-linear", use_dora=True)


@dataclass(frozen=True)
class Case:
    lora: Lora | None = None
    packed: dict[str, Any] | None = None  # BitsAndBytesConfig's words
    optim: str = "adamw_torch"
    checkpointing: bool = False


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
INT8 = {"load_in_8bit": True}
CASES = {
    "lora": Case(lora=LORA),
    "dora": Case(lora=DORA),
    "nf4": Case(lora=LORA, packed=NF4),
    "nf4, double quantization, checkpointing": Case(
        lora=LORA, packed={**NF4, "bnb_4bit_use_double_quant": True}, checkpointing=True, optim="paged_adamw_8bit"
    ),
    "nf4, dora": Case(lora=DORA, packed=NF4),
    "int8": Case(lora=LORA, packed=INT8),
    "int8, checkpointing": Case(lora=LORA, packed=INT8, checkpointing=True),
    "int8, dora": Case(lora=DORA, packed=INT8),
    **{optim: Case(optim=optim) for optim in ("adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit")},
}
RUN = """
import gc, json, sys, tempfile, warnings
warnings.simplefilter("ignore")
import torch
from bitsandbytes.optim import GlobalOptimManager
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
from test_adapters_against_allocator import BATCH, CASES, LENGTH
from hfopt.model.from_config import from_spec
from hfopt.schema import DataSpec, ModelSpec

def run(case, folder, made):
    packed = {} if case.packed is None else {"quantization_config": BitsAndBytesConfig(**case.packed), "device_map": {"": 0}}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32" if case.packed is None else "bfloat16", **packed)
    how = {"use_reentrant": False}
    if packed:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if case.lora is not None:
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", use_dora=case.lora.use_dora, task_type="CAUSAL_LM"))
    arguments = TrainingArguments(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=BATCH, max_steps=3, bf16=True, report_to=[],
        optim=case.optim, save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, remove_unused_columns=False,
        gradient_checkpointing=case.checkpointing, gradient_checkpointing_kwargs=how if case.checkpointing else None)
    Trainer(model=model, args=arguments, train_dataset=[0] * 3 * BATCH, data_collator=lambda _: made).train()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

made = from_spec(ModelSpec(name=sys.argv[1]), DataSpec(max_length=LENGTH)).make_batch(BATCH)
found = {}
for name, case in CASES.items():
    found[name] = run(case, sys.argv[1], made)
    GlobalOptimManager.get_instance().initialize()  # it keeps the last model's parameters
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
print("PEAKS", json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(architectures=["LlamaForCausalLM"], **SHAPE)).save_pretrained(made)
    return str(made)


@pytest.fixture(scope="module")
def real(folder: str) -> dict[str, tuple[int, int]]:
    """Allocated and reserved at the peak of each case, in one process."""
    return peaks_of_cases(RUN, folder, __file__)


@pytest.mark.slow
@pytest.mark.virtual_gpu
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed: it is in the test extra")
@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_what_the_libraries_take(name: str, folder: str, real: dict[str, tuple[int, int]]) -> None:
    case = CASES[name]
    spec = ModelSpec(name=folder, lora=case.lora)
    if case.packed is not None:
        four = "load_in_4bit" in case.packed
        double = bool(case.packed.get("bnb_4bit_use_double_quant"))
        how = Quantization(bits=4 if four else 8, double_quant=double, compute_dtype="bfloat16" if four else None)
        spec = replace(spec, quantization=how, weights_dtype="bfloat16")
    settings = StepSettings(
        precision="bf16",
        capability=(8, 6),
        multiprocessors=28,
        optim=case.optim,
        checkpointing=Checkpointing(every_n_layers=int(case.checkpointing)),
    )
    peak = estimate(from_spec(spec, DataSpec(max_length=LENGTH)), settings).curve.peak(BATCH)
    allocated, reserved = real[name]
    assert peak.allocated_bytes == pytest.approx(allocated, rel=0.01)
    assert peak.reserved_bytes == pytest.approx(reserved, rel=0.03)
