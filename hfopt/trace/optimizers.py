"""The optimizer the Trainer would make for `optim`, on fake parameters, with the states it keeps.

The states bitsandbytes' optimizers keep, by its rules (`facts/optimizer_states.py`), without bitsandbytes: bytes, not arithmetic. What
is paged is not counted. The update kernels work in place.

On CUDA torch.optim takes the foreach implementation unless told otherwise; fake parameters live on the CPU, so it is asked for by name.
bitsandbytes needs a card even to be imported fully, so its states are imitated (`bitsandbytes_states`). What is neither is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch

from hfopt.errors import TraceError
from hfopt.facts.optimizer_states import BLOCK_8BIT, SMALLEST_8BIT, SMALLEST_PAGED, bitsandbytes_states


class BitsAndBytes(torch.optim.Optimizer):  # type: ignore[misc]
    """Allocates at its first step what bitsandbytes would, and nothing afterwards. Its update is one kernel per parameter that goes through
    weight, gradient and states; here two kernels stand for it, which together move as many bytes."""

    def __init__(self, model: Any, groups: list[dict[str, Any]], optim: str) -> None:
        known = bitsandbytes_states(optim)
        assert known is not None, f"{optim} is not one of bitsandbytes'"
        self._states = known
        self._embeddings = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
        super().__init__(groups, {"lr": 5e-5})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    if not self.state[parameter]:
                        self._start(parameter)
                    parameter.add_(parameter.grad.view_as(parameter))
                    states = [value for name, value in self.state[parameter].items() if name.startswith("state")]
                    if states:
                        torch._foreach_add_(states, 0)

    def _start(self, parameter: torch.Tensor) -> None:
        eight = self._states.eight_bit and parameter.numel() >= SMALLEST_8BIT and parameter not in self._embeddings
        paged = self._states.paged and parameter.numel() >= SMALLEST_PAGED
        state = self.state[parameter]
        state["step"] = 0
        for number in range(self._states.count):
            if not paged:
                state[f"state{number}"] = torch.zeros_like(parameter, dtype=torch.uint8 if eight else torch.float32)
            if eight:
                state[f"absmax{number}"] = torch.zeros(-(-parameter.numel() // BLOCK_8BIT), dtype=torch.float32)


_FOREACH = {"adamw_torch": torch.optim.AdamW, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop, "sgd": torch.optim.SGD}
_LR = 5e-5


def parameter_groups(model: Any) -> list[dict[str, Any]]:
    """Trainer.create_optimizer: weights that decay, then norms and biases that do not."""
    from transformers.trainer_pt_utils import get_parameter_names

    patterns = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    try:
        decaying = set(get_parameter_names(model, [torch.nn.LayerNorm], patterns))
    except TypeError:  # transformers < 4.52 takes no patterns
        decaying = {name for name in get_parameter_names(model, [torch.nn.LayerNorm]) if "bias" not in name}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for name, parameter in trained if name in decaying]},
        {"params": [parameter for name, parameter in trained if name not in decaying], "weight_decay": 0.0},
    ]


def make_optimizer(model: Any, optim: str, optim_args: str | None = None, *, groups: list[dict[str, Any]] | None = None) -> Any:
    """The optimizer for the Trainer's `optim` (over `groups`, where a rank holds only parts of the weights); raises TraceError for one
    that cannot be traced, by name."""
    groups = parameter_groups(model) if groups is None else groups
    if not any(group["params"] for group in groups):
        raise TraceError("no parameter of the model is trained", hint="check `frozen` and the adapter's target modules")
    if optim == "adamw_torch_fused":
        return torch.optim.AdamW(groups, lr=_LR, fused=True)
    if optim == "adamw_hf":  # transformers' own, gone in 5.x: a loop over the parameters
        return torch.optim.AdamW(groups, lr=_LR, foreach=False)
    if optim in _FOREACH:
        return _FOREACH[optim](groups, lr=_LR, foreach=True, **_options(optim_args, optim))
    if optim == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(groups, lr=_LR, scale_parameter=False, relative_step=False)
    if bitsandbytes_states(optim) is not None:
        return BitsAndBytes(model, groups, optim)
    traced = ", ".join(sorted((*_FOREACH, "adamw_torch_fused", "adafactor")))
    raise TraceError(f"optim {optim!r} cannot be traced", hint=f"traced are {traced} and those of bitsandbytes (8-bit, paged, lion)")


def _options(optim_args: str | None, optim: str) -> dict[str, Any]:
    """Only what changes the state: momentum keeps a buffer, centered keeps another."""
    pairs = dict(item.split("=", 1) for item in (optim_args or "").replace(" ", "").split(",") if "=" in item)
    options: dict[str, Any] = {}
    if "momentum" in pairs and optim in ("sgd", "rmsprop"):
        options["momentum"] = float(pairs["momentum"])
    if optim == "rmsprop" and pairs.get("centered", "").lower() in ("true", "1", "yes"):
        options["centered"] = True
    return options
