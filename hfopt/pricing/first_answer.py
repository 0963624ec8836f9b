"""The first answer, by counting alone, before torch is imported: it cannot fit, it certainly fits, or it is open.

The least: the published parameters of a known model (`model/architectures.jsonl`), each with its weight, its gradient and the states of its
optimizer; what does not fit by this fits by no estimate. The most: `memory/counted_step.py`, for a model of equal blocks. Adapters, packed
or frozen weights and several devices are open, and so is a model that is not in the table.

What cannot fit is answered whole without torch, where the model is a decoder that counting understands: `counted_workload` stands in for
the model, and the remedies are priced by the same formulas (`nothing_fits`). What else is asked of it builds the model after all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from hfopt.compat.versions import is_at_least
from hfopt.facts.argument_effects import TORCH_ADAM
from hfopt.memory.counted_step import block_sizes, most_bytes
from hfopt.model.known_models import Architecture, find
from hfopt.pricing.target_device import budget_bytes
from hfopt.schema import BatchShape, ConfigFacts, Hardware, MemoryPeak, ModelSpec, TrainJob, Workload
from hfopt.units import format_bytes

_HALF = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16"}
_PARTS = ("vision_config", "audio_config", "experts")  # of a config whose parts may get no gradient
_ROUNDED = 0.98  # of a count that is published as '8B': at the least


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstAnswer:
    verdict: Literal["impossible", "fits", "open"]
    words: str


def first_answer(job: TrainJob, hardware: Hardware, headroom: float) -> FirstAnswer | None:
    """None where there is no card, whose memory would be asked for."""
    gpu = hardware.smallest
    if gpu is None:
        return None
    room, entry = budget_bytes(gpu.available_bytes, headroom), find(job.model.name or "")
    usable = f"{format_bytes(room)} usable"
    if entry is None or job.model.overrides or _is_divided(job):
        return FirstAnswer(verdict="open", words=f"Open: what a step takes of {usable} is traced now")
    held, what = _least(job, entry)
    least = f"at least {format_bytes(held)} ({what}), {usable}"
    if held > room:
        return FirstAnswer(verdict="impossible", words=f"Cannot fit as it is: {least}")
    most = _most(job, entry)
    if most is not None and most <= room:
        words = f"Certainly fits: at most {format_bytes(most)} by counting, {usable}; looking for faster settings"
        return FirstAnswer(verdict="fits", words=words)
    return FirstAnswer(verdict="open", words=f"Open: {least}; tracing the rest")


def kept_answer(memory: MemoryPeak, usable_bytes: int, *, fits: bool) -> str:
    """The same where the trace of the config as it is was kept."""
    verdict, sought = ("Fits as it is", "faster settings") if fits else ("Does not fit as it is", "what would")
    return f"{verdict}: {format_bytes(memory.device_bytes)} by a kept trace, {format_bytes(usable_bytes)} usable; looking for {sought}"


def _least(job: TrainJob, entry: Architecture) -> tuple[int, str]:
    """Of a model that trains in parts the weights alone: the rest is not counted here."""
    count = int(entry.parameters * (_ROUNDED if entry.rounded else 1.0))
    packing = job.model.quantization
    if packing is not None:
        return count * packing.bits // 8, f"{packing.bits}-bit weights"
    weights = count * (2 if _stored(job.model, entry) in _HALF else 4)
    if not _trains_whole(job, entry):
        return weights, "weights"
    return (4 * weights, "weights, gradients, AdamW's states") if job.settings.optim in TORCH_ADAM else (2 * weights, "weights, gradients")


def _most(job: TrainJob, entry: Architecture) -> int | None:
    sizes, length = block_sizes(entry), job.data.max_length
    plain = job.trainer == "Trainer" and job.settings.optim in TORCH_ADAM and not job.data.lengths and not job.settings.torch_compile
    if sizes is None or length is None or not plain or not _trains_whole(job, entry):
        return None
    return most_bytes(sizes, tokens=job.per_device_batch * length, length=length, states=2)


def counted_workload(job: TrainJob, remake: Callable[[], Workload]) -> Workload | None:
    """The facts of a decoder as planning reads them, the model itself only on demand; None where counting does not understand it."""
    entry = find(job.model.name or "")
    sizes = None if entry is None or not _trains_whole(job, entry) else block_sizes(entry)
    if entry is None or sizes is None or not sizes.gated or job.trainer != "Trainer" or job.data.max_length is None or job.data.lengths:
        return None
    (head,) = entry.config.get("architectures") or [""]
    stored = _HALF.get(_stored(job.model, entry))
    if not head.endswith("ForCausalLM") or job.model.task not in (None, "causal_lm") or stored is None or job.model.like is not None:
        return None
    length = job.data.max_length

    def with_layers(layers: int) -> Workload | None:
        own = remake().with_layers
        return None if own is None else own(layers)

    return Workload(
        name=entry.hub_id,
        model_class=head,
        task="causal_lm",
        build_model=lambda: remake().build_model(),
        make_batch=lambda size: remake().make_batch(size),
        shape=BatchShape(kind="text", length=length),
        parameters=entry.parameters,
        trainable_parameters=entry.parameters,
        layers=sizes.layers,
        tokens_per_sample=length,
        weights_dtype=stored,
        checkpoint_dtype=str(entry.config.get("torch_dtype") or entry.config.get("dtype") or "float32"),
        with_layers=with_layers,
        facts=_facts(entry.config),
        blocks=sizes,
        remake=remake,
    )


def _facts(config: Any) -> ConfigFacts:
    return ConfigFacts(
        model_type=config["model_type"],
        hidden_size=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        key_value_heads=config.get("num_key_value_heads"),
        head_size=config.get("head_dim"),
        width=config["hidden_size"],
        vocabulary=config["vocab_size"],
        tied_head=bool(config.get("tie_word_embeddings", False)),
    )


def _stored(model: ModelSpec, entry: Architecture) -> str:
    """What the weights are held in; where the installed transformers widens them unasked, that is more, and this a bound."""
    stated = model.weights_dtype
    if stated is None and not is_at_least("transformers", "5"):
        return "float32"
    found = entry.config.get("torch_dtype") or entry.config.get("dtype") or "float32" if stated in (None, "auto") else stated
    return str(found).removeprefix("torch.")


def _trains_whole(job: TrainJob, entry: Architecture) -> bool:
    """On one device, every weight of it."""
    model = job.model
    changed = (model.lora, model.quantization, model.frozen, model.frozen_parts, model.overrides, model.last_layers)
    return not any(changed) and not _is_divided(job) and not any(key.endswith(_PARTS) for key in entry.config)


def _is_divided(job: TrainJob) -> bool:
    return job.world_size > 1 or bool(job.raw.get("deepspeed")) or bool(job.raw.get("fsdp"))
