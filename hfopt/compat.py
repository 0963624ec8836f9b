"""What of torch and transformers differs by version, or is reached by a private name: one place for it.

Without a model's own remarks: transformers' log lines and Python warnings that the user will see when it trains, or cannot act on.

Reentrant checkpointing gives no gradient to a block whose input has none, as over the frozen embeddings of a model with adapters.

Which PyTorch the run will use: the installed one. Its allocator and its workspaces have changed over the versions.

Do float32 matrix products run in TF32? torch has two settings for it, and refuses to read the old one once the new was used.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from typing import Any


@contextmanager
def quietly() -> Iterator[None]:
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


def let_gradients_through(model: Any) -> None:
    """What a run must do itself where its transformers (before 5) does not: the embeddings' output asks for a gradient."""
    embeddings = model.get_input_embeddings()
    if embeddings is not None and not any(parameter.requires_grad for parameter in embeddings.parameters()):
        model.enable_input_require_grads()


@cache
def installed_torch() -> tuple[int, int]:
    major, minor = version("torch").split(".")[:2]
    return int(major), int(minor)


def tf32_is_on() -> bool:
    import torch

    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # torch 2.9; it tells what either setting said
        return bool(matmul.fp32_precision == "tf32")
    return bool(matmul.allow_tf32)


def set_tf32(on: bool) -> None:
    """By the setting that this transformers uses."""
    import torch

    try:
        from transformers.utils.import_utils import enable_tf32
    except ImportError:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on
    else:
        enable_tf32(on)
