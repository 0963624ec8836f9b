"""Whether and how a micro-batch may be cut into smaller ones without changing the training, or by name why it cannot.

A value that runs over the samples is cut: a tensor or array whose first dimension is the batch, a list of one entry per sample, and what
is nested in dicts, lists and tuples. What is the same for all samples (numbers, strings, scalars, None) is passed on. Anything else, such
as the offsets of packed sequences or patches of all images in one row, is ragged: where one sample ends is known to the model alone.

The rules are those of `facts.loss_rule`. What two samples in evaluation mode cannot show (batch statistics, optimizers that step inside
backward) is looked for in the model.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hfopt.facts.loss_rule import LossShape, Rule, RuleName, counted, explains
from hfopt.model.losses import over_the_batch
from hfopt.oom.step_down import Refusal

Inputs = Any  # a dict, BatchEncoding or BatchFeature
Rows = slice | Sequence[int]

PACKED_KEYS = frozenset(
    {
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "cu_seqlens",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "max_length_q",
        "max_length_k",
        "seq_idx",
        "seq_lengths",
    }
)

_WATCHING = frozenset({"wandb"})  # libraries whose hooks on weights only look at gradients


def shallow_copy(inputs: Inputs) -> Inputs:
    """The same tensors in a new dict: models and losses pop keys from theirs."""
    if isinstance(inputs, UserDict):
        twin = copy.copy(inputs)
        twin.data = dict(inputs.data)
        return twin
    return dict(inputs) if isinstance(inputs, Mapping) else inputs


def batch_size(inputs: Inputs, main_input: str | None = None) -> int | None:
    """How many samples: the first dimension of the main input, else of the first tensor that has one."""
    if not isinstance(inputs, Mapping):
        return None
    if main_input is not None and (size := _first_dimension(inputs.get(main_input))) is not None:
        return size
    return next((size for value in inputs.values() if (size := _first_dimension(value)) is not None), None)


def _first_dimension(value: Any) -> int | None:
    if _is_array(value):
        return int(value.shape[0]) if len(value.shape) else None
    if isinstance(value, Mapping):
        return batch_size(value)
    if isinstance(value, list | tuple) and value and _is_array(value[0]):
        return _first_dimension(value[0])
    return None


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (hasattr(value, "shape") and hasattr(value, "dtype"))


def why_not(inputs: Inputs, size: int | None) -> Refusal | None:
    """None when every value can be cut by sample."""
    if not isinstance(inputs, Mapping) or size is None:
        return Refusal(name="ragged", reason="the batch is not a dict of tensors with the samples in the first dimension")
    packed = sorted(PACKED_KEYS & {key for key, value in inputs.items() if value is not None})
    if packed or (size == 1 and _restarts(inputs.get("position_ids"))):
        return Refusal(
            name="packed", reason=f"samples are packed into one row ({', '.join(packed) or 'position_ids start again within it'})"
        )
    for key, value in inputs.items():
        if not _fits(value, size):
            return Refusal(name="ragged", reason=f"{key!r} does not run over the {size} samples of the batch")
    return None


def _restarts(position_ids: Any) -> bool:
    if not isinstance(position_ids, torch.Tensor) or position_ids.dim() != 2 or position_ids.shape[-1] < 2:
        return False
    return bool((position_ids[:, 1:] < position_ids[:, :-1]).any())


def _fits(value: Any, size: int) -> bool:
    if value is None or isinstance(value, str | bytes | int | float | complex):
        return True
    if isinstance(value, torch.Tensor) and value.is_nested:
        return False
    if _is_array(value):
        return not len(value.shape) or value.shape[0] == size
    if isinstance(value, Mapping):
        return all(_fits(inner, size) for inner in value.values())
    if isinstance(value, list | tuple):
        return len(value) == size or (bool(value) and all(_is_array(inner) and _fits(inner, size) for inner in value))
    return False


def take(inputs: Inputs, rows: Rows, size: int) -> Inputs:
    """The given samples of a batch of `size`, as the same kind of dict."""
    if isinstance(inputs, UserDict):
        twin = shallow_copy(inputs)
        twin.data = {key: _rows(value, rows, size) for key, value in inputs.items()}
        return twin
    return {key: _rows(value, rows, size) for key, value in inputs.items()}


def _rows(value: Any, rows: Rows, size: int) -> Any:
    if _is_array(value):
        return value[rows] if len(value.shape) else value
    if isinstance(value, Mapping):
        return take(value, rows, size)
    if isinstance(value, list | tuple):
        if len(value) != size:
            return type(value)(_rows(inner, rows, size) for inner in value)
        picked = value[rows] if isinstance(rows, slice) else [value[row] for row in rows]
        return type(value)(picked)
    return value


def split(inputs: Inputs, size: int, piece: int) -> list[Inputs]:
    """Pieces of at most `piece` samples, in order; together they are the batch."""
    return [take(inputs, slice(start, min(start + piece, size)), size) for start in range(0, size, piece)]


def versions(inputs: Inputs) -> tuple[int, ...]:
    """How often each tensor was written in place: a model that changes its inputs cannot be given them a second time."""
    if not isinstance(inputs, Mapping):
        return ()
    return tuple(value._version for value in inputs.values() if isinstance(value, torch.Tensor) and not value.is_inference())


LossOf = Callable[[Inputs], float | None]


def find_rule(inputs: Inputs, size: int, shape: LossShape, loss_of: LossOf, expected: Sequence[RuleName]) -> Rule | Refusal:
    """The first of the expected rules that explains the loss of two samples."""
    pair = two_unlike_samples(inputs, size, shape)
    both = take(inputs, pair, size)
    alone = [take(inputs, [row], size) for row in pair]
    whole, losses = loss_of(both), [loss_of(piece) for piece in alone]
    values = [loss for loss in losses if loss is not None]
    if whole is None or len(values) < len(losses):
        return Refusal(name="no_loss", reason="the loss is not one number per micro-batch")
    possible = [name for name in expected if explains(name, whole, values, alone, shape)]
    if not possible:
        return Refusal(
            name="contrastive", reason="the loss of two samples is neither the sum nor the mean of their own losses", batch_bound=True
        )
    return Rule(name=possible[0], settled=len(possible) == 1)


def two_unlike_samples(inputs: Inputs, size: int, shape: LossShape) -> list[int]:
    """Rows with as different numbers of labels as there are, so that the rules differ most."""
    counts = [counted(take(inputs, [row], size), shape, shifted=shape.shifted) or 0 for row in range(size)]
    few = min((row for row in range(size) if counts[row]), key=lambda row: counts[row], default=0)
    many = max((row for row in range(size) if row != few), key=lambda row: counts[row])
    return sorted([few, many])


def structural_refusal(model: torch.nn.Module, trainer: Any) -> Refusal | None:
    """What makes pieces differ from the whole although their losses add up."""
    for name, module in over_the_batch(model):
        if module.training:
            return Refusal(name="batch_norm", reason=f"{name} ({type(module).__name__}) takes statistics over the batch", batch_bound=True)
    config = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False):
        return Refusal(name="expert_balance", reason="the balance loss of the experts is taken over the batch", batch_bound=True)
    if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in model.parameters()):
        return Refusal(name="step_in_backward", reason="the optimizer steps inside backward, so the weights have moved", batch_bound=True)
    hooks = [hook for parameter in model.parameters() for hook in (parameter._backward_hooks or {}).values()]
    if any((getattr(hook, "__module__", None) or "").split(".")[0] not in _WATCHING for hook in hooks):
        return Refusal(name="gradient_hooks", reason="hooks on the weights see the gradient of each backward", batch_bound=True)
    if "lomo" in str(getattr(trainer.args, "optim", "")):
        return Refusal(name="step_in_backward", reason="LOMO steps inside backward, so the weights have moved", batch_bound=True)
    if trainer.args.n_gpu > 1:
        return Refusal(name="data_parallel", reason="torch.nn.DataParallel averages over its replicas; use torchrun")
    return None
