"""What goes through the model: samples, tokens, padding, and what one sample costs in FLOPs.

What one training sample costs in FLOPs: by the weights for text, counted once by torch itself for everything else. For text, 6 per weight
that multiplies and token (2 forward, 2 for the gradient passed on, 2 for its own gradient where it trains). Images, sound and models of
one's own are not made of tokens: there the first forward, which is warm-up and in no window, runs under torch's counter, and backward is
taken to cost twice as much (once where nothing trains). Attention's own products are counted there, not for text.

Shapes cost nothing to read. Padding needs a sum over the mask: on the CPU at once, on a card as one small kernel and a copy that is read
when it has arrived, never waited for; and only for the first batches, then once a second. Nothing is hooked under torch.compile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from hfopt.monitor.fault_guard import Faults, switched_off_on_error


class ForwardCount:
    """`begin()` before a forward, `end()` after it, also after one that raised."""

    def __init__(self, model: Any, rows: int) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        self._factor, self._rows = _of_forward(model), rows
        self._mode = FlopCounterMode(display=False)

    def begin(self) -> None:
        self._mode.__enter__()

    def end(self) -> float | None:
        """FLOPs of one sample, forward and backward; None if nothing that counts was seen."""
        self._mode.__exit__(None, None, None)
        total = self._mode.get_total_flops()
        return self._factor * total / self._rows if total and self._rows else None


def _of_forward(model: Any) -> float:
    """A training step in forward passes: 3 where everything trains, 2 where nothing does."""
    sizes = [(_elements(parameter), parameter.requires_grad) for parameter in model.parameters()]
    total = sum(size for size, _ in sizes)
    return 2.0 + (sum(size for size, trains in sizes if trains) / total if total else 0.0)


def flops_per_token(model: Any) -> float | None:
    """Embedding tables are looked up, not multiplied, unless the output layer shares them."""
    if not hasattr(model, "get_input_embeddings"):
        return None
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    multiplied = {id(output.weight)} if output is not None and hasattr(output, "weight") else set()
    looked_up = {id(part.weight) for part in model.modules() if isinstance(part, torch.nn.Embedding)} - multiplied
    total = trained = 0
    for parameter in model.parameters():
        if id(parameter) in looked_up:
            continue
        size = _elements(parameter)
        total += size
        trained += size if parameter.requires_grad else 0
    return 4.0 * total + 2.0 * trained


def _elements(parameter: Any) -> int:
    """Also of weights stored as 4 bits (two to a byte) or gathered on use (ZeRO-3)."""
    if type(parameter).__name__ == "Params4bit":
        return int(parameter.numel() * 2 * parameter.element_size())
    return int(getattr(parameter, "ds_numel", parameter.numel()))


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

    @switched_off_on_error(_PART)
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

    @switched_off_on_error(_PART)
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
