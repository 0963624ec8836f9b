"""What helps when memory is short: each remedy with the key or flag that takes it, and what it does to the training.

In the order of the report: what leaves the training as it is, what only rounds the optimizer's states, what needs other hardware, and last
what trains something else. The figures are the caller's (`nothing_fits`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hfopt.config.other_tools import LLAMA_FACTORY
from hfopt.facts.argument_effects import FOREACH_ADAM, FUSED_ADAM, TORCH_ADAM
from hfopt.facts.oom_advice import EXPANDABLE
from hfopt.job.subject import Subject
from hfopt.planner.choices import LIGER, why_no_liger
from hfopt.schema import Lora, Quantization, Sharding, TrainJob
from hfopt.units import format_bytes

Effect = Literal["same", "rounding", "hardware", "training"]
EFFECTS: tuple[Effect, ...] = ("same", "rounding", "hardware", "training")
SHORTEST_SHARE = 4  # of the asked length: a shorter text is another task
ON_HOST_BYTES = 16  # float32 weight, gradient and Adam's two states of one trained weight, as DeepSpeed's CPU Adam keeps them
LORA = Lora(r=16, alpha=32, target_modules="all-linear")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRemedy:
    """One change: `job` where the model or its data become others, `settings` where only the step does."""

    words: str
    how: str
    effect: Effect
    job: TrainJob | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # fields of StepSettings
    expandable: bool = False
    length_divided_by: int = 1

    def beside(self, other: MemoryRemedy) -> MemoryRemedy:
        """Both at once; the job is the one that changes it."""
        return MemoryRemedy(
            words=f"{self.words} and {other.words}",
            how=f"{self.how}; {other.how}",
            effect=max(self.effect, other.effect, key=EFFECTS.index),
            job=self.job or other.job,
            settings={**self.settings, **other.settings},
            length_divided_by=max(self.length_divided_by, other.length_divided_by),
        )


def remedies(subject: Subject, optim: str) -> tuple[MemoryRemedy, ...]:
    """Each alone; `optim` is the optimizer in force."""
    kernels, optimizers = _kernels(subject, optim), _optimizers(subject, optim)
    return (*kernels, *optimizers, *_offloads(subject), *_as_published(subject), *_adapters(subject), *_shorter(subject))


def together(single: tuple[MemoryRemedy, ...]) -> Iterator[MemoryRemedy]:
    """What to try where none is enough alone: a slim update with a sliced loss, and an adapter on packed weights with shorter text."""
    update = [one for one in single if "optim" in one.settings]
    loss = [one for one in single if "fused_loss" in one.settings]
    packed = [one for one in single if one.job is not None and one.job.model.quantization is not None and one.effect == "training"]
    shorter = [one for one in single if one.length_divided_by > 1]
    yield from (one.beside(other) for one in update for other in loss)
    yield from (one.beside(other) for one in packed for other in shorter)


def _kernels(subject: Subject, optim: str) -> Iterator[MemoryRemedy]:
    if optim == FOREACH_ADAM:
        yield MemoryRemedy(
            words="fused AdamW: the same update without its temporaries",
            how=f"{_spelled(subject, 'optim')}: {FUSED_ADAM}, or --allow optim",
            effect="same",
            settings={"optim": FUSED_ADAM},
        )
    if not subject.job.settings.liger and why_no_liger(subject) is None:
        yield MemoryRemedy(
            words="Liger's fused loss: the logits never exist whole (TRL's SFTTrainer slices them too)",
            how=_how_liger(subject),
            effect="same",
            settings={"fused_loss": True},
        )
    if subject.hardware.smallest is not None:
        yield MemoryRemedy(words="expandable segments: no fragments", how=EXPANDABLE, effect="same", expandable=True)


def _optimizers(subject: Subject, optim: str) -> Iterator[MemoryRemedy]:
    if optim not in TORCH_ADAM or subject.job.model.lora is not None:
        return
    named: tuple[tuple[str, str, Effect], ...] = (
        ("paged_adamw_32bit", "AdamW with its states paged to the host", "same"),
        ("adamw_bnb_8bit", "AdamW with 8-bit states", "rounding"),
        ("paged_adamw_8bit", "AdamW with 8-bit states paged to the host", "rounding"),
    )
    for name, words, effect in named:
        yield MemoryRemedy(words=words, how=f"{_spelled(subject, 'optim')}: {name}", effect=effect, settings={"optim": name})


def _offloads(subject: Subject) -> Iterator[MemoryRemedy]:
    """On one card; over several, the engines that offload are candidates themselves."""
    job = subject.job
    if job.world_size > 1 or job.model.lora is not None or job.model.quantization is not None or subject.hardware.smallest is None:
        return
    room = format_bytes(ON_HOST_BYTES * subject.workload.trainable_parameters)
    optimizer = "{stage: 2, offload_optimizer: {device: cpu}}"
    weights = "{stage: 3, offload_optimizer: {device: cpu}, offload_param: {device: cpu}}"
    yield MemoryRemedy(
        words=f"ZeRO-2 with gradients and optimizer states in {room} of the host's memory",
        how=f"deepspeed: {{zero_optimization: {optimizer}}}",
        effect="hardware",
        settings={"sharding": Sharding(engine="zero2", world_size=1, offload_optimizer=True)},
    )
    yield MemoryRemedy(
        words=f"ZeRO-3 with weights, gradients and optimizer states in {room} of the host's memory",
        how=f"deepspeed: {{zero_optimization: {weights}}}",
        effect="hardware",
        settings={"sharding": Sharding(engine="zero3", world_size=1, offload_optimizer=True, offload_parameters=True)},
    )


def _as_published(subject: Subject) -> Iterator[MemoryRemedy]:
    """TRL and LLaMA-Factory widen 16-bit checkpoints to float32 unless they are told not to."""
    job, workload = subject.job, subject.workload
    if job.model.name is None or workload.weights_dtype != "float32" or workload.checkpoint_dtype != "bfloat16":
        return
    yield MemoryRemedy(
        words="weights in bfloat16, as they are published: half as large, and updates are rounded to it",
        how="pure_bf16: true" if _spelled(subject, LIGER) != LIGER else "dtype: bfloat16",
        effect="training",
        job=replace(job, model=replace(job.model, weights_dtype="bfloat16")),
    )


def _adapters(subject: Subject) -> Iterator[MemoryRemedy]:
    job = subject.job
    if job.model.name is None:
        return
    adapted = job if job.model.lora is not None else replace(job, model=replace(job.model, lora=LORA, weights_dtype=_below_adapters(job)))
    if adapted is not job:
        yield MemoryRemedy(
            words="LoRA on all linear layers (r=16): trains adapters, not the model",
            how=_how_lora(subject, packed=False),
            effect="training",
            job=adapted,
        )
    if job.model.quantization is None:
        yield MemoryRemedy(
            words="QLoRA, adapters on 4-bit weights: trains adapters, not the model"
            if adapted is not job
            else "QLoRA: the adapters on 4-bit weights",
            how=_how_lora(subject, packed=True),
            effect="training",
            job=replace(adapted, model=replace(adapted.model, quantization=Quantization(bits=4, compute_dtype="bfloat16"))),
        )


def _below_adapters(job: TrainJob) -> str | None:
    """What the model is loaded in once it no longer trains: LLaMA-Factory makes float32 only of what trains (model/adapter.py)."""
    computed = {"bf16": "bfloat16", "fp16": "float16"}.get(job.settings.precision)
    return computed if computed is not None and job.tool == LLAMA_FACTORY.name else job.model.weights_dtype


def _shorter(subject: Subject) -> Iterator[MemoryRemedy]:
    length = subject.workload.shape.length
    divisor = 2
    while length is not None and divisor <= SHORTEST_SHARE and length // divisor >= 1:
        yield MemoryRemedy(
            words=f"sequences of at most {length // divisor} tokens instead of {length}: trains on shorter text",
            how=f"--seq-len {length // divisor}, and the same in the config",
            effect="training",
            length_divided_by=divisor,
        )
        divisor *= 2


def _spelled(subject: Subject, key: str) -> str:
    """As the file's own tool says it."""
    home = subject.loaded.homes.get(key) if subject.loaded is not None else None
    return key if home is None else home.key


def _how_liger(subject: Subject) -> str:
    if subject.job.tool == "axolotl":
        return "cut_cross_entropy: true with its plugin, or liger_fused_linear_cross_entropy: true with Liger's"
    return f"{_spelled(subject, LIGER)}: true, or --allow {LIGER}"


def _how_lora(subject: Subject, *, packed: bool) -> str:
    if subject.job.tool == "axolotl":
        return f"adapter: {'qlora, load_in_4bit: true' if packed else 'lora'}, lora_r: 16, lora_target_linear: true"
    if _spelled(subject, LIGER) != LIGER:  # LLaMA-Factory
        return "finetuning_type: lora, lora_target: all" + (", quantization_bit: 4" if packed else "")
    if subject.job.trainer not in ("Trainer", "Seq2SeqTrainer"):
        return "use_peft: true, lora_target_modules: all-linear" + (", load_in_4bit: true" if packed else "")
    base = "from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_4bit=True)), then " if packed else ""
    return f'{base}get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))'
