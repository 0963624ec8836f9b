"""Liger's kernels in a trace: what liger-kernel 0.8.5 keeps and makes, without liger-kernel, Triton or a GPU.

As `use_liger_kernel` puts them into a text model (transformers/monkey_patch.py):
  loss:   head and cross entropy together (ops/fused_linear_cross_entropy.py): the tokens are cut into slices whose logits take about as
          much as the hidden states; a slice's logits become their own gradient in place, and the gradients of hidden states and weight
          are made in the forward. One slice is traced in place of the loop (`fused_head.Tile`).
  norm:   keeps its input and a float32 per row; the gradient is written over the one that comes in (ops/rms_norm.py)
  gated:  keeps gate and up; their gradients are written over them (ops/swiglu.py, geglu.py)
  rotary: turns queries and keys in place, in their own dtype (ops/rope.py)
Compared with liger-kernel itself on the virtual GPU (tests/memory/test_liger_against_allocator.py). Known limits: experts are left as they
are, so what Liger saves there comes on top; `liger_kernel_config` switches nothing off here.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from hfopt.schema import StepSettings
from hfopt.trace.events import at_least
from hfopt.trace.fused_head import Tile, add_product
from hfopt.trace.recorder import AT_WORK

_COPIES_GRADIENT = frozenset({"gemma2", "gemma3_text", "glm4", "olmo2"})  # in_place=False: the residual needs the one that came in
_PLAIN_ROTARY = frozenset({"glm4"})  # rope=False
_PLAIN_NORMS = {"olmo2": ("q_norm", "k_norm")}  # not patched
_PARTIALS = 132  # rows of partial sums: as many as the card has multiprocessors, an H100's here; they are gone at once


def use_liger(model: Any, settings: StepSettings) -> bool:
    """Puts the kernels into a causal language model; False where the head is not a plain one, and then nothing was changed."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings()
    name = next((name for name, child in base.named_children() if child is head), None)
    if name is None or type(head) is not nn.Linear:
        return False
    _fuse_loss(base, name, head, settings)
    kind = getattr(base.config, "model_type", "")
    for path, module in base.named_modules():
        if type(module).__name__.endswith("RMSNorm") and not path.endswith(_PLAIN_NORMS.get(kind, ("\0",))):
            module.forward = functools.partial(_norm, module, kind not in _COPIES_GRADIENT)
        elif all(hasattr(module, part) for part in ("gate_proj", "up_proj", "down_proj")) and hasattr(module, "act_fn"):
            module.forward = functools.partial(_gated, module)
        elif hasattr(module, "gate_up_proj") and isinstance(getattr(module, "down_proj", None), nn.Module):
            module.forward = functools.partial(_gated_at_once, module)
        elif kind not in _PLAIN_ROTARY and hasattr(sys.modules[type(module).__module__], _ROTARY) and hasattr(module, "q_proj"):
            module.forward = _with_rotary(module)
    return True


# ------------------------------------------------------------------------------------------------- head and loss


def _fuse_loss(base: Any, name: str, head: nn.Linear, settings: StepSettings) -> None:
    setattr(base, name, _PassThrough(head))
    base.loss_function = functools.partial(_loss, head, settings)
    forward = base.forward

    @functools.wraps(forward)
    def without_logits(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(base.config, _SOFTCAP, None) if hasattr(base.config, _SOFTCAP) else contextlib.nullcontext():
            outputs = forward(*args, **kwargs)
        return type(outputs)(loss=outputs.loss)

    base.forward = without_logits


_SOFTCAP = "final_logit_softcapping"  # in the kernel


class _PassThrough(nn.Module):  # type: ignore[misc]
    """Holds the head's parameters in their place and leaves the hidden states as they are."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def _loss(
    head: nn.Linear, settings: StepSettings, logits: torch.Tensor, labels: torch.Tensor, *_: Any, num_items_in_batch: Any = None, **__: Any
) -> torch.Tensor:
    """transformers hands over what the head returned, which are the hidden states here."""
    hidden = logits.reshape(-1, logits.shape[-1])
    targets = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    loss: torch.Tensor = _FusedLinearCrossEntropy.apply(hidden, head.weight, targets, at_least(settings.capability, (8, 0)))
    return loss / num_items_in_batch if num_items_in_batch is not None else loss


class _FusedLinearCrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, sums_wide: bool) -> torch.Tensor:
        (tokens, width), vocabulary = hidden.shape, weight.shape[0]
        hidden_gradient = torch.zeros_like(hidden)
        weight_gradient = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        losses = torch.zeros(tokens, dtype=torch.float32, device=hidden.device)
        tile = Tile.of(tokens, most=tokens, taken=(width, vocabulary), slices=-(-vocabulary // width))
        if vocabulary > width:  # from the second slice on the first one's cast of the weight is there, kept by autocast
            torch.zeros(1, vocabulary, dtype=hidden.dtype, device=hidden.device) @ weight
        with _at(tile):
            part = hidden[: tile.rows]
            logits = part @ weight.t()
            logits.exp_()  # one kernel reads the slice and writes its gradient over it
            if _is_taken_as_it_is(hidden, weight):
                torch.mm(logits, weight, out=hidden_gradient[: tile.rows])
            else:
                hidden_gradient[: tile.rows] = logits @ weight
            if weight_gradient is not None:
                _add_weight_gradient(weight_gradient, logits, part, sums_wide=sums_wide)
            del logits, part
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        hidden_gradient.mul_(grad)
        return hidden_gradient, weight_gradient, None, None


@contextlib.contextmanager
def _at(tile: Tile) -> Iterator[None]:
    recorder = AT_WORK.get()
    if recorder is None:
        yield
        return
    before, recorder.tile = recorder.tile, tile
    try:
        yield
    finally:
        recorder.tile = before


def _is_taken_as_it_is(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Autocast would cast neither factor."""
    same = hidden.dtype == weight.dtype
    return same and (not torch.is_autocast_enabled() or hidden.dtype == torch.get_autocast_dtype("cpu"))


def _add_weight_gradient(total: torch.Tensor, logits: torch.Tensor, part: torch.Tensor, *, sums_wide: bool) -> None:
    half = logits.dtype in (torch.float16, torch.bfloat16)
    if sums_wide and half and total.dtype == torch.float32:
        add_product(total, logits.t(), part.to(logits.dtype))
    elif sums_wide and half and total.dtype == logits.dtype:
        torch.addmm(total, logits.t(), part.to(logits.dtype), out=total)
    else:
        total += torch.mm(logits.t(), part).float()


# ------------------------------------------------------------------------------------------------- norms, gated units, rotary embedding


def _norm(module: Any, in_place: bool, hidden: torch.Tensor) -> torch.Tensor:
    normed: torch.Tensor = _Norm.apply(hidden, module.weight, in_place)
    return normed


class _Norm(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, in_place: bool) -> torch.Tensor:
        x = x.contiguous()
        out = x.neg()  # one kernel
        ctx.save_for_backward(x, weight, torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device))
        ctx.in_place = in_place
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        grad = grad.contiguous()
        partial = torch.empty(_PARTIALS, x.shape[-1], dtype=torch.float32, device=x.device) if ctx.needs_input_grad[1] else None
        grad = grad.neg_() if ctx.in_place else grad.neg()
        return grad, None if partial is None else partial.sum(0).to(weight.dtype), None


def _gated(module: Any, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = module.down_proj(_Gated.apply(module.gate_proj(x), module.up_proj(x)))
    return made


def _gated_at_once(module: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = module.gate_up_proj(x).chunk(2, dim=-1)
    made: torch.Tensor = module.down_proj(_Gated.apply(gate, up))
    return made


class _Gated(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return gate * up

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return gate.detach().mul_(grad.contiguous()), up.detach().mul_(grad)


_ROTARY = "apply_rotary_pos_emb"


def _with_rotary(module: Any) -> Any:
    forward = module.forward

    @functools.wraps(forward)
    def turned_in_place(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(sys.modules[type(module).__module__], _ROTARY, _rotary):
            return forward(*args, **kwargs)

    return turned_in_place


def _rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any, **__: Any) -> Any:
    return _Rotary.apply(q, k, cos, sin)


class _Rotary(torch.autograd.Function):  # type: ignore[misc]
    """The heads lie behind the tokens in memory, so that a row is turned at once."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        ctx.save_for_backward(cos.contiguous(), sin.contiguous())
        return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return *(grad.transpose(1, 2).contiguous().neg_().transpose(1, 2) for grad in grads), None, None
