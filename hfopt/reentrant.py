"""Reentrant checkpointing gives no gradient to a block whose input has none, as over the frozen embeddings of a model with adapters."""

from __future__ import annotations

from typing import Any


def let_gradients_through(model: Any) -> None:
    """What a run must do itself where its transformers (before 5) does not: the embeddings' output asks for a gradient."""
    embeddings = model.get_input_embeddings()
    if embeddings is not None and not any(parameter.requires_grad for parameter in embeddings.parameters()):
        model.enable_input_require_grads()
