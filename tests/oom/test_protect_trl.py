"""TRL's SFTTrainer, which has its own loss, its own counters and its own training_step, comes out of an OOM as it went in."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Seq2SeqTrainer, Trainer

import hfopt
from hfopt.oom.micro_batch import may_exchange

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("trl", reason="TRL is not installed: its 1.0 asks for a newer transformers than the oldest here")
    from trl import SFTConfig, SFTTrainer

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own deprecations
TIMES = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "train_tokens_per_second", "total_flos"}


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(60)} | {"<pad>": 60, "<eos>": 61, "<unk>": 62}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


@pytest.mark.parametrize("accumulation", [1, 2])
def test_sft(lab: Any, too_small: Any, layer_of: Any, tmp_path: Path, accumulation: int) -> None:
    texts = [" ".join(f"w{(i * 7 + j * 3) % 60}" for j in range(3 + i % 9)) for i in range(48)]
    config = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": accumulation, "max_steps": 3, "logging_steps": 1}
    quiet = {
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "include_num_input_tokens_seen": True,
    }

    def trainer() -> Any:
        model = lab.trainer("causal").model
        args = SFTConfig(output_dir=str(tmp_path), **config, **quiet, gradient_checkpointing=False)
        return SFTTrainer(model=model, args=args, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer())

    undisturbed, protected = trainer(), hfopt.protect(trainer())
    undisturbed.train()
    memory = too_small(at={(0, accumulation - 1): ("backward", 3), (2, 0): ("forward", 4)})
    memory.watch(protected, layer_of(protected.model))
    protected.train()
    assert {place[:2] for place in memory.seen} == set(memory.at)
    mine, theirs = (torch.cat([p.detach().flatten() for p in t.model.parameters()]) for t in (protected, undisturbed))
    assert float((mine - theirs).norm() / theirs.norm()) < 1e-6
    for here, there in zip(protected.state.log_history, undisturbed.state.log_history, strict=True):
        assert {k: v for k, v in here.items() if k not in TIMES} == pytest.approx(
            {k: v for k, v in there.items() if k not in TIMES}, rel=1e-5
        )
    assert "mean_token_accuracy" in protected.state.log_history[0]


def test_a_loss_that_exchanges_values_with_other_ranks_is_known() -> None:
    assert may_exchange(SFTTrainer)
    assert not may_exchange(Trainer)
    assert not may_exchange(Seq2SeqTrainer)
