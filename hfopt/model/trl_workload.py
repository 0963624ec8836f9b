"""What a config of a TRL trainer says about its step: arguments, lengths of samples, and the batches that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from hfopt.model.batch import Unpadded
from hfopt.model.sample_shape import SFT_LENGTH, position_limit
from hfopt.model.samples import Collated, Generated, Samples, collator_of
from hfopt.model.trl_samples import SampleSize
from hfopt.model.trl_trainer import TrlClasses, TrlSetup, trl_classes
from hfopt.schema import GENERATING, DataSpec

PROMPT = 512  # tokens, where a config of GRPO or RLOO does not say
COMPLETION = 256  # TRL's default of max_completion_length
_TASKS = frozenset({"causal_lm", "sequence_classification"})
PICTURED = "image_text"  # the task of a model that takes images and text


def trl_setup(kind: str, arguments: Mapping[str, Any], data: DataSpec, *, task: str, config: Any) -> TrlSetup | None:
    """None where TRL's trainer cannot be made here: the loss is then traced by a rule of our own."""
    classes = trl_classes(kind) if task in _TASKS or (task == PICTURED and kind == "SFT") else None
    if classes is None:
        return None
    size = _generated_size(arguments, data, classes) if kind in GENERATING else _size(arguments, data, classes, config)
    return TrlSetup(kind=kind, classes=classes, arguments=arguments, size=size)


def _size(arguments: Mapping[str, Any], data: DataSpec, classes: TrlClasses, config: Any) -> SampleSize:
    limit = position_limit(config)
    stated = data.max_length or arguments.get("max_length")
    length = int(stated or classes.default("max_length") or SFT_LENGTH)
    if stated is None and limit is not None:
        length = min(length, limit)
    alike = data.packing or in_one_row(arguments) or length < 3
    return SampleSize(
        length=length, shorter=None if alike else length - 1
    )  # a padded batch, as full as one can be: the head sees no padding


def in_one_row(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("packing") is True or arguments.get("padding_free") is True


def completion_length(arguments: Mapping[str, Any], classes: TrlClasses) -> int:
    return int(arguments.get("max_completion_length") or classes.default("max_completion_length") or COMPLETION)


def _generated_size(arguments: Mapping[str, Any], data: DataSpec, classes: TrlClasses) -> SampleSize:
    completion = completion_length(arguments, classes)
    if data.max_length is not None:
        completion = min(completion, max(1, data.max_length - 1))
    stated = arguments.get("max_prompt_length") or classes.default("max_prompt_length")
    prompt = max(1, data.max_length - completion) if data.max_length is not None else int(stated or PROMPT)
    return SampleSize(length=prompt + completion, prompt=prompt)


def trl_batches(setup: TrlSetup, trainer: Any, *, flash: bool) -> Callable[[int], dict[str, Any]]:
    """Batches as the trainer makes them; `flash`: as a flash-attention package sees them."""
    if setup.kind in GENERATING:
        completion = setup.size.length - setup.size.prompt
        return Generated(prompt=setup.size.prompt, completion=completion, with_reference=bool(getattr(trainer, "beta", 0.0)))
    data = trainer.train_dataset
    shorter = None if setup.size.shorter is None or flash else data[1]
    samples = Samples(longest=data[0], shorter=shorter, seen=len(data), of=len(data))
    made = Collated(collate=collator_of(trainer), samples=samples)
    return Unpadded(collated=made) if flash else made


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictured:
    """Images and text as TRL's collator labels them: every token that is not padding, placeholders of images among them."""

    make_batch: Callable[[int], dict[str, Any]]

    def __call__(self, samples: int) -> dict[str, Any]:
        batch = self.make_batch(samples)
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        labels = ids.clone() if mask is None else ids.masked_fill(mask == 0, -100)
        return {**batch, "labels": labels}


def cut_images(setup: TrlSetup, data: DataSpec, length: int | None) -> tuple[str, ...]:
    """A sample of images and text that the length in force would cut: TRL stops there, for placeholders would be missing."""
    stated = data.max_length or setup.arguments.get("max_length")
    limit = setup.classes.default("max_length") if stated is None else None
    if limit is None or length is None or length <= limit or "max_length" in setup.arguments:
        return ()
    return (
        f"max_length is not stated, and TRL's default of {limit} would cut a sample of {length} tokens with its images, which stops the "
        "run: set max_length: null",
    )


def trl_notes(setup: TrlSetup) -> tuple[str, ...]:
    """What was assumed. Arguments that the figures do not show are named by `facts/argument_effects`."""
    name, size = setup.classes.trainer.__name__, setup.size
    notes = [f"the loss is traced as TRL {metadata.version('trl')}'s {name} computes it"]
    if setup.kind in GENERATING:
        completion = size.length - size.prompt
        notes.append(f"{setup.kind}: a step is the update on completions of {completion} tokens after prompts of {size.prompt}")
    if setup.kind not in GENERATING and setup.kind not in ("SFT", "Reward"):
        notes.append("prompts are taken to be short: every token of a sequence counts in the loss")
    return tuple(notes)
