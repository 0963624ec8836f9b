"""The losses a model does not compute itself: by task, by preference training, or by the Trainer's own method.

Losses that the model does not compute itself, and why a loss is not a mean over samples when it is not. Preference training as other tools
do it, and TRL where it is not installed (`trl_trainer` runs TRL's own loss): pairs in one batch, a reference model beside the policy, and
losses that compare, from whole logits.

A sample is a pair (DPO, Reward): n samples are 2n sequences, the chosen ones first. DPO and KTO also run the reference model without
gradients: a frozen second copy of the weights, or with LoRA the same weights with the adapter switched off; none where the answers were
asked for before. What is left out, and said: GRPO's generation, KTO's extra pass for its KL term.

The modules a Trainer keeps beside its model: a reference model, a loss that is a module. They are copied together. TRL keeps `ref_model`;
sentence-transformers keeps `loss` (one, or one per dataset), which holds the model itself. A copy of the model alone would leave the loss
with the live one.

A Trainer's own loss, called on a copy of the Trainer that keeps its notes to itself and talks to no other rank.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from hfopt.errors import WorkloadError
from hfopt.schema import GENERATING, Task

Loss = Callable[[Any, dict[str, Any]], Any]


def loss_for(task: Task) -> Loss | None:
    return in_batch_negatives if task == "embedding" else None


def in_batch_negatives(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The contrastive loss embedding models are mostly trained with: each anchor against every positive of the batch.

    Anchors and positives are two forward passes; mean pooling over real tokens, cosine similarity × 20, cross-entropy
    (sentence-transformers' MultipleNegativesRankingLoss). The n × n scores grow with the square of the batch.
    """
    anchors = {name: tensor for name, tensor in batch.items() if not name.startswith("positive_")}
    positives = {name.removeprefix("positive_"): tensor for name, tensor in batch.items() if name.startswith("positive_")}
    first, second = (_pooled(model, inputs) for inputs in (anchors, positives))
    scores = 20 * first @ second.T
    return nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def _pooled(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    hidden = model(**inputs).last_hidden_state
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
    return nn.functional.normalize(mean, dim=-1)


def why_batch_dependent(model: nn.Module, task: Task, accepts: frozenset[str]) -> str | None:
    """A reason why two half batches do not give the gradient of the whole one, or None."""
    if task == "embedding":
        return "contrastive: each sample is compared with the others of its batch"
    if "return_loss" in accepts:
        return "contrastive: each image is compared with the texts of its batch"
    for name, module in over_the_batch(model):
        if any(p.requires_grad for p in module.parameters()):
            return f"{name} normalises over the batch ({type(module).__name__})"
    return None


def over_the_batch(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers that take statistics over the batch, which no rule can see in evaluation mode."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            yield name, module


REFERENCE = "reference_model"  # the name under which a recipe attaches it
PAIRED = frozenset({"DPO", "Reward", "ORPO", "CPO"})
WITH_REFERENCE = frozenset({"DPO", "KTO"})
_BETA = 0.1  # TRL's default; the memory does not depend on it

NOTES = {
    "RLOO": "RLOO: the update is estimated as one of a causal LM; generation and its cache are not in it",
    "GRPO": "GRPO: the update is estimated as one of a causal LM; generation and its cache are not in it",
    "KTO": "KTO: the extra pass for the KL term is not in the estimate",
}

_OF_TOKENS = "is a mean over the tokens of a micro-batch, in which a sample counts more beside short ones"


def known_dependence(trainer: str, arguments: Mapping[str, Any]) -> str | None:
    """Of trainers whose samples cannot show it: policy and reference are equal before the first step, or the samples are of one length.

    Source: trl 1.16.0 (experimental/{kto,orpo,cpo}, trainer/dpo_trainer.py, trainer/grpo_trainer.py: compute_loss).
    """
    if trainer == "KTO":
        return "KTO: the KL term is a mean over the micro-batch, with mismatched pairs made within it"
    if trainer == "ORPO" or (trainer == "CPO" and arguments.get("cpo_alpha") != 0):
        return f"{trainer}: the likelihood of the chosen completions {_OF_TOKENS}"
    losses = arguments.get("loss_type")
    names = losses if isinstance(losses, (list, tuple)) else (losses,)
    if trainer == "DPO" and ("sft" in names or arguments.get("rpo_alpha") is not None):
        return f"DPO: the likelihood of the chosen completions (loss_type: sft) {_OF_TOKENS}"
    if trainer in GENERATING and "bnpo" in names:
        return f"{trainer}: the loss of loss_type: bnpo {_OF_TOKENS}"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Batches of pairs: twice as many sequences as samples."""

    single: Callable[[int], dict[str, Any]]
    keep_labels: bool

    def __call__(self, samples: int) -> dict[str, Any]:
        if samples < 1:
            raise WorkloadError(f"a batch of {samples} pairs cannot be made", hint="the smallest batch size is 1")
        batch = self.single(2 * samples)
        return batch if self.keep_labels else {name: tensor for name, tensor in batch.items() if name != "labels"}


def preference_loss(trainer: str, *, asks_reference: bool = True) -> Loss | None:
    """Without asking: the reference's answers came with the samples (precompute_ref_log_probs), a number for each."""
    asked = partial(_ratio, asks_reference=asks_reference)
    compared = partial(_dpo, ratio=asked)
    losses: dict[str, Loss] = {"DPO": compared, "KTO": partial(_kto, ratio=asked), "Reward": _reward, "ORPO": compared, "CPO": compared}
    return losses.get(trainer)


def _dpo(model: Any, batch: dict[str, Any], *, ratio: Loss) -> torch.Tensor:
    """-log σ(β·((chosen - rejected) of the policy - the same of the reference))."""
    chosen, rejected = ratio(model, batch).chunk(2)
    return -nn.functional.logsigmoid(_BETA * (chosen - rejected)).mean()


def _kto(model: Any, batch: dict[str, Any], *, ratio: Loss) -> torch.Tensor:
    return (1 - torch.sigmoid(_BETA * ratio(model, batch))).mean()


def _ratio(model: Any, batch: dict[str, Any], *, asks_reference: bool) -> torch.Tensor:
    policy, logits = _sequence_log_probs(model, batch)
    ratio = policy - (_reference_log_probs(model, batch) if asks_reference else torch.zeros_like(policy))
    del logits  # of the policy, held for the metrics while the reference is asked
    return ratio


def _reward(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """-log σ(reward of the chosen - reward of the rejected)."""
    chosen, rejected = model(**batch).logits.squeeze(-1).chunk(2)
    return -nn.functional.logsigmoid(chosen - rejected).mean()


def valued_reward(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The same by a value head on a causal model, as LLaMA-Factory trains it (train/rm/trainer.py): the logits, which nobody asks for, are
    made all the same and widened to float32. The head's own few weights are left out: one feature stands for them."""
    outputs = model(**batch, output_hidden_states=True, use_cache=False)
    widened = outputs.logits.float()
    chosen, rejected = outputs.hidden_states[-1][:, -1, 0].float().chunk(2)
    loss = -nn.functional.logsigmoid(chosen - rejected).mean()
    del widened  # held until here
    return loss


def _sequence_log_probs(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """And the logits, whole and widened to float32, as LLaMA-Factory has them (train/dpo/trainer.py, train/trainer_utils.py)."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits.to(torch.float32)
    labels = batch["labels"][:, 1:]
    trained = labels != -100
    picked = torch.gather(logits[:, :-1].log_softmax(-1), 2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
    return (picked * trained).sum(-1), logits


def _reference_log_probs(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    reference = getattr(model, REFERENCE, None)
    if reference is not None:
        reference.eval()
    without_adapter = model.disable_adapter() if reference is None and hasattr(model, "disable_adapter") else nullcontext()
    with torch.no_grad(), without_adapter:
        return _sequence_log_probs(model if reference is None else reference, batch)[0]


_NAMES = {"ref_model": REFERENCE, "loss": "loss"}
CARRIED = "_hfopt_companions"
"""On a copied model: its companions by the trainer's name for them. A plain attribute: a loss that holds the model is no part of it."""

CASTS_ONCE = "_hfopt_casts_once"
"""On a carried reference: its weights were not frozen, so that autocast keeps what it casts of them for the length of a forward."""


def companions(trainer: Any) -> dict[str, Any]:
    """By the trainer's name for them."""
    found: dict[str, Any] = {}
    for name in _NAMES:
        value = vars(trainer).get(name)
        parts = list(value.values()) if isinstance(value, dict) else [value]
        if parts and all(isinstance(part, nn.Module) and part is not trainer.model for part in parts):
            found[name] = value
    return found


def modules_of(found: dict[str, Any]) -> tuple[nn.Module, ...]:
    return tuple(module for value in found.values() for module in (value.values() if isinstance(value, dict) else (value,)))


def trained_modules(trainer: Any) -> tuple[nn.Module, ...]:
    """All that a copy of this training's model would hold."""
    return (trainer.model, *modules_of(companions(trainer)))


def carry(model: nn.Module, found: dict[str, Any]) -> None:
    """Puts copied companions onto the copied model: a reference as a part of it (it has weights of its own), a loss beside it."""
    model.__dict__[CARRIED] = found
    reference = found.get("ref_model")
    if reference is not None:
        reference.__dict__[CASTS_ONCE] = any(parameter.requires_grad for parameter in reference.parameters())
        model.add_module(REFERENCE, reference.requires_grad_(False))


def carried(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = model.__dict__.get(CARRIED, {})
    return found


_BIG_ATTRIBUTES = frozenset({"train_dataset", "eval_dataset", "model", "model_wrapped", "optimizer", "lr_scheduler", "accelerator"})


def own_loss(trainer: Any) -> Callable[[Any, dict[str, Any]], Any] | None:
    """The trainer's loss if it is its own; the Trainer's usual one is the model's (label smoothing is a setting of the step)."""
    from transformers import Trainer

    if type(trainer).compute_loss is Trainer.compute_loss and getattr(trainer, "compute_loss_func", None) is None:
        return None
    beside = apart(trainer)

    def compute_loss(model: Any, batch: dict[str, Any]) -> Any:
        return loss_of(beside, model, batch)

    return compute_loss


def loss_of(beside: Any, model: Any, batch: dict[str, Any], **more: Any) -> Any:
    """`compute_loss` of a trainer copy whose model, reference and loss are those of `model`."""
    beside.model = beside.model_wrapped = model
    for name, value in carried(model).items():
        setattr(beside, name, value)
    return beside.compute_loss(model, dict(batch), **more)


def apart(trainer: Any) -> Any:
    """A shallow copy whose own notes (metrics, cached columns) are not the live trainer's."""
    beside = copy.copy(trainer)
    for name, value in vars(trainer).items():
        if (isinstance(value, (dict, list, set)) or name in ("state", "control")) and name not in _BIG_ATTRIBUTES:
            try:
                setattr(beside, name, copy.deepcopy(value))
            except (TypeError, RuntimeError):
                setattr(beside, name, copy.copy(value))
    wrapped = inspect.unwrap(vars(trainer).get("compute_loss", _nothing))
    if getattr(wrapped, "__self__", None) is trainer:  # put around the live one (a rehearsal does so), it would ask the live trainer
        beside.compute_loss = MethodType(wrapped.__func__, beside)
    if not hasattr(trainer, "current_gradient_accumulation_steps"):  # the loop sets it, and losses read it
        beside.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    if hasattr(trainer, "accelerator"):
        beside.accelerator = Alone(trainer.accelerator)
    return beside


def _nothing() -> None: ...


class Alone:
    """An accelerator that gathers from this rank only: the others do not plan, so an exchange would wait for them for ever."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    num_processes, process_index, local_process_index, is_main_process, is_local_main_process = 1, 0, 0, True, True

    def gather(self, tensor: Any) -> Any:
        return tensor

    def gather_for_metrics(self, data: Any, *_: Any, **__: Any) -> Any:
        return data

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    def pad_across_processes(self, tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    def wait_for_everyone(self) -> None:
        return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)
