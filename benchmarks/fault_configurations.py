"""The training runs that fault_schedules.py disturbs: each is tiny, deterministic, and differs in what an out-of-memory error could spoil.

A configuration is a function that makes a fresh Trainer in a folder. Models are in float64 where nothing else is the point, so that a
difference is a fault and not rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import transformers
from torch.nn import functional
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments

VOCABULARY, LENGTH, CLASSES, STEPS, BATCH = 32, 8, 3, 3, 4
SMALL = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
Make = Callable[[Path], Any]
CONFIGURATIONS: dict[str, Make] = {}
OBSERVED: WeakKeyDictionary[Any, Callable[[], Any]] = WeakKeyDictionary()
"""What else of a Trainer's script must end as undisturbed."""


def configuration(make: Make) -> Make:
    CONFIGURATIONS[make.__name__] = make
    return make


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sample i is a function of i; `order` notes who was asked for. Rows differ in the number of labels, of tokens and in their class."""

    def __init__(self, task: str, count: int = 40, *, ragged: bool = False) -> None:
        self.task, self.count, self.ragged = task, count, ragged
        self.order: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        self.order.append(i)
        generator = torch.Generator().manual_seed(i)
        length = 3 + i % (LENGTH - 2) if self.ragged else LENGTH
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        sample: dict[str, Any] = {"input_ids": ids}
        if self.task == "image":
            return {"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": torch.tensor(i % CLASSES)}
        if self.task == "sequence":
            sample["labels"] = torch.tensor(0 if i % 8 < 5 else i % CLASSES)  # one class is common
        elif self.task == "multi_label":
            sample["labels"] = torch.rand(CLASSES, generator=generator).round()
        elif self.task == "regression":
            sample["labels"] = torch.randn(1, generator=generator)[0]
        elif self.task == "answer":
            sample |= {"start_positions": torch.tensor(i % 3), "end_positions": torch.tensor(3 + i % 4)}
        elif self.task == "choice":
            sample = {"input_ids": torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator), "labels": torch.tensor(i % 2)}
        elif self.task == "plain":
            sample = {"x": torch.randn(6, generator=generator), "labels": torch.tensor(i % CLASSES)}
        else:
            labels = ids % CLASSES if self.task == "token" else ids.clone()
            labels[2 + i % (length - 1) :] = -100
            sample["labels"] = labels
        return sample


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100}
    batch = {key: torch.stack([functional.pad(row[key], (0, longest - len(row[key])), value=fill[key]) for row in rows]) for key in fill}
    return {**batch, "attention_mask": batch["input_ids"].ne(0).long()}


def build(task: str, **more: Any) -> Any:
    torch.manual_seed(0)
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    heads = {
        "sequence": transformers.BertForSequenceClassification,
        "multi_label": transformers.BertForSequenceClassification,
        "regression": transformers.BertForSequenceClassification,
        "token": transformers.BertForTokenClassification,
        "answer": transformers.BertForQuestionAnswering,
        "choice": transformers.BertForMultipleChoice,
        "masked": transformers.BertForMaskedLM,
    }
    if task in heads:
        kinds = {
            "multi_label": {"problem_type": "multi_label_classification"},
            "regression": {"num_labels": 1},
            "answer": {"num_labels": 2},
        }
        config = {"vocab_size": VOCABULARY, "num_labels": CLASSES, **SMALL, **still, **kinds.get(task, {}), **more}
        return heads[task](transformers.BertConfig(**config)).double()
    if task == "image":
        return transformers.ViTForImageClassification(
            transformers.ViTConfig(image_size=8, patch_size=4, num_labels=CLASSES, **SMALL, **still)
        ).double()
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, pad_token_id=0, **SMALL)
    return transformers.LlamaForCausalLM(config).double()


def trainer(folder: Path, task: str = "causal", *, kind: Any = Trainer, arguments: Any = TrainingArguments, **more: Any) -> Any:
    model = more.pop("model", None)
    dataset = more.pop("dataset", None) or Samples(task)
    init = {
        key: more.pop(key)
        for key in ("compute_loss_func", "eval_dataset", "compute_metrics", "callbacks", "data_collator", "optimizers", "criterion")
        if key in more
    }
    values = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        **more,
    }
    return kind(model=model if model is not None else build(task), args=arguments(**values), train_dataset=dataset, **init)


# ---------------------------------------------------------------------------------------------- losses


@configuration
def clipping(folder: Path) -> Any:
    return trainer(folder, max_grad_norm=0.05)


@configuration
def unclipped_sgd(folder: Path) -> Any:
    return trainer(folder, max_grad_norm=0.0, optim="sgd", gradient_accumulation_steps=3)


@configuration
def label_smoothing(folder: Path) -> Any:
    return trainer(folder, label_smoothing_factor=0.2)


@configuration
def label_smoothing_tokens(folder: Path) -> Any:
    return trainer(folder, "token", label_smoothing_factor=0.2)


@configuration
def multi_label(folder: Path) -> Any:
    return trainer(folder, "multi_label")


@configuration
def regression(folder: Path) -> Any:
    return trainer(folder, "regression")


@configuration
def question_answering(folder: Path) -> Any:
    return trainer(folder, "answer")


@configuration
def multiple_choice(folder: Path) -> Any:
    return trainer(folder, "choice")


@configuration
def image(folder: Path) -> Any:
    return trainer(folder, "image")


class ClassWeights(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weight = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)
        logits = outputs.logits.reshape(-1, CLASSES)
        loss = functional.cross_entropy(logits, labels.reshape(-1), weight=weight)
        return (loss, outputs) if return_outputs else loss


@configuration
def class_weights(folder: Path) -> Any:
    return trainer(folder, "sequence", kind=ClassWeights)


@configuration
def class_weights_tokens(folder: Path) -> Any:
    return trainer(folder, "token", kind=ClassWeights)


class RareClass(Samples):
    """Every fourth sample is of the heavy class, the others of one light class."""

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {**super().__getitem__(i), "labels": torch.tensor(2 if i % 4 == 3 else 0)}


class InOrder(ClassWeights):
    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=BATCH, collate_fn=self.data_collator)


@configuration
def class_weights_rare(folder: Path) -> Any:
    """Any two samples that are looked at first follow a plain mean; the micro-batch does not."""
    return trainer(folder, "sequence", dataset=RareClass("sequence"), kind=InOrder)


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return functional.cross_entropy(outputs["logits"].transpose(1, 2), labels, reduction="sum") / num_items_in_batch


@configuration
def sum_over_items(folder: Path) -> Any:
    return trainer(folder, "token", compute_loss_func=summed)


class PlainSum(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        return functional.cross_entropy(model(**inputs).logits.transpose(1, 2), labels, reduction="sum") / 10


@configuration
def plain_sum(folder: Path) -> Any:
    return trainer(folder, "token", kind=PlainSum)


class MeanOverSamples(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        losses = functional.cross_entropy(model(**inputs).logits.transpose(1, 2), labels, reduction="none")
        kept = labels.ne(-100)
        return ((losses * kept).sum(1) / kept.sum(1)).mean()


@configuration
def mean_over_samples(folder: Path) -> Any:
    return trainer(folder, "token", kind=MeanOverSamples)


class InBatchNegatives(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        pooled = model(input_ids=inputs["input_ids"], output_hidden_states=True).hidden_states[-1].mean(1)
        return functional.cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))


@configuration
def contrastive(folder: Path) -> Any:
    return trainer(folder, kind=InBatchNegatives)


# ---------------------------------------------------------------------------------------------- models


@configuration
def experts_balanced(folder: Path) -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, num_key_value_heads=2, num_local_experts=2, output_router_logits=True, router_aux_loss_coef=0.5, **SMALL
    )
    return trainer(folder, model=transformers.MixtralForCausalLM(config))


@configuration
def experts_free(folder: Path) -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(vocab_size=VOCABULARY, num_key_value_heads=2, num_local_experts=2, **SMALL)
    return trainer(folder, model=transformers.MixtralForCausalLM(config))


@configuration
def switch_transformer(folder: Path) -> Any:
    """Its balance loss is on by default in forward, not in its config."""
    torch.manual_seed(0)
    config = transformers.SwitchTransformersConfig(
        vocab_size=VOCABULARY,
        d_model=8,
        d_kv=4,
        d_ff=16,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        num_experts=2,
        expert_capacity=64,
        dropout_rate=0.0,
        router_jitter_noise=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return trainer(folder, model=transformers.SwitchTransformersForConditionalGeneration(config).double())


@configuration
def tied_weights(folder: Path) -> Any:
    torch.manual_seed(0)
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=8, n_layer=2, n_head=2, n_positions=LENGTH, **still)
    return trainer(folder, model=transformers.GPT2LMHeadModel(config).double())


@configuration
def lora(folder: Path) -> Any:
    from peft import LoraConfig, get_peft_model

    model = build("causal")
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM"))
    return trainer(folder, model=adapted.double())


class Normed(torch.nn.Module):
    """A plain module: batch statistics, a loss of its own, no config."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8)
        self.last = torch.nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.last(self.norm(self.first(x.double())).relu())
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


@configuration
def batch_norm(folder: Path) -> Any:
    torch.manual_seed(0)
    return trainer(folder, "plain", model=Normed().double())


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 8), torch.nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.last(self.first(x.double()).relu())
        return {"loss": functional.cross_entropy(logits, labels) if labels is not None else None, "logits": logits}


@configuration
def plain_module(folder: Path) -> Any:
    torch.manual_seed(0)
    return trainer(folder, "plain", model=Plain().double())


class Centred(Plain):
    """Keeps a running mean of what it saw in a buffer, as codebooks and normalizers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.first(x.double())
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * hidden.mean(0))
        logits = self.last((hidden - self.mean).relu())
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


@configuration
def buffer_in_forward(folder: Path) -> Any:
    torch.manual_seed(0)
    return trainer(folder, "plain", model=Centred().double())


class Annealed(Plain):
    """Counts its own forwards and weighs its loss by them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen += 1
        logits = self.last(self.first(x.double()).relu())
        return {"loss": functional.cross_entropy(logits, labels) * (1 + self.seen / 4), "logits": logits}


@configuration
def count_in_forward(folder: Path) -> Any:
    torch.manual_seed(0)
    return trainer(folder, "plain", model=Annealed().double())


class BalancedInTraining(Plain):
    """A term over the whole batch that evaluation mode does not show, as gates of experts have it."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        found = super().forward(x, labels)
        if self.training:
            found["loss"] = found["loss"] + 0.5 * found["logits"].softmax(-1).mean(0).square().sum()
        return found


@configuration
def balance_in_training(folder: Path) -> Any:
    torch.manual_seed(0)
    return trainer(folder, "plain", model=BalancedInTraining().double())


class AddedInBackward(torch.autograd.Function):
    """DeepSeek's AddAuxiliaryLoss: the loss does not show it, the gradient has it."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, torch.ones((), dtype=gradient.dtype)


class HiddenAuxiliary(Plain):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.first(x.double()).relu()
        logits = self.last(AddedInBackward.apply(hidden, 0.1 * hidden.mean(0).square().sum()))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


@configuration
def auxiliary_in_backward(folder: Path) -> Any:
    torch.manual_seed(0)
    return trainer(folder, "plain", model=HiddenAuxiliary().double())


@configuration
def clamped_gradients(folder: Path) -> Any:
    """Hooks on the weights that clip each micro-batch's gradient by value."""
    made = trainer(folder, optim="sgd", max_grad_norm=0.0)
    for parameter in made.model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return made


class Mixed(Plain):
    """Mixup: each sample is trained together with another of its micro-batch."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if not self.training:
            return super().forward(x, labels)
        assert labels is not None
        other = torch.randperm(len(x))
        logits = self.last(self.first(0.7 * x.double() + 0.3 * x[other].double()).relu())
        return {
            "loss": 0.7 * functional.cross_entropy(logits, labels) + 0.3 * functional.cross_entropy(logits, labels[other]),
            "logits": logits,
        }


@configuration
def mixup(folder: Path) -> Any:
    torch.manual_seed(0)
    return trainer(folder, "plain", model=Mixed().double())


class NumpyNoise(Plain):
    """Noise from numpy, as SpecAugment's masks are."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return super().forward(x + torch.from_numpy(np.random.normal(size=x.shape)) if self.training else x, labels)


@configuration
def numpy_noise(folder: Path) -> Any:
    torch.manual_seed(0)
    return trainer(folder, "plain", model=NumpyNoise().double())


@configuration
def attention_dropout(folder: Path) -> Any:
    """Dropout without a module of that name."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, pad_token_id=0, attention_dropout=0.3, **SMALL)
    return trainer(folder, model=transformers.LlamaForCausalLM(config).double())


@configuration
def noisy_embeddings(folder: Path) -> Any:
    return trainer(folder, neftune_noise_alpha=5.0)


@configuration
def dropout_checkpointed(folder: Path) -> Any:
    """Layers run again in backward draw their masks again."""
    model = build("sequence", hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.1)
    return trainer(folder, "sequence", model=model, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})


# ---------------------------------------------------------------------------------------------- precision and settings


@configuration
def checkpointed(folder: Path) -> Any:
    return trainer(folder, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})


@configuration
def bfloat16(folder: Path) -> Any:
    return trainer(folder, model=build("causal").float(), bf16=True)


@configuration
def scaled_gradients(folder: Path) -> Any:
    """A GradScaler whose first scales overflow, so that steps are skipped."""
    made = trainer(folder, model=build("causal").float(), max_grad_norm=0.0)
    made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1)
    return made


@configuration
def uneven_windows(folder: Path) -> Any:
    """21 samples: each epoch ends with a window of one micro-batch, and that of one sample."""
    return trainer(folder, dataset=Samples("causal", 21), gradient_accumulation_steps=4, max_steps=-1, num_train_epochs=2)


@configuration
def varying_lengths(folder: Path) -> Any:
    return trainer(folder, dataset=Samples("causal", ragged=True), data_collator=pad)


def masked(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Draws its masks from torch's own generator, as DataCollatorForLanguageModeling does."""
    ids = torch.stack([row["input_ids"] for row in rows])
    drawn = torch.rand(ids.shape) < 0.4
    drawn[:, 0] = True
    return {"input_ids": ids.masked_fill(drawn, 1), "labels": ids.masked_fill(~drawn, -100)}


@configuration
def random_masks(folder: Path) -> Any:
    return trainer(folder, "causal", model=build("masked"), data_collator=masked)


@configuration
def averaged_tokens(folder: Path) -> Any:
    return trainer(folder, average_tokens_across_devices=True)


@configuration
def dropout(folder: Path) -> Any:
    return trainer(folder, "sequence", model=build("sequence", hidden_dropout_prob=0.1))


@configuration
def cosine_adafactor(folder: Path) -> Any:
    return trainer(folder, optim="adafactor", lr_scheduler_type="cosine", warmup_steps=1)


# ---------------------------------------------------------------------------------------------- Trainers of their own


class Ema(TrainerCallback):  # type: ignore[misc]
    """Weights averaged over steps, and counts of what the Trainer reports."""

    def __init__(self) -> None:
        self.average: list[torch.Tensor] = []
        self.substeps = self.steps = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.substeps += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.steps += 1
        now = [parameter.detach().clone() for parameter in more["model"].parameters()]
        self.average = [0.9 * old + 0.1 * new for old, new in zip(self.average or now, now, strict=True)]


@configuration
def averaged_weights(folder: Path) -> Any:
    return trainer(folder, callbacks=[Ema()])


class OwnStep(Trainer):  # type: ignore[misc]
    counted = 0.0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.counted += float(inputs["labels"].ne(-100).sum())
        return super().training_step(model, inputs, num_items_in_batch) * 1.0


@configuration
def own_training_step(folder: Path) -> Any:
    return trainer(folder, kind=OwnStep)


class TwoBackwards(Trainer):  # type: ignore[misc]
    """Adversarial training: a second forward and backward with disturbed embeddings."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        twin = dict(inputs)
        loss = super().training_step(model, inputs, num_items_in_batch)
        weight = model.get_input_embeddings().weight
        kept = weight.detach().clone()
        weight.data.add_(0.01 * weight.grad.sign())
        super().training_step(model, twin, num_items_in_batch)
        weight.data.copy_(kept)
        return loss


@configuration
def adversarial_step(folder: Path) -> Any:
    return trainer(folder, kind=TwoBackwards)


class OwnBatches(Trainer):  # type: ignore[misc]
    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, *more: Any) -> Any:
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, *more)
        return batches[::-1], items


@configuration
def own_batch_samples(folder: Path) -> Any:
    return trainer(folder, kind=OwnBatches)


class OwnLoader(Trainer):  # type: ignore[misc]
    def get_train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(5)
        return torch.utils.data.DataLoader(
            self.train_dataset, batch_size=3, shuffle=True, generator=generator, collate_fn=self.data_collator
        )


@configuration
def own_dataloader(folder: Path) -> Any:
    return trainer(folder, kind=OwnLoader)


class LossWithWeights(Trainer):  # type: ignore[misc]
    """Trains a temperature that is no part of the model, as losses of sentence-transformers do."""

    temperature = None

    def create_optimizer(self, *more: Any) -> Any:
        self.temperature = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        optimizer = super().create_optimizer(*more)
        optimizer.add_param_group({"params": [self.temperature]})
        return optimizer

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        return functional.cross_entropy(model(**inputs).logits * self.temperature, labels)


@configuration
def weights_of_the_loss(folder: Path) -> Any:
    return trainer(folder, "sequence", kind=LossWithWeights, max_grad_norm=0.0, optim="sgd")


class RunningMean:
    def __init__(self) -> None:
        self.mean = torch.zeros((), dtype=torch.float64)

    def update(self, value: torch.Tensor) -> float:
        self.mean = 0.8 * self.mean + 0.2 * value.detach()
        return float(self.mean)


class AgainstABaseline(Trainer):  # type: ignore[misc]
    """Weighs its loss by a running mean it keeps in an object of its own, as TRL's BCO does."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.running = RunningMean()

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        losses = functional.cross_entropy(model(**inputs).logits, labels, reduction="none")
        return (losses * (1 + self.running.update(labels.double().mean()))).mean()


@configuration
def running_baseline(folder: Path) -> Any:
    return trainer(folder, "sequence", kind=AgainstABaseline)


class WarmedUp(Trainer):  # type: ignore[misc]
    """A term over the batch whose weight grows from nothing, as KTO's distance from the reference model does."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        outputs = model(**inputs)
        return outputs.loss + max(0, self.state.global_step - 1) * (20 * outputs.logits).softmax(-1).mean(0).square().sum()


@configuration
def warmed_up_auxiliary(folder: Path) -> Any:
    return trainer(folder, "sequence", kind=WarmedUp)


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.samples = Samples("causal", 200)

    @property
    def order(self) -> list[int]:
        return self.samples.order

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.samples[i] for i in range(200))


@configuration
def streamed(folder: Path) -> Any:
    return trainer(folder, dataset=Stream())


# ---------------------------------------------------------------------------------------------- evaluation


@configuration
def evaluated(folder: Path) -> Any:
    def accuracy(pair: Any) -> dict[str, float]:
        return {"accuracy": float((pair.predictions.argmax(-1) == pair.label_ids).mean())}

    return trainer(
        folder,
        "sequence",
        eval_dataset=Samples("sequence", 11),
        compute_metrics=accuracy,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
    )


@configuration
def generated(folder: Path) -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    config = transformers.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **sizes)
    model = transformers.T5ForConditionalGeneration(config).double()
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, max_new_tokens=4, do_sample=False
    )

    def first(pair: Any) -> dict[str, float]:
        return {"sum": float(pair.predictions.clip(min=0).sum())}

    return trainer(
        folder,
        "seq2seq",
        model=model,
        kind=Seq2SeqTrainer,
        arguments=Seq2SeqTrainingArguments,
        predict_with_generate=True,
        eval_dataset=Samples("seq2seq", 7),
        compute_metrics=first,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=4,
    )


def fresh(make: Make, folder: Path) -> Any:
    """The same Trainer each time, from the same random state."""
    transformers.set_seed(7)
    return make(copy.copy(folder))
