"""`hfopt rehearse --time` against the traced prediction: ten Trainer scripts, and what the timing itself costs.

usage: python benchmarks/rehearsed_time.py [--only TEXT] [--gpu NAME] [--cost]

The same model, batch and settings once as a script of its own on the virtual GPU (kernels as they are launched) and once as `hfopt plan`
prices it (a trace on fake tensors). Nothing here was measured on a card: both are predictions by one cost model, and what is compared is
whether they see the same work. --cost rehearses each script without --time as well and compares CPU seconds. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from hfopt.hardware.detect import named
from hfopt.memory.step_memory import estimate
from hfopt.model.from_config import from_spec
from hfopt.probe.rehearsal import rehearse
from hfopt.schema import Checkpointing, DataSpec, Gpu, Lora, ModelSpec, StepSettings
from hfopt.speed.device_speed import speed_of
from hfopt.speed.step_time import StepTimer

SCRIPT = """
import torch
from transformers import {auto}, AutoConfig, Trainer, TrainingArguments

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        return {sample}

config = AutoConfig.from_pretrained({folder!r})
model = {auto}.from_config(config, dtype=torch.{dtype})
{adapter}
args = TrainingArguments(output_dir="out", max_steps=10, report_to=[], disable_tqdm=True, {arguments})
Trainer(model=model, args=args, train_dataset=Samples()).train()
"""
ADAPTER = """
from peft import LoraConfig, get_peft_model
model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
"""


def _text(length: int, labels: str) -> str:
    """Samples of two lengths, padded, as a batch of texts is."""
    mask = f"(torch.arange({length}) < {length} - index % 2 * 10).long()"
    return f'{{"input_ids": torch.arange({length}) % 1000, "attention_mask": {mask}, "labels": {labels}}}'


@dataclass(frozen=True, kw_only=True)
class TimedScript:
    """A model, its samples and its arguments, for both sides."""

    title: str
    auto: str
    task: Any
    config: Mapping[str, Any]
    sample: str
    batch: int
    length: int | None = None
    image_size: int | None = None
    audio_seconds: float | None = None
    precision: Any = "fp32"
    dtype: str = "float32"
    accumulation: int = 1
    checkpointing: bool = False
    optim: str = "adamw_torch_fused"
    label_smoothing: float = 0.0
    lora: bool = False
    workers: int = 2  # as a plan has it: a loader that keeps up
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> str:
        given = {
            "per_device_train_batch_size": self.batch,
            "gradient_accumulation_steps": self.accumulation,
            "optim": self.optim,
            "dataloader_num_workers": self.workers,
            "gradient_checkpointing": self.checkpointing,
            "label_smoothing_factor": self.label_smoothing,
            "bf16": self.precision == "bf16",
            "fp16": self.precision == "fp16",
        }
        if self.checkpointing:
            given["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
        return ", ".join(f"{name}={value!r}" for name, value in given.items())


_LLAMA = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 6, "num_attention_heads": 16}
_CAUSAL = "torch.arange({length}) % 1000"
SCRIPTS = (
    TimedScript(
        title="BERT-base, classification, fp32",
        auto="AutoModelForSequenceClassification",
        task="sequence_classification",
        config={"model_type": "bert"},
        sample=_text(128, "torch.tensor(index % 2)"),
        batch=32,
        length=128,
    ),
    TimedScript(
        title="RoBERTa-base, tokens, bf16",
        auto="AutoModelForTokenClassification",
        task="token_classification",
        config={"model_type": "roberta", "vocab_size": 50265, "max_position_embeddings": 514},
        sample=_text(256, "torch.zeros(256, dtype=torch.long)"),
        batch=32,
        length=256,
        precision="bf16",
    ),
    TimedScript(
        title="GPT-2, fp16, accumulation 4",
        auto="AutoModelForCausalLM",
        task="causal_lm",
        config={"model_type": "gpt2"},
        sample=_text(512, _CAUSAL.format(length=512)),
        batch=8,
        length=512,
        precision="fp16",
        accumulation=4,
    ),
    TimedScript(
        title="Llama-like, bf16 weights, checkpointing",
        auto="AutoModelForCausalLM",
        task="causal_lm",
        config=_LLAMA,
        sample=_text(1024, _CAUSAL.format(length=1024)),
        batch=4,
        length=1024,
        precision="bf16",
        dtype="bfloat16",
        checkpointing=True,
    ),
    TimedScript(
        title="Mistral-like, LoRA, bf16",
        auto="AutoModelForCausalLM",
        task="causal_lm",
        config={**_LLAMA, "model_type": "mistral", "num_key_value_heads": 4, "sliding_window": None},
        sample=_text(512, _CAUSAL.format(length=512)),
        batch=8,
        length=512,
        precision="bf16",
        dtype="bfloat16",
        lora=True,
    ),
    TimedScript(
        title="T5-base, adafactor, fp32",
        auto="AutoModelForSeq2SeqLM",
        task="seq2seq_lm",
        config={"model_type": "t5", "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0},
        sample=_text(256, "torch.arange(128) % 1000"),
        batch=16,
        length=256,
        optim="adafactor",
        data={"max_target_length": 128},
    ),
    TimedScript(
        title="ViT-base, bf16",
        auto="AutoModelForImageClassification",
        task="image_classification",
        config={"model_type": "vit"},
        sample='{"pixel_values": torch.zeros(3, 224, 224), "labels": torch.tensor(index % 2)}',
        batch=64,
        workers=4,
        precision="bf16",
    ),
    TimedScript(
        title="ResNet-50, fp32, SGD",
        auto="AutoModelForImageClassification",
        task="image_classification",
        config={"model_type": "resnet"},
        sample='{"pixel_values": torch.zeros(3, 224, 224), "labels": torch.tensor(index % 2)}',
        batch=64,
        workers=4,
        image_size=224,
        optim="sgd",
    ),
    TimedScript(
        title="wav2vec2-base, fp32",
        auto="AutoModelForAudioClassification",
        task="audio_classification",
        config={"model_type": "wav2vec2", "layerdrop": 0.0},
        sample='{"input_values": torch.zeros(80_000), "labels": torch.tensor(index % 2)}',
        batch=8,
        audio_seconds=5.0,
        workers=4,
    ),
    TimedScript(
        title="BART-base, label smoothing, AdamW foreach",
        auto="AutoModelForSeq2SeqLM",
        task="seq2seq_lm",
        config={
            "model_type": "bart",
            "d_model": 768,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_ffn_dim": 3072,
            "decoder_ffn_dim": 3072,
        },
        sample=_text(256, "torch.arange(256) % 1000"),
        batch=16,
        length=256,
        optim="adamw_torch",
        label_smoothing=0.1,
        data={"max_target_length": 256},
    ),
)


def traced_step_s(script: TimedScript, folder: Path, gpu: Gpu) -> float:
    """As a plan prices the same job."""
    model = ModelSpec(name=str(folder), task=script.task, weights_dtype=script.dtype, lora=Lora(r=16) if script.lora else None)
    data = DataSpec(max_length=script.length, image_size=script.image_size, audio_seconds=script.audio_seconds, **script.data)
    assert gpu.capability is not None
    settings = StepSettings(
        precision=script.precision,
        checkpointing=Checkpointing(every_n_layers=int(script.checkpointing)),
        accumulation=min(script.accumulation, 2),
        optim=script.optim,
        label_smoothing=script.label_smoothing,
        capability=gpu.capability,
        multiprocessors=gpu.sms,
    )
    speed = speed_of(gpu)
    assert speed is not None
    ops = estimate(from_spec(model, data), settings).ops
    return StepTimer(ops, speed, script.precision).at(script.batch, script.accumulation).step_s


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compare(script: TimedScript, gpu: Gpu, *, cost: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = dict(script.config)
        AutoConfig.for_model(config.pop("model_type"), **config).save_pretrained(folder)
        file = folder / "train.py"
        fields = {"auto": script.auto, "sample": script.sample, "folder": name, "dtype": script.dtype, "arguments": script.arguments}
        file.write_text(SCRIPT.format(adapter=ADAPTER if script.lora else "", **fields))
        command = [sys.executable, str(file)]
        started = _cpu_s()
        seen = rehearse(command, gpu, timed=True)
        timed_cpu_s = _cpu_s() - started
        assert seen.time is not None, seen.message
        row = {"title": script.title, "rehearsed_s": seen.time.step_s, "traced_s": traced_step_s(script, folder, gpu)}
        if cost:
            started = _cpu_s()
            rehearse(command, gpu)
            row["cost"] = timed_cpu_s / (_cpu_s() - started)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--gpu", default="a100-80gb")
    parser.add_argument("--cost", action="store_true")
    options = parser.parse_args()
    gpu = named(options.gpu).gpus[0]
    rows = []
    for script in SCRIPTS:
        if options.only.lower() not in script.title.lower():
            continue
        row = compare(script, gpu, cost=options.cost)
        row["error"] = row["rehearsed_s"] / row["traced_s"] - 1
        rows.append(row)
        cost = f"  cost × {row['cost']:.2f}" if "cost" in row else ""
        times = f"{1e3 * row['rehearsed_s']:8.1f} ms rehearsed {1e3 * row['traced_s']:8.1f} ms traced"
        print(f"{row['title']:44s} {times} {row['error']:+7.1%}{cost}")
    errors = [abs(row["error"]) for row in rows]
    summary = {"scripts": len(rows), "within_5_percent": sum(error <= 0.05 for error in errors), "median": statistics.median(errors)}
    if options.cost:
        summary["cost"] = statistics.median(row["cost"] for row in rows)
    print(json.dumps({**summary, "worst": max(errors), "rows": rows}))


if __name__ == "__main__":
    main()
