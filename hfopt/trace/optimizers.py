"""The optimizer the Trainer would make for `optim`, on fake parameters, with the implementation CUDA defaults to.

On CUDA torch.optim takes the foreach implementation unless told otherwise; fake parameters live on the CPU, so it is asked for by name.
bitsandbytes needs a card even to be imported fully, so its states are imitated (`bitsandbytes_states`). What is neither is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch

from hfopt.errors import TraceError
from hfopt.trace.bitsandbytes_states import BitsAndBytes, is_bitsandbytes

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
    if optim in _FOREACH:
        return _FOREACH[optim](groups, lr=_LR, foreach=True, **_options(optim_args, optim))
    if optim == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(groups, lr=_LR, scale_parameter=False, relative_step=False)
    if is_bitsandbytes(optim):
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
