"""Training runs that fault_schedules.py disturbs, second part: state that a step moves beside weights and gradients.

Where it lies is what differs: a generator, a loss object, a closure, a global of the script, a class, a buffer of the loss, a hook in a
layer, a teacher, a queue, a second loader, a counter that decides what is logged. `observed` names what must end as undisturbed.
"""

from __future__ import annotations

import collections
import copy
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from fault_configurations import CLASSES, OBSERVED, Plain, Samples, build, configuration, masked, trainer
from torch.nn import functional
from transformers import Trainer


def observed(made: Any, look: Callable[[], Any]) -> Any:
    OBSERVED[made] = look
    return made


def plain(folder: Path, model: type[torch.nn.Module] = Plain, **more: Any) -> Any:
    torch.manual_seed(0)
    return trainer(folder, "plain", model=model().double(), **more)


def cross_entropy(outputs: Any, labels: Any) -> torch.Tensor:
    logits = outputs["logits"]
    return functional.cross_entropy(logits.transpose(1, logits.dim() - 1), labels)


# ---------------------------------------------------------------------------------------------- generators of the script's own


class OwnNoise(Plain):
    """Dropout from a generator that the model keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if self.training:
            x = x * torch.rand(x.shape, generator=self.generator, dtype=x.dtype).gt(0.3)
        return super().forward(x, labels)


@configuration
def generator_of_the_model(folder: Path) -> Any:
    made = plain(folder, OwnNoise)
    return observed(made, lambda: made.model.generator.get_state().sum().item())


@configuration
def generator_in_a_closure(folder: Path) -> Any:
    own = torch.Generator().manual_seed(4)

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs["logits"]
        noisy = logits + 0.5 * torch.randn(logits.shape, generator=own, dtype=logits.dtype) if logits.requires_grad else logits
        return functional.cross_entropy(noisy, labels, reduction="sum") / 8

    made = plain(folder, compute_loss_func=loss)
    return observed(made, lambda: own.get_state().sum().item())


@configuration
def generator_of_the_collator(folder: Path) -> Any:
    own = np.random.default_rng(5)

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = transformers.default_data_collator(rows)
        batch["x"] = batch["x"] + torch.from_numpy(own.normal(size=batch["x"].shape))
        return batch

    return observed(plain(folder, data_collator=collate), lambda: str(own.bit_generator.state))


class Skipping(Plain):
    """Leaves a layer out now and then, drawn once per call from a generator of numpy's; a factor from one of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.rng, self.other = np.random.default_rng(6), random.Random(7)
        self.more = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.first(x.double()).relu()
        if self.training:
            hidden = hidden * self.other.uniform(0.5, 1.5)
            hidden = hidden if self.rng.random() < 0.4 else self.more(hidden).relu()
        logits = self.last(hidden)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


@configuration
def layer_drawn_per_call(folder: Path) -> Any:
    made = plain(folder, Skipping)
    return observed(made, lambda: (str(made.model.rng.bit_generator.state), made.model.other.getstate()))


class DrawnGlobally(Plain):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        scale = random.random() + np.random.beta(0.4, 0.4) if self.training else 1.0
        return super().forward(x * scale, labels)


@configuration
def factor_drawn_per_call(folder: Path) -> Any:
    return plain(folder, DrawnGlobally)


class FlipMix(Plain):
    """Mixup as timm does it: a factor from numpy, partners by turning the batch round."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if not self.training:
            return super().forward(x, labels)
        share = float(np.random.beta(0.8, 0.8))
        assert labels is not None
        logits = super().forward(share * x + (1 - share) * x.flip(0), labels)["logits"]
        loss = share * functional.cross_entropy(logits, labels) + (1 - share) * functional.cross_entropy(logits, labels.flip(0))
        return {"loss": loss, "logits": logits}


@configuration
def mixup_by_numpy(folder: Path) -> Any:
    return plain(folder, FlipMix)


class ShuffleMix(FlipMix):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if not self.training:
            return super().forward(x, labels)
        other = torch.from_numpy(np.random.permutation(len(x)))
        assert labels is not None
        logits = Plain.forward(self, 0.7 * x + 0.3 * x[other], labels)["logits"]
        return {
            "loss": 0.7 * functional.cross_entropy(logits, labels) + 0.3 * functional.cross_entropy(logits, labels[other]),
            "logits": logits,
        }


@configuration
def mixup_shuffled_by_numpy(folder: Path) -> Any:
    return plain(folder, ShuffleMix)


# ---------------------------------------------------------------------------------------------- losses that remember


class RunningLoss(torch.nn.Module):
    """A loss module held by the Trainer, centred by a running mean in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(CLASSES, dtype=torch.float64))

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(logits - self.centre, labels)
        if logits.requires_grad:
            self.centre.mul_(0.7).add_(0.3 * logits.detach().mean(0))
        return loss


class WithALoss(Trainer):  # type: ignore[misc]
    def __init__(self, *args: Any, criterion: Any = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self.criterion = criterion if criterion is not None else RunningLoss()

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        outputs = model(**inputs)
        loss = self.criterion(outputs["logits"], inputs["labels"])
        return (loss, outputs) if return_outputs else loss


@configuration
def loss_with_a_buffer(folder: Path) -> Any:
    made = plain(folder, kind=WithALoss)
    return observed(made, lambda: made.criterion.centre.clone())


class Teaching(Trainer):  # type: ignore[misc]
    """Against a slow copy of the student, moved with each micro-batch."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    @torch.no_grad()
    def follow(self, model: Any) -> None:
        for slow, fast in zip(self.teacher.parameters(), model.parameters(), strict=True):
            slow.data.mul_(0.9).add_(0.1 * fast.data)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        self.follow(model)
        outputs, taught = model(**inputs), self.teacher(**inputs)
        return outputs["loss"] + (outputs["logits"] - 3 * taught["logits"]).square().mean()


@configuration
def teacher(folder: Path) -> Any:
    made = plain(folder, kind=Teaching)
    return observed(made, lambda: torch.cat([value.flatten() for value in made.teacher.parameters()]))


class Queue:
    """MoCo's: outputs of earlier batches as negatives."""

    def __init__(self) -> None:
        self.keys = torch.ones(2, CLASSES, dtype=torch.float64)

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        against = (logits @ self.keys.T).logsumexp(1)
        if logits.requires_grad:
            self.keys = torch.cat([logits.detach(), self.keys])[:8]
        return (functional.cross_entropy(logits, labels, reduction="none") + against).mean()


@configuration
def queue_of_negatives(folder: Path) -> Any:
    made = plain(folder, kind=WithALoss, criterion=Queue())
    return observed(made, lambda: made.criterion.keys.clone())


class DequeOfLosses:
    def __init__(self) -> None:
        self.recent: collections.deque[float] = collections.deque([1.0], maxlen=5)

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = functional.cross_entropy(logits, labels, reduction="none")
        weights = (losses.detach() / (sum(self.recent) / len(self.recent))).clamp(0.5, 2)
        if logits.requires_grad:
            self.recent.append(float(losses.max()))
        return (losses * weights).mean()


@configuration
def weights_by_recent_losses(folder: Path) -> Any:
    made = plain(folder, kind=WithALoss, criterion=DequeOfLosses())
    return observed(made, lambda: list(made.criterion.recent))


@configuration
def focus_in_a_closure(folder: Path) -> Any:
    """Focal weights that sharpen with each call."""
    focus = 0.0

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        nonlocal focus
        focus = min(2.0, focus + 0.25) if outputs["logits"].requires_grad else focus
        losses = functional.cross_entropy(outputs["logits"], labels, reduction="none")
        return ((1 - (-losses).exp()) ** focus * losses).sum() / 8

    return observed(plain(folder, compute_loss_func=loss), lambda: focus)


class Annealing:
    """A callable loss object that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.calls += 1
        return functional.cross_entropy(outputs["logits"], labels, reduction="sum") / 8 * 0.9**self.calls


@configuration
def counting_loss_object(folder: Path) -> Any:
    loss = Annealing()
    return observed(plain(folder, compute_loss_func=loss), lambda: loss.calls)


CALLS = 0
TABLE = {"calls": 0, "seen": []}


def counted_globally(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    global CALLS
    CALLS += 1
    TABLE["calls"] += 1  # type: ignore[operator]
    return functional.cross_entropy(outputs["logits"], labels, reduction="sum") / 8 * 0.9 ** (CALLS + TABLE["calls"])  # type: ignore[operator]


@configuration
def global_of_the_script(folder: Path) -> Any:
    global CALLS
    CALLS, TABLE["calls"] = 0, 0
    return observed(plain(folder, compute_loss_func=counted_globally), lambda: (CALLS, TABLE["calls"]))


def counted_on_itself(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    counted_on_itself.calls += 1  # type: ignore[attr-defined]
    return functional.cross_entropy(outputs["logits"], labels, reduction="sum") / 8 * 0.9**counted_on_itself.calls  # type: ignore[attr-defined]


@configuration
def attribute_of_a_function(folder: Path) -> Any:
    counted_on_itself.calls = 0  # type: ignore[attr-defined]
    return observed(plain(folder, compute_loss_func=counted_on_itself), lambda: counted_on_itself.calls)  # type: ignore[attr-defined]


class CountedByItsClass(Plain):
    calls = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        CountedByItsClass.calls += self.training
        found = super().forward(x, labels)
        return {**found, "loss": found["loss"] * 0.9**CountedByItsClass.calls}


@configuration
def attribute_of_a_class(folder: Path) -> Any:
    CountedByItsClass.calls = 0
    return observed(plain(folder, CountedByItsClass), lambda: CountedByItsClass.calls)


@configuration
def iterator_in_a_closure(folder: Path) -> Any:
    steps = itertools.count()

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        share = 0.9 ** next(steps) if outputs["logits"].requires_grad else 1.0
        return share * functional.cross_entropy(outputs["logits"], labels, reduction="sum") / 8

    return observed(plain(folder, compute_loss_func=loss), lambda: repr(steps))


def forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


class SecondLoader(Trainer):  # type: ignore[misc]
    """Every micro-batch brings one of another stream, as semi-supervised training does."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.others = forever(torch.utils.data.DataLoader(Samples("plain", 60), batch_size=2))

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        loss = model(**inputs)["loss"]
        return loss + model(**next(self.others))["loss"] if model.training else loss


@configuration
def second_loader(folder: Path) -> Any:
    return plain(folder, kind=SecondLoader)


# ---------------------------------------------------------------------------------------------- models that remember


class Smoothed(Plain):
    """A running mean in a plain attribute, which is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(8, dtype=torch.float64)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.first(x.double())
        if self.training:
            self.mean = 0.8 * self.mean + 0.2 * hidden.detach().mean(0)
        logits = self.last((hidden - self.mean).relu())
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


@configuration
def tensor_attribute(folder: Path) -> Any:
    made = plain(folder, Smoothed)
    return observed(made, lambda: made.model.mean.clone())


class DataWritten(Plain):
    """A buffer moved through `.data`, which leaves its version as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.first(x.double())
        if self.training:
            self.mean.data.mul_(0.9).add_(0.1 * hidden.detach().mean(0))
        logits = self.last((hidden - self.mean).relu())
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


@configuration
def buffer_by_data(folder: Path) -> Any:
    made = plain(folder, DataWritten)
    return observed(made, lambda: made.model.mean.clone())


class LateMean(Smoothed):
    """Its mean begins to move in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        self.calls += self.training
        kept = self.mean
        found = super().forward(x, labels)
        if self.calls <= 2:
            self.mean = kept
        return found


@configuration
def mean_that_begins_late(folder: Path) -> Any:
    made = plain(folder, LateMean)
    return observed(made, lambda: made.model.mean.clone())


@configuration
def hook_in_a_layer(folder: Path) -> Any:
    """A forward hook that centres a layer's output by what it saw before."""
    made = trainer(folder)
    seen = {"mean": torch.zeros((), dtype=torch.float64)}

    def centre(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if module.training:
            seen["mean"] = 0.8 * seen["mean"] + 0.2 * output.detach().mean()
        return output - seen["mean"]

    made.model.model.layers[1].mlp.register_forward_hook(centre)
    return observed(made, lambda: seen["mean"].clone())


@configuration
def calls_of_a_layer(folder: Path) -> Any:
    """The same with a count: equal for pieces, but moved twice where a layer is computed again in backward."""
    made = trainer(folder)
    calls = [0]

    def weaker(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        calls[0] += module.training
        return output * 0.9 ** calls[0]

    made.model.model.layers[1].mlp.register_forward_hook(weaker)
    return observed(made, lambda: calls[0])


@configuration
def noise_of_a_layer(folder: Path) -> Any:
    """A layer's own generator: computed again in backward it draws other noise."""
    made = trainer(folder)
    own = torch.Generator().manual_seed(8)

    def noisy(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + torch.randn(output.shape, generator=own, dtype=output.dtype) if module.training else output

    made.model.model.layers[1].mlp.register_forward_hook(noisy)
    return observed(made, lambda: own.get_state().sum().item())


@configuration
def spectral_norm(folder: Path) -> Any:
    made = plain(folder)
    torch.nn.utils.parametrizations.spectral_norm(made.model.first)
    return trainer(folder, "plain", model=made.model)


@configuration
def quantized_while_training(folder: Path) -> Any:
    """Observers that follow the range of what passes."""
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    made = plain(folder)
    quantize = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    made.model.first = torch.nn.Sequential(made.model.first, quantize)
    return trainer(folder, "plain", model=made.model)


class KeepsOutputs(Plain):
    """Keeps its last hidden states for whoever wants to look at them."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        found = super().forward(x, labels)
        self.last_logits = found["logits"]
        return found


@configuration
def outputs_kept(folder: Path) -> Any:
    return plain(folder, KeepsOutputs)


class Decayed(Plain):
    """Shrinks a weight of its own in each forward."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if self.training:
            with torch.no_grad():
                self.last.weight.mul_(0.98)
        return super().forward(x, labels)


@configuration
def weights_moved_in_forward(folder: Path) -> Any:
    return plain(folder, Decayed, gradient_accumulation_steps=1)


# ---------------------------------------------------------------------------------------------- counts and figures


class LogsEveryThird(Trainer):  # type: ignore[misc]
    """Every third call logs the loss of its micro-batch."""

    calls = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        outputs = model(**inputs)
        if model.training:
            self.calls += 1
            if self.calls % 3 == 0:
                self.log({"third_loss": float(outputs["loss"])})
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


@configuration
def logs_every_third_call(folder: Path) -> Any:
    made = plain(folder, kind=LogsEveryThird)
    return observed(made, lambda: made.calls)


class AnnealsByCalls(Trainer):  # type: ignore[misc]
    calls = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        self.calls += model.training
        return model(**inputs)["loss"] * 0.9**self.calls


@configuration
def counter_of_the_trainer(folder: Path) -> Any:
    made = plain(folder, kind=AnnealsByCalls)
    return observed(made, lambda: made.calls)


class ScaledByRunningNumber(Trainer):  # type: ignore[misc]
    """Divides by a running mean of its losses, a plain number."""

    smooth = 1.0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.smooth = 0.7 * self.smooth + 0.3 * float(loss)
        return loss

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        return model(**inputs)["loss"] / self.smooth


@configuration
def running_number_of_the_trainer(folder: Path) -> Any:
    made = plain(folder, kind=ScaledByRunningNumber)
    return observed(made, lambda: made.smooth)


class KeepsFigures(Trainer):  # type: ignore[misc]
    """Lists of figures, logged as their means, and sums of samples and calls."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.figures: dict[str, list[float]] = collections.defaultdict(list)
        self.samples = self.calls = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        outputs = model(**inputs)
        self.figures["loss"].append(float(outputs["loss"]))
        self.figures["samples"].append(len(inputs["labels"]))
        self.figures["right"].append(float((outputs["logits"].argmax(-1) == inputs["labels"]).double().mean()))
        self.samples, self.calls = self.samples + len(inputs["labels"]), self.calls + 1
        return outputs["loss"]

    def log(self, logs: Any, *more: Any) -> None:
        super().log(logs | {name: sum(values) / len(values) for name, values in self.figures.items() if values}, *more)
        self.figures.clear()


@configuration
def figures_of_compute_loss(folder: Path) -> Any:
    made = plain(folder, kind=KeepsFigures)
    return observed(made, lambda: (made.samples, made.calls))


class OverTokens(Trainer):  # type: ignore[misc]
    """A sum over what this micro-batch counts: all attended tokens, labelled or not."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        logits = model(input_ids=inputs["input_ids"]).logits
        losses = functional.cross_entropy(logits.transpose(1, 2), inputs["labels"], reduction="sum")
        return losses / inputs["input_ids"].ne(0).sum()


@configuration
def own_count_of_tokens(folder: Path) -> Any:
    from fault_configurations import pad

    return trainer(folder, "token", dataset=Samples("causal", ragged=True), model=build("causal"), data_collator=pad, kind=OverTokens)


class RootOfTokens(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        logits = model(input_ids=inputs["input_ids"]).logits
        losses = functional.cross_entropy(logits.transpose(1, 2), inputs["labels"], reduction="sum")
        return losses / inputs["labels"].ne(-100).sum().sqrt()


@configuration
def root_of_the_count(folder: Path) -> Any:
    return trainer(folder, "token", kind=RootOfTokens)


class LastOfTheWindow(Trainer):  # type: ignore[misc]
    """A term that only the micro-batch before the optimizer's step has."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        loss = model(**inputs)["loss"]
        return loss + 0.5 * model.first.weight.square().sum() if self.accelerator.sync_gradients else loss


@configuration
def term_of_the_last_micro_batch(folder: Path) -> Any:
    return plain(folder, kind=LastOfTheWindow, gradient_accumulation_steps=3)


class HalvesGradients(Trainer):  # type: ignore[misc]
    """Touches the gradients after each micro-batch."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        return loss


@configuration
def gradients_touched_after_each(folder: Path) -> Any:
    return plain(folder, kind=HalvesGradients)


class ClipsEach(Trainer):  # type: ignore[misc]
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        return loss


@configuration
def clipped_after_each(folder: Path) -> Any:
    return plain(folder, kind=ClipsEach, optim="sgd", max_grad_norm=0.0)


class Counting(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.substeps = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.substeps += 1
        torch.rand(3)


class ReadsItsCallback(Trainer):  # type: ignore[misc]
    """The loss looks at what a callback counts, and the callback draws random numbers between micro-batches."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.counting = Counting()
        self.add_callback(self.counting)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        outputs = model(**inputs)
        noise = 0.1 * torch.rand(outputs["logits"].shape, dtype=torch.float64) if model.training else 0.0
        return functional.cross_entropy(outputs["logits"] + noise, inputs["labels"]) * 0.9**self.counting.substeps


@configuration
def callback_between_micro_batches(folder: Path) -> Any:
    made = plain(folder, kind=ReadsItsCallback, gradient_accumulation_steps=4)
    return observed(made, lambda: made.counting.substeps)


class Packs:
    """A stateful collator: what is left of a batch goes into the next."""

    def __init__(self) -> None:
        self.rest: list[torch.Tensor] = []

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        stream = torch.cat([*self.rest, *(row["input_ids"] for row in rows)])
        count = len(stream) // 6
        self.rest = [stream[6 * count :]]
        return {"input_ids": stream[: 6 * count].view(count, 6), "labels": stream[: 6 * count].view(count, 6)}


@configuration
def collator_with_a_rest(folder: Path) -> Any:
    packs = Packs()
    made = trainer(folder, dataset=Samples("causal", ragged=True), data_collator=packs)
    return observed(made, lambda: torch.cat(packs.rest))


class Shuffled(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """A stream with a shuffling buffer."""

    def __init__(self) -> None:
        self.samples, self.rng = Samples("causal", 200), random.Random(3)

    @property
    def order(self) -> list[int]:
        return self.samples.order

    def __iter__(self) -> Iterator[dict[str, Any]]:
        kept: list[int] = []
        for i in range(200):
            kept.append(i)
            if len(kept) == 8:
                yield self.samples[kept.pop(self.rng.randrange(8))]


@configuration
def shuffled_stream(folder: Path) -> Any:
    made = trainer(folder, dataset=Shuffled(), data_collator=masked, model=build("masked"))
    return observed(made, made.train_dataset.rng.getstate)


class NoisyWhenAsked(Plain):
    noisy = False

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return super().forward(x * torch.rand(x.shape).gt(0.3) if self.noisy else x, labels)


class NoisyEvaluation(Trainer):  # type: ignore[misc]
    def prediction_step(self, model: Any, *args: Any, **more: Any) -> Any:
        model.noisy = True
        found = super().prediction_step(model, *args, **more)
        model.noisy = False
        return found


@configuration
def noisy_evaluation(folder: Path) -> Any:
    """Evaluation draws random numbers, as sampled generation does; training goes on from where it leaves the generator."""
    evaluated = {"eval_dataset": Samples("plain", 11), "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    return plain(folder, NoisyWhenAsked, kind=NoisyEvaluation, **evaluated)
