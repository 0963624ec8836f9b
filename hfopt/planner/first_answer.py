"""The first answer, before anything is imported or traced: can what a step holds at the least be on the card at all?

By counting: the published parameters of a known model (`model/architectures.jsonl`), each with its weight, its gradient and the states of
its optimizer. Activations come on top, so what does not fit by this fits by no estimate. Silent where it says nothing: a model that is not
in the table, adapters, packed or frozen weights, several devices.
"""

from __future__ import annotations

from hfopt.facts.optimizer_states import TORCH_ADAM
from hfopt.model.known_models import find
from hfopt.planner.search import budget_bytes
from hfopt.schema import Hardware, ModelSpec, TrainJob
from hfopt.units import format_bytes

_HALF = ("bfloat16", "float16", "bf16", "fp16")
_PARTS = ("vision_config", "audio_config", "experts")  # of a config whose parts may get no gradient
_ROUNDED = 0.98  # of a count that is published as '8B': at the least


def first_answer(job: TrainJob, hardware: Hardware, headroom: float) -> str | None:
    """Why nothing can fit; None where counting alone does not settle it."""
    gpu, entry = hardware.smallest, find(job.model.name or "")
    if gpu is None or entry is None or not _trains_whole(job.model) or any(key.endswith(_PARTS) for key in entry.config):
        return None
    if job.world_size > 1 or job.raw.get("deepspeed") or job.raw.get("fsdp"):
        return None
    stated = job.model.weights_dtype
    stored = str(entry.config.get("torch_dtype") or entry.config.get("dtype") or "float32") if stated in (None, "auto") else str(stated)
    width = 2 if stored.removeprefix("torch.") in _HALF else 4
    copies = 4 if job.settings.optim in TORCH_ADAM else 2  # weight, gradient, and Adam's two states
    held = int(entry.parameters * (_ROUNDED if entry.rounded else 1.0)) * width * copies
    room = budget_bytes(gpu.available_bytes, headroom)
    if held <= room:
        return None
    what = "weights, gradients and AdamW's states" if copies == 4 else "weights and gradients"
    return (
        f"by counting alone: {what} of {entry.parameters / 1e9:.1f} billion parameters take {format_bytes(held)} at the least, and "
        f"{gpu.name} has {format_bytes(room)} to plan with: this cannot fit as it is; what would is looked for now"
    )


def _trains_whole(model: ModelSpec) -> bool:
    changed = (model.lora, model.quantization, model.frozen, model.frozen_parts, model.overrides, model.last_layers)
    return not any(changed) and model.name is not None
