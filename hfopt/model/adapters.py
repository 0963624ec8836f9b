"""Which parameters train: LoRA and DoRA adapters through peft, and frozen modules."""

from __future__ import annotations

import warnings

from torch import nn

from hfopt.errors import WorkloadError
from hfopt.schema import Lora, Task

_PEFT_TASKS: dict[Task, str] = {
    "causal_lm": "CAUSAL_LM",
    "seq2seq_lm": "SEQ_2_SEQ_LM",
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
    "question_answering": "QUESTION_ANS",
}
"""With these peft trains the new head too; other tasks need modules_to_save."""


def add_lora(model: nn.Module, lora: Lora, task: Task) -> nn.Module:
    """The model with adapters, everything else frozen. Half-precision adapters go to float32, as get_peft_model does."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise WorkloadError("the config asks for LoRA, but peft is not installed", hint="pip install 'hfopt[peft]'") from None
    if lora.r < 1:
        raise WorkloadError(f"LoRA's rank is {lora.r}; it must be at least 1", hint="set r (lora_r) to for example 8")
    targets = lora.target_modules
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(targets) if isinstance(targets, tuple) else targets,
        modules_to_save=list(lora.modules_to_save) or None,
        use_dora=lora.use_dora,
        use_rslora=lora.use_rslora,
        task_type=_PEFT_TASKS.get(task),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's remarks, such as on tied target layers
        try:
            adapted: nn.Module = get_peft_model(model, config)
        except (ValueError, KeyError, TypeError) as error:
            raise WorkloadError(
                f"LoRA cannot be put on {type(model).__name__}: {error}", hint="name its linear layers in target_modules, or use all-linear"
            ) from error
    return adapted


def freeze(model: nn.Module, prefixes: tuple[str, ...]) -> None:
    """Stops the modules with these names from training; the model's own prefix may be left out (`embeddings` for `bert.embeddings`)."""
    own = getattr(model, "base_model_prefix", "")
    for prefix in prefixes:
        starts = tuple(f"{start}{prefix.rstrip('.')}." for start in ("", f"{own}."))
        found = [parameter for name, parameter in model.named_parameters() if f"{name}.".startswith(starts)]
        if not found:
            able = ", ".join(dict.fromkeys(".".join(name.split(".")[:2]) for name, _ in model.named_parameters()))
            raise WorkloadError(f"there is no module {prefix!r} to freeze in {type(model).__name__}", hint=f"it has: {able}")
        for parameter in found:
            parameter.requires_grad = False
