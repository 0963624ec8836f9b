"""The same job written for axolotl and for TRL, or for the plain Trainer, estimates alike: whole model, LoRA and QLoRA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hfopt.compat.transformers_patches import quietly
from hfopt.job.request import Request
from hfopt.planner.memory_table import memory_table, read_subject
from hfopt.schema import MemoryPeak

LLAMA: dict[str, Any] = {  # large enough that a segment of 2 MiB is less than 1 %
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 16000, "max_position_embeddings": 1024, "torch_dtype": "bfloat16"},
    "tie_word_embeddings": False,
}
AXOLOTL = """base_model: {model}
datasets:
  - path: org/data
    type: alpaca
sequence_len: 512
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_torch
learning_rate: 2e-4
bf16: auto
gradient_checkpointing: true
flash_attention: true
"""
TRL = """model_name_or_path: {model}
dataset_name: org/data
max_length: 512
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
optim: adamw_torch
learning_rate: 2.0e-4
bf16: true
dtype: bfloat16
gradient_checkpointing: true
attn_implementation: flash_attention_2
output_dir: out
"""
ADAPTER = "lora_r: 16\nlora_alpha: 32\nlora_target_linear: true\n"
PEFT = "use_peft: true\nlora_r: 16\nlora_alpha: 32\nlora_dropout: 0.0\nlora_target_modules: all-linear\n"
KINDS = {
    "full": ("", ""),
    "LoRA": ("adapter: lora\n" + ADAPTER, PEFT),
    "QLoRA": ("adapter: qlora\nload_in_4bit: true\n" + ADAPTER, PEFT + "load_in_4bit: true\nuse_bnb_nested_quant: true\n"),
}
PLAIN = TRL.replace("packing: true\n", "").replace("dataset_name: org/data\n", "") + "task: causal_lm\n"


def estimated(folder: Path, text: str) -> MemoryPeak:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(LLAMA))
    config = folder / "train.yaml"
    config.write_text(text.format(model=model))
    request = Request(gpu="3090")
    with quietly():
        table = memory_table(read_subject(str(config), request), request, batch_sizes=[2])
    return next(row.peak for row in table.rows if row.checkpointing.on)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_axolotl_estimates_as_trl_does(tmp_path: Path, kind: str) -> None:
    """TRL 1.16 never holds the logits whole, so the same job is the one that does not either."""
    pytest.importorskip("trl")
    of_axolotl, of_trl = KINDS[kind]
    ours, trls = estimated(tmp_path, AXOLOTL + "cut_cross_entropy: true\n" + of_axolotl), estimated(tmp_path, TRL + of_trl)
    assert ours.allocated_bytes == pytest.approx(trls.allocated_bytes, rel=0.01)
    assert ours.reserved_bytes == pytest.approx(trls.reserved_bytes, rel=0.01)


@pytest.mark.slow
def test_with_whole_logits_axolotl_estimates_as_the_trainer_does(tmp_path: Path) -> None:
    whole, plain = estimated(tmp_path, AXOLOTL), estimated(tmp_path, PLAIN)
    assert whole.allocated_bytes == pytest.approx(plain.allocated_bytes, rel=0.01)
    assert whole.allocated_bytes > 1.05 * estimated(tmp_path, AXOLOTL + "cut_cross_entropy: true\n").allocated_bytes


@pytest.mark.slow
def test_float32_embeddings_are_counted(tmp_path: Path) -> None:
    """Without flash attention axolotl keeps embeddings, head and norms of a whole model in float32: weights and two states."""
    wide, narrow = (estimated(tmp_path, AXOLOTL.replace("flash_attention: true\n", line)) for line in ("", "flash_attention: true\n"))
    parameters = 2 * LLAMA["vocab_size"] * LLAMA["hidden_size"]
    assert wide.breakdown is not None and narrow.breakdown is not None
    assert wide.breakdown.weights_bytes - narrow.breakdown.weights_bytes == pytest.approx(2 * parameters, rel=0.01)
    assert wide.breakdown.optimizer_bytes - narrow.breakdown.optimizer_bytes == pytest.approx(4 * parameters, rel=0.01)
