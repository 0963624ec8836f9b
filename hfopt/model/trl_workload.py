"""What a config of a TRL trainer says about its step: arguments, lengths of samples, and the batches that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from hfopt.model.batch import Unpadded
from hfopt.model.collated import Collated, collator_of
from hfopt.model.sample_shape import SFT_LENGTH, position_limit
from hfopt.model.samples import Generated, Samples
from hfopt.model.trl_samples import SampleSize
from hfopt.model.trl_trainer import TrlClasses, TrlSetup, trl_classes
from hfopt.schema import GENERATING, DataSpec

PROMPT = 512  # tokens, where a config of GRPO or RLOO does not say
COMPLETION = 256  # TRL's default of max_completion_length
_TASKS = frozenset({"causal_lm", "sequence_classification"})
_PART_OF_THE_TOKENS = ("assistant_only_loss", "completion_only_loss")


def trl_setup(kind: str, arguments: Mapping[str, Any], data: DataSpec, *, task: str, config: Any) -> TrlSetup | None:
    """None where TRL's trainer cannot be made here: the loss is then traced by a rule of our own."""
    classes = trl_classes(kind) if task in _TASKS else None
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


def trl_notes(setup: TrlSetup) -> tuple[str, ...]:
    """What was assumed, and what of the trainer's work is not in the figures."""
    name, size, arguments = setup.classes.trainer.__name__, setup.size, setup.arguments
    notes = [f"the loss is traced as TRL {metadata.version('trl')}'s {name} computes it"]
    if setup.kind in GENERATING:
        completion = size.length - size.prompt
        notes.append(f"{setup.kind}: a step is the update on completions of {completion} tokens after prompts of {size.prompt}")
    if setup.kind not in GENERATING and setup.kind not in ("SFT", "Reward"):
        notes.append("prompts are taken to be short: every token of a sequence counts in the loss")
    for key in _PART_OF_THE_TOKENS:
        if arguments.get(key) is True:
            notes.append(f"{key}: how many tokens train depends on the data; all are taken to, which is the most memory")
    if arguments.get("activation_offloading") is True:
        notes.append("activation_offloading is not in the figures: what it moves to the host's memory comes off them")
    return tuple(notes)
