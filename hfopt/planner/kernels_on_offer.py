"""Other kernels for the same computation, tried only where the user allows it: attention implementations, and liger's fused loss.

What is offered is what can run on the card and be written into the config. flash_attention_2 is priced as PyTorch's own flash kernel on
unpadded samples; of liger's kernels only the fused loss is modelled. Both are estimates, and the reason says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hfopt.config.training_arguments import ATTENTION
from hfopt.planner.request import Subject
from hfopt.schema import Gpu

LIGER_TYPES = frozenset(
    ("gemma", "gemma2", "gemma3_text", "glm4", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3")
)
"""Text models whose loss liger-kernel 0.8.5 fuses (transformers/monkey_patch.py); where the package is installed, its own table is read."""
LIGER = "use_liger_kernel"


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The values to try, and what to tell about those that are not."""

    values: tuple[Any, ...]
    note: str | None = None


def attention_choices(subject: Subject, allowed: frozenset[str], gpu: Gpu | None) -> Offer:
    """As it is, and what is faster: sdpa instead of eager, flash_attention_2 where package and card have it."""
    if ATTENTION not in allowed or ATTENTION in subject.job.kept:
        return Offer(values=(None,))
    if subject.loaded is None or ATTENTION not in subject.loaded.homes:
        note = f"--allow {ATTENTION}: the config does not state it, so there is no value to change; it is an argument of from_pretrained"
        return Offer(values=(None,), note=note)
    now = subject.job.model.attn_implementation
    found: list[str | None] = [None]
    if now == "eager":
        found.append("sdpa")
    flash = "flash_attention_2"
    if now == flash or gpu is None or gpu.capability is None or gpu.capability < (8, 0):
        return Offer(values=tuple(found))
    if find_spec("flash_attn") is None:
        return Offer(values=tuple(found), note=f"{flash} was not tried: the package flash-attn is not installed here")
    return Offer(values=(*found, flash))


def liger_choices(subject: Subject, allowed: frozenset[str]) -> Offer:
    if LIGER not in allowed or LIGER in subject.job.kept:
        return Offer(values=(False,))
    why_not = _why_no_liger(subject)
    if why_not is not None:
        return Offer(values=(False,), note=f"{LIGER} was not tried: {why_not}")
    missing = f"{LIGER} needs the package liger-kernel, which is not installed here" if _liger_folder() is None else None
    if missing and not subject.hardware.hypothetical:
        return Offer(values=(False,), note=f"{missing}: pip install liger-kernel, and it can be planned with")
    return Offer(values=(False, True), note=missing)


def _why_no_liger(subject: Subject) -> str | None:
    workload, args = subject.workload, subject.job.args
    config = getattr(workload.build_model, "config", None)
    model_type = getattr(config, "model_type", None)
    if workload.task != "causal_lm" or workload.compute_loss is not None:
        return "its fused loss is for causal language models with their own loss"
    if model_type not in _liger_types():
        return f"liger-kernel does not know {model_type}"
    if args.get("label_smoothing_factor"):
        return "the Trainer's label smoothing needs the logits that it leaves out"
    return None


def _liger_folder() -> Path | None:
    spec = find_spec("liger_kernel")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _liger_types() -> frozenset[str]:
    """Of the installed package, read from its source (importing it needs triton and a card), else the known ones."""
    folder = _liger_folder()
    source = folder / "transformers" / "monkey_patch.py" if folder is not None else None
    if source is None or not source.exists():
        return LIGER_TYPES
    table = re.search(r"^MODEL_TYPE_TO_APPLY_LIGER_FN = \{(.*?)^\}", source.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return frozenset(re.findall(r'"(\w+)":', table[1])) & LIGER_TYPES if table else LIGER_TYPES
