"""Training runs that fault_schedules.py disturbs, third part: what is changed for a while, kept in a library's object, or drawn unevenly.

A failure may come between a change of the model and its undoing (the phase `again`: in the second pass of one micro-batch); a schedule, a
group of the optimizer or a config may be moved by the loss; a callback may touch gradients between micro-batches; a layer may draw as many
numbers as its samples ask for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from fault_configurations import BATCH, CLASSES, VOCABULARY, Normed, Plain, Samples, build, configuration, pad, trainer
from fault_states import observed, plain
from torch.nn import functional
from transformers import Trainer, TrainerCallback

# ---------------------------------------------------------------------------------------------- kept in a library's object


class StepsTheSchedule(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        self.lr_scheduler.step()
        return super().compute_loss(model, inputs, *args, **more)


@configuration
def schedule_in_the_loss(folder: Path) -> Any:
    return plain(folder, kind=StepsTheSchedule, lr_scheduler_type="cosine", max_grad_norm=0.0)


class GrowsDecay(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        for group in self.optimizer.param_groups if model.training else ():
            group["weight_decay"] += 0.5
        return super().compute_loss(model, inputs, *args, **more)


@configuration
def decay_in_the_loss(folder: Path) -> Any:
    return plain(folder, kind=GrowsDecay)


class Cools(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        config, labels = model.config, inputs.pop("labels")
        if model.training:
            config.heat = getattr(config, "heat", 1.0) * 0.9
        return functional.cross_entropy(model(**inputs).logits * getattr(config, "heat", 1.0), labels)


@configuration
def temperature_in_the_config(folder: Path) -> Any:
    return trainer(folder, "sequence", kind=Cools)


@configuration
def sums_on_the_weights(folder: Path) -> Any:
    """Hooks of layers keep figures of the gradient on the weights themselves, as private training does."""
    made = plain(folder, max_grad_norm=0.0, optim="sgd")

    def keep(module: Any, into: Any, out: Any) -> None:
        module.weight.kept = getattr(module.weight, "kept", 0.0) + float(out[0].square().mean(0).sum())

    class Uses(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            for module in (made.model.first, made.model.last):
                module.weight.grad.mul_(1 + module.weight.kept)
                module.weight.kept = 0.0

    for module in (made.model.first, made.model.last):
        module.register_full_backward_hook(keep)
    made.add_callback(Uses())
    return made


# ---------------------------------------------------------------------------------------------- gradients touched between micro-batches


class AddsGradient(TrainerCallback):  # type: ignore[misc]
    def on_substep_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        sum(one.square().sum() for one in more["model"].parameters()).backward()  # type: ignore[union-attr]


@configuration
def gradient_by_a_callback(folder: Path) -> Any:
    return plain(folder, callbacks=[AddsGradient()])


class ClipsBetween(TrainerCallback):  # type: ignore[misc]
    def on_substep_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        for one in more["model"].parameters():
            one.grad.clamp_(-1e-3, 1e-3)


@configuration
def clipped_by_a_callback(folder: Path) -> Any:
    return plain(folder, callbacks=[ClipsBetween()], optim="sgd", max_grad_norm=0.0)


# ---------------------------------------------------------------------------------------------- changed for a while


class SwapsWeights(Trainer):  # type: ignore[misc]
    """Its own weights halved are its teacher."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        kept = [one.detach().clone() for one in model.parameters()]
        for one in model.parameters():
            one.data.mul_(0.5)
        taught = model(**inputs)["logits"].detach()
        for one, value in zip(model.parameters(), kept, strict=True):
            one.data.copy_(value)
        outputs = model(**inputs)
        return outputs["loss"] + (outputs["logits"] - 2 * taught).square().mean()


@configuration
def weights_swapped_for_a_pass(folder: Path) -> Any:
    return plain(folder, kind=SwapsWeights)


class Attacks(Trainer):  # type: ignore[misc]
    """The fast gradient method: a second pass with weights moved along their gradient."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        twin = dict(inputs)
        loss = super().training_step(model, inputs, num_items_in_batch)
        weight = next(model.parameters())
        kept = weight.detach().clone()
        weight.data.add_(0.1 * weight.grad.sign())
        super().training_step(model, twin, num_items_in_batch)
        weight.data.copy_(kept)
        return loss


@configuration
def attacked_weights(folder: Path) -> Any:
    return trainer(folder, kind=Attacks)


class Hooks(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        handle = model.first.register_forward_hook(lambda module, given, output: output * 2)
        other = model(**inputs)["loss"]
        handle.remove()
        return model(**inputs)["loss"] + other


@configuration
def hook_for_a_pass(folder: Path) -> Any:
    return plain(folder, kind=Hooks)


class AdapterOff(Trainer):  # type: ignore[misc]
    """The model without its adapter is the reference; not by PEFT's context manager."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        outputs = model(**inputs)
        model.base_model.disable_adapter_layers()
        with torch.no_grad():
            reference = model(**inputs).logits
        model.base_model.enable_adapter_layers()
        return outputs.loss + 10 * (outputs.logits - 1.5 * reference).square().mean()


@configuration
def adapter_off_for_a_pass(folder: Path) -> Any:
    from peft import LoraConfig, get_peft_model

    model = build("causal")
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.3, task_type="CAUSAL_LM"))
    return trainer(folder, model=adapted.double(), kind=AdapterOff)


class GradientsOff(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        torch.set_grad_enabled(False)
        taught = model(**inputs)["logits"]
        torch.set_grad_enabled(True)
        outputs = model(**inputs)
        return outputs["loss"] + (outputs["logits"] - 2 * taught).square().mean()


@configuration
def gradients_off_for_a_pass(folder: Path) -> Any:
    return plain(folder, kind=GradientsOff)


class OwnBackward(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        outputs = model(**inputs)
        if model.training:
            (0.5 * outputs["logits"].square().mean()).backward(retain_graph=True)
        return outputs["loss"]


@configuration
def backward_in_the_loss(folder: Path) -> Any:
    return plain(folder, kind=OwnBackward)


class Against(Trainer):  # type: ignore[misc]
    """A critic with an optimizer of its own, stepped within the step."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        torch.manual_seed(9)
        self.critic = torch.nn.Linear(CLASSES, 1).double()
        self.critics = torch.optim.Adam(self.critic.parameters(), 1e-2)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        with torch.no_grad():
            logits = model(**inputs)["logits"]
        self.critics.zero_grad()
        self.critic(logits).square().mean().backward()
        self.critics.step()
        return super().training_step(model, inputs, num_items_in_batch)


@configuration
def critic_with_its_optimizer(folder: Path) -> Any:
    made = plain(folder, kind=Against)
    return observed(made, lambda: torch.cat([one.detach().flatten() for one in made.critic.parameters()]))


# ---------------------------------------------------------------------------------------------- drawn unevenly


class NoiseWhere(Plain):
    """As many draws as samples that ask for one."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.first(x.double())
        if self.training:
            asking = x[:, 0] > -0.5
            hidden = hidden.clone()
            hidden[asking] = hidden[asking] + torch.randn(int(asking.sum()), 8, dtype=hidden.dtype)
        logits = self.last(hidden.relu())
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


@configuration
def noise_where_asked(folder: Path) -> Any:
    return plain(folder, NoiseWhere)


class CutToTheLongest(torch.nn.Module):
    """Dropout after the batch is cut to its own longest sample."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first, self.last = torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, CLASSES)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        longest = int(attention_mask.sum(1).max())
        hidden = functional.dropout(self.first(self.words(input_ids[:, :longest])), 0.5, self.training)
        logits = self.last((hidden * attention_mask[:, :longest, None]).sum(1))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def first_words(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = pad(rows)
    return {**batch, "labels": batch["input_ids"][:, 0] % CLASSES}


@configuration
def cut_to_the_longest(folder: Path) -> Any:
    torch.manual_seed(0)
    return trainer(folder, model=CutToTheLongest().double(), dataset=Samples("causal", ragged=True), data_collator=first_words)


class LeakyNoise(Plain):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.last(functional.alpha_dropout(functional.rrelu(self.first(x.double()), training=self.training), 0.3, self.training))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


@configuration
def leaky_noise(folder: Path) -> Any:
    return plain(folder, LeakyNoise)


class TwoPasses(Trainer):  # type: ignore[misc]
    """R-Drop: the same samples under two masks."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        one, other = model(**inputs), model(**inputs)
        return one["loss"] + other["loss"] + (one["logits"] - other["logits"]).square().mean()


class Dropping(Plain):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.first(x.double())
        if self.training:
            kept = hidden.new_empty((len(hidden), 1)).bernoulli_(0.6)  # stochastic depth, as timm draws it
            hidden = functional.dropout(hidden, 0.5) + kept * functional.gumbel_softmax(hidden)
        logits = self.last(hidden.relu())
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


@configuration
def two_masks(folder: Path) -> Any:
    return plain(folder, Dropping, kind=TwoPasses)


# ---------------------------------------------------------------------------------------------- batches


class Positional(Plain):
    """What is added to a sample depends on its place in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("added", torch.linspace(0, 1, BATCH, dtype=torch.float64)[:, None])

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return super().forward(x.double() + self.added[: len(x)], labels)


@configuration
def place_in_the_batch(folder: Path) -> Any:
    return plain(folder, Positional)


class FrozenNorm(Normed):
    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self


@configuration
def frozen_batch_norm(folder: Path) -> Any:
    return plain(folder, FrozenNorm)


class HardExamples(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        losses = functional.cross_entropy(model(**inputs)["logits"], inputs["labels"], reduction="none")
        return losses.topk(max(1, len(losses) // 2)).values.mean()


@configuration
def hard_examples(folder: Path) -> Any:
    return plain(folder, kind=HardExamples)
