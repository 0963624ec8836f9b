"""Batches of time series: past and future values, or past values and a target, by the names that `forward` takes.

Sources: transformers' modeling_patchtst.py and modeling_patchtsmixer.py (context_length × num_input_channels);
modeling_time_series_transformer.py, modeling_informer.py and modeling_autoformer.py (the past is longer by the largest lag, and each
moment has features).
"""

from __future__ import annotations

from typing import Any

import torch


def lengths(config: Any) -> tuple[int, int]:
    """How many moments of the past a sample has, and how many of the future."""
    past = int(config.context_length) + max(getattr(config, "lags_sequence", None) or (0,))
    return past, int(getattr(config, "prediction_length", None) or 1)


def series(config: Any, model_class: str, accepts: frozenset[str], samples: int) -> dict[str, Any]:
    past, future = lengths(config)
    channels = getattr(config, "num_input_channels", None)
    width: tuple[int, ...] = () if channels is None and getattr(config, "input_size", 1) == 1 else (channels or config.input_size,)
    shapes = {
        "past_values": (samples, past, *width),
        "past_observed_mask": (samples, past, *width),
        "future_values": (samples, future, *width),
        "past_time_features": (samples, past, getattr(config, "num_time_features", 0)),
        "future_time_features": (samples, future, getattr(config, "num_time_features", 0)),
    }
    batch: dict[str, Any] = {name: torch.ones(shape) for name, shape in shapes.items() if name in accepts and 0 not in shape}
    if "num_input_channels" in dir(config):
        batch.pop("past_observed_mask", None)  # made by the model, where all is observed
    kinds, reals = (int(getattr(config, f"num_static_{name}_features", None) or 0) for name in ("categorical", "real"))
    if kinds and "static_categorical_features" in accepts:
        batch["static_categorical_features"] = torch.zeros((samples, kinds), dtype=torch.long)
    if reals and "static_real_features" in accepts:
        batch["static_real_features"] = torch.ones((samples, reals))
    if "target_values" in accepts:
        batch["target_values"] = _target(config, model_class, samples)
    return batch


def _target(config: Any, model_class: str, samples: int) -> torch.Tensor:
    if "Classification" in model_class:
        return torch.zeros(samples, dtype=torch.long)
    return torch.ones(samples, int(getattr(config, "num_targets", 1)))
