"""What goes through the model: samples, tokens and padding, seen by a forward hook that keeps no tensor.

Shapes cost nothing to read. Padding needs a sum over the mask: on the CPU at once, on a card as one small kernel and a copy that is read
when it has arrived, never waited for; and only for the first batches, then once a second. Nothing is hooked under torch.compile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from hfopt.monitor.flops import ForwardCount, flops_per_token
from hfopt.monitor.harmless import Faults, harmless

_PART = "the look at the inputs"
_FIRST_LOOKS = 8
_BETWEEN_LOOKS_S = 1.0


class InputWatch:
    """`attach(model)`, then `take()` for what passed since the last one, then `detach()`."""

    def __init__(self, faults: Faults, after_forward: Callable[[], None] | None = None, *, counts_flops: bool = False) -> None:
        self.faults = faults
        self._after_forward = after_forward
        self._counts_flops = counts_flops
        self._counting: ForwardCount | None = None
        self.flops_per_sample: float | None = None  # of what is not text, once the first forward is over
        self._handles: list[Any] = []
        self._after_handle: Any = None
        self._main = "input_ids"
        self._pending: tuple[Any, Any, int] | None = None
        self._lengths: set[int] = set()
        self._looks, self._looked_s = 0, 0.0
        self.rows = self.tokens = 0
        self._masked = self._unmasked = 0

    def __reduce__(self) -> tuple[Callable[[], InputWatch], tuple[()]]:
        """A copied or pickled model takes its hooks along; there they do nothing."""
        return _inert, ()

    def attach(self, model: Any) -> None:
        self._main = getattr(model, "main_input_name", "input_ids")
        self._handles.append(model.register_forward_pre_hook(self._before, with_kwargs=True))
        if self._after_forward is not None or self._counts_flops:
            self._after_handle = model.register_forward_hook(self._after, always_call=True)
            self._handles.append(self._after_handle)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._pending = None

    def take(self) -> tuple[int, int | None, float | None, bool | None]:
        """(samples, tokens, padding share, all batches of one length) since the last call."""
        seen = self._masked + self._unmasked
        padding = self._masked / seen if seen else None
        fixed = len(self._lengths) == 1 if self._looks > 1 and seen else None
        taken = (self.rows, self.tokens or None, padding, fixed)
        self.rows = self.tokens = self._masked = self._unmasked = 0
        return taken

    @harmless(_PART)
    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        main = kwargs.get(self._main)
        if main is None:
            main = kwargs.get("inputs_embeds", args[0] if args else _first_input(kwargs))
        if not isinstance(main, torch.Tensor) or main.dim() == 0:
            return
        shape = main.shape
        self.rows += shape[0]
        text = not main.is_floating_point() if len(shape) == 2 else len(shape) == 3 and main is kwargs.get("inputs_embeds")
        if text:
            self.tokens += shape[0] * shape[1]
        if self._counts_flops:
            self._count_flops(module, shape[0], text=text)
        if self._pending is not None:
            self._collect()
        if self._looks < _FIRST_LOOKS or time.monotonic() - self._looked_s >= _BETWEEN_LOOKS_S:
            self._look(kwargs.get("attention_mask"))

    def _count_flops(self, module: Any, rows: int, *, text: bool) -> None:
        self._counts_flops = False
        if not (text and flops_per_token(module) is not None):
            self._counting = ForwardCount(module, rows)
            self._counting.begin()

    def _look(self, mask: Any) -> None:
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or self._pending is not None:
            return
        self._looks, self._looked_s = self._looks + 1, time.monotonic()
        if len(self._lengths) < 2:
            self._lengths.add(mask.shape[1])
        total = (mask != 0).sum()
        if mask.device.type != "cuda":
            self._add(int(total.item()), mask.numel())
            return
        host = total.to("cpu", non_blocking=True)  # into page-locked memory, which torch keeps and gives out again
        arrived = torch.cuda.Event()
        arrived.record()
        self._pending = (host, arrived, mask.numel())

    def _collect(self) -> None:
        assert self._pending is not None
        host, arrived, size = self._pending
        if arrived.query():
            self._pending = None
            self._add(int(host.item()), size)

    def _add(self, unmasked: int, size: int) -> None:
        if 0 <= unmasked <= size:
            self._unmasked += unmasked
            self._masked += size - unmasked

    @harmless(_PART)
    def _after(self, module: Any, args: Any, output: Any) -> None:
        counting, self._counting = self._counting, None
        if counting is not None:
            self.flops_per_sample = counting.end()
        if self._after_forward is None:
            if not self._counts_flops:
                self._after_handle.remove()  # there is nothing left to do after a forward
        elif module.training:
            self._after_forward()


def _first_input(kwargs: dict[str, Any]) -> Any:
    """Of a model of one's own, whose inputs have any name: the first tensor that is not the labels."""
    return next((value for name, value in kwargs.items() if isinstance(value, torch.Tensor) and "label" not in name), None)


def _inert() -> InputWatch:
    faults = Faults(lambda message: None)
    faults.off[_PART] = "a copy"
    return InputWatch(faults)
