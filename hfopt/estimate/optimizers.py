"""The optimizer the Trainer would make for `optim`, on fake parameters, with the implementation CUDA defaults to.

On CUDA torch.optim takes the foreach implementation unless told otherwise; fake parameters live on the CPU, so it is asked for by name.
bitsandbytes is imitated by its state: bytes per parameter, block-wise scales, paged states in host memory.
"""

from __future__ import annotations

from typing import Any

import torch

from hfopt.errors import TraceError

_FOREACH = {"adamw_torch": torch.optim.AdamW, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop, "sgd": torch.optim.SGD}


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


def make_optimizer(model: Any, optim: str, optim_args: str | None = None) -> Any:
    """The optimizer for the Trainer's `optim`; raises TraceError for one that cannot be traced, by name."""
    groups = parameter_groups(model)
    options = _options(optim_args)
    if optim == "adamw_torch_fused":
        return torch.optim.AdamW(groups, lr=5e-5, fused=True)
    if optim in _FOREACH:
        return _FOREACH[optim](groups, lr=5e-5, foreach=True, **options)
    if optim == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(groups, lr=5e-5, scale_parameter=False, relative_step=False)
    raise TraceError(
        f"optim {optim!r} is not traced", hint=f"known here: {', '.join(sorted((*_FOREACH, 'adamw_torch_fused', 'adafactor')))}"
    )


def _options(optim_args: str | None) -> dict[str, Any]:
    pairs = (item.split("=", 1) for item in (optim_args or "").replace(" ", "").split(",") if "=" in item)
    return {key: float(value) for key, value in pairs if key in ("momentum", "dampening", "alpha", "lr_decay")}
