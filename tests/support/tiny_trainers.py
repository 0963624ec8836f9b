"""Tiny models of five tasks, their data, and a memory that is too small at chosen moments."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import Trainer, TrainingArguments

from hfopt.oom.protect import guard_of

VOCABULARY, LENGTH, CLASSES = 64, 12, 3


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sample i is a function of i; rows have different numbers of labels, so means over tokens and over samples differ."""

    def __init__(self, task: str, count: int = 96) -> None:
        self.task, self.count, self.order = task, count, []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        self.order.append(i)
        generator = torch.Generator().manual_seed(i)
        ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
        kept = 2 + i % (LENGTH - 2)
        if self.task == "image":
            return {"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": torch.tensor(i % CLASSES)}
        if self.task == "sequence":
            return {"input_ids": ids, "labels": torch.tensor(i % CLASSES)}
        labels = ids % CLASSES if self.task == "token" else ids.clone()
        labels[kept:] = -100
        if self.task == "seq2seq":  # as DataCollatorForSeq2Seq makes it, for label smoothing takes the labels away
            return {"input_ids": ids, "labels": labels, "decoder_input_ids": torch.cat([torch.zeros(1, dtype=torch.long), ids[:-1]])}
        return {"input_ids": ids, "labels": labels}


def build(task: str, dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    still = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if task == "causal":
        config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, pad_token_id=0, **small)
        return transformers.LlamaForCausalLM(config)
    if task in ("sequence", "token"):
        config = transformers.BertConfig(vocab_size=VOCABULARY, num_labels=CLASSES, **small, **still)
        kind = transformers.BertForSequenceClassification if task == "sequence" else transformers.BertForTokenClassification
        return kind(config)
    if task == "seq2seq":
        config = transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            dropout_rate=dropout,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
        return transformers.T5ForConditionalGeneration(config)
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=CLASSES, **small, **still)
    return transformers.ViTForImageClassification(config)


@dataclass
class TooSmall:
    """At (global step, micro-batch): memory for at most so many samples, running out in this phase. Every failure is noted."""

    __module__ = "torch"  # an instrument: what it counts is nothing that a script keeps
    at: dict[tuple[int, int], tuple[str, int]]
    seen: list[tuple[int, int, str, int]] = field(default_factory=list)
    error: Callable[[], BaseException] = lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    def watch(self, trainer: Any, layer: torch.nn.Module) -> None:
        now = [0]
        guard = guard_of(trainer)
        assert guard is not None
        guard.listen(lambda event: now.__setitem__(0, event.micro_batch))

        def hook(module: Any, args: Any, output: Any) -> None:
            hidden = output if torch.is_tensor(output) else output[0]
            place = (trainer.state.global_step, now[0])
            phase, most = self.at.get(place, ("", 1 << 30))
            if not hidden.requires_grad or hidden.shape[0] <= most:
                return
            self.seen.append((*place, phase, hidden.shape[0]))
            if phase == "forward":
                raise self.error()
            hidden.register_hook(self._raise)

        hook.__module__ = "torch"
        layer.register_forward_hook(hook)

    def _raise(self, gradient: torch.Tensor) -> None:
        raise self.error()


def first_layer(model: torch.nn.Module) -> torch.nn.Module:
    return next(module for name, module in model.named_modules() if name.endswith((".0", "block.0", "layer.0", "layers.0")))


@dataclass
class Lab:
    """Makes trainers whose runs can be compared."""

    folder: Path

    def trainer(
        self, task: str = "causal", *, batch: int = 8, accumulation: int = 2, kind: Any = Trainer, dtype: Any = torch.float64, **more: Any
    ) -> Any:
        model = more.pop("model", None) or build(task, more.pop("dropout", 0.0))
        dataset = more.pop("dataset", None) or Samples(task)
        init = {
            key: more.pop(key)
            for key in ("compute_loss_func", "eval_dataset", "compute_metrics", "callbacks", "data_collator")
            if key in more
        }
        arguments = {
            "output_dir": str(self.folder / "out"),
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": accumulation,
            "max_steps": 4,
            "learning_rate": 1e-3,
            "warmup_steps": 2,
            "lr_scheduler_type": "linear",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "remove_unused_columns": False,
            "include_num_input_tokens_seen": task != "image",
            **more,
        }
        return kind(model=model.to(dtype), args=TrainingArguments(**arguments), train_dataset=dataset, **init)

    @staticmethod
    def history(trainer: Any) -> list[tuple[int, float, float, float]]:
        return [
            (row["step"], row["loss"], row["learning_rate"], row.get("grad_norm", 0.0))
            for row in trainer.state.log_history
            if "loss" in row
        ]

    def assert_same_run(self, trainer: Any, undisturbed: Any, relative: float = 1e-6) -> None:
        mine, theirs = (torch.cat([p.detach().double().flatten() for p in t.model.parameters()]) for t in (trainer, undisturbed))
        assert float((mine - theirs).norm() / theirs.norm()) <= relative
        assert trainer.state.global_step == undisturbed.state.global_step
        assert trainer.state.num_input_tokens_seen == undisturbed.state.num_input_tokens_seen
        assert trainer.state.total_flos == undisturbed.state.total_flos
        assert trainer.train_dataset.order == undisturbed.train_dataset.order
        assert len(self.history(trainer)) == len(self.history(undisturbed)) > 0
        for here, there in zip(self.history(trainer), self.history(undisturbed), strict=True):
            assert here == pytest.approx(there, rel=max(relative, 2e-6))


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    random.seed(0)
    gc.freeze()  # a fallback collects garbage; what torch and transformers keep for good need not be walked each time
    yield Lab(folder=tmp_path)
    gc.unfreeze()
    transformers.logging.set_verbosity(verbosity)


@pytest.fixture
def too_small() -> type[TooSmall]:
    return TooSmall


@pytest.fixture
def layer_of() -> Callable[[torch.nn.Module], torch.nn.Module]:
    return first_layer
