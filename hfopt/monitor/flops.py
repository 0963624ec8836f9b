"""What one training sample costs in FLOPs: by the weights for text, counted once by torch itself for everything else.

For text, 6 per weight that multiplies and token (2 forward, 2 for the gradient passed on, 2 for its own gradient where it trains).
Images, sound and models of one's own are not made of tokens: there the first forward, which is warm-up and in no window, runs under torch's
counter, and backward is taken to cost twice as much (once where nothing trains). Attention's own products are counted there, not for text.
"""

from __future__ import annotations

from typing import Any

import torch


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
