"""A workload from what the config says: the model by its configuration alone, with head, adapters, dtype and frozen parts, and its batches.

Weights are never loaded: memory and time depend on shapes and types, not on values.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import transformers

from hfopt.compat.transformers_patches import quietly
from hfopt.errors import WorkloadError
from hfopt.model.batch import BatchMaker, accepted_inputs
from hfopt.model.builder import FAILURES, Recipe, assumed_build, checkpoint_dtype, dtype_name, skeleton, uses_flash, weights_dtype
from hfopt.model.custom_code import from_reference, remote_config, remote_head
from hfopt.model.losses import (
    NOTES,
    PAIRED,
    WITH_REFERENCE,
    Pairs,
    known_dependence,
    loss_for,
    preference_loss,
    valued_reward,
    why_batch_dependent,
)
from hfopt.model.sample_shape import Reading, size_batch
from hfopt.model.sources import ConfigSource, Head, choose_head, is_reference, labelled, source_of, stated_model
from hfopt.model.trl_trainer import carried_trainer, trl_classes, trl_loss
from hfopt.model.trl_workload import PICTURED, Pictured, cut_images, in_one_row, trl_batches, trl_notes, trl_setup
from hfopt.schema import GENERATING, Assumption, ConfigFacts, DataSpec, LengthSpread, ModelSpec, Task, TrainJob, Workload

_NO_TRL = "no TRL with this trainer is installed here: its loss is traced by a rule with whole logits, which may take more memory"
_NO_PICTURES = "TRL's {}Trainer on images is traced by a rule with whole logits, which may take more memory"


def from_job(job: TrainJob, *, layers: int | None = None) -> Workload:
    """The workload of a config; `layers`: with another number of blocks, where they are all alike."""
    return from_spec(job.model, job.data, trainer=job.trainer, trl_arguments=job.raw if job.uses_trl else None, layers=layers)


def from_spec(
    model: ModelSpec,
    data: DataSpec,
    *,
    trainer: str = "Trainer",
    trl_arguments: Mapping[str, Any] | None = None,
    layers: int | None = None,
) -> Workload:
    """The workload of a model given by folder, config.json, hub id, a name of the bundled table, or `file.py:factory`.

    With TRL's arguments the step is that of TRL's own trainer, where it is installed; else a preference loss is one of our own rules.
    """
    if model.name is not None and is_reference(model.name):
        return from_reference(replace(model, name=stated_model(model)))
    source = source_of(model)
    config, own_code = _config(source, model)
    model = _with_targets(model, config)
    config = config if layers is None else _config_of_depth(config, layers) or config
    head = remote_head(source, model.task) if own_code else _head(config, model, trainer)
    _set_labels(config, head.task, 1 if trainer == "Reward" else model.num_labels)
    reference = trainer in WITH_REFERENCE if model.reference is None else model.reference
    recipe = Recipe(spec=model, source=source, config=config, head=head, reference=reference)
    if trl_arguments is not None:
        setup = trl_setup(trainer, trl_arguments, data, task=head.task, config=config)
        if setup is not None:
            return _trl_workload(replace(recipe, trl=setup), data)
    return _workload(recipe, data, trainer, arguments=trl_arguments, trl=trl_arguments is not None)


_NO_TARGETS = "peft has no usual target_modules for"


def _with_targets(model: ModelSpec, config: Any) -> ModelSpec:
    """peft refuses an adapter without targets where it has no usual ones for the architecture, so the script must name them."""
    if model.lora is None or model.lora.target_modules is not None or find_spec("peft") is None:
        return model
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    if config.model_type in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING:
        return model
    note = f"{_NO_TARGETS} {config.model_type} and the file names none: adapters are planned on all linear layers"
    return replace(model, lora=replace(model.lora, target_modules="all-linear"), notes=(*model.notes, note))


def _targets(recipe: Recipe) -> tuple[Assumption, ...]:
    guessed = any(note.startswith(_NO_TARGETS) for note in recipe.spec.notes)
    return (Assumption(what="adapted", value="all linear layers", guessed=True, settle="target_modules"),) if guessed else ()


def _head(config: Any, model: ModelSpec, trainer: str) -> Head:
    head = choose_head(config.model_type, config.to_dict(), model.task, trainer)
    if model.task is None and model.num_labels is not None and trainer == "Trainer":
        return labelled(config.model_type, head, model.num_labels)
    return head


SMALLEST_DEPTH = 2


def _trl_workload(recipe: Recipe, data: DataSpec) -> Workload:
    """The step of TRL's own trainer."""
    setup = recipe.trl
    assert setup is not None
    pictured, flash = recipe.head.task == PICTURED, uses_flash(recipe.spec)
    sized = _workload(
        replace(recipe, trl=None), data if pictured else replace(data, max_length=setup.size.length), setup.kind, arguments=setup.arguments
    )
    make_batch: Callable[[int], dict[str, Any]] = Pictured(make_batch=sized.make_batch)
    if not pictured:
        small = _config_of_depth(recipe.config, SMALLEST_DEPTH) or recipe.config  # batches are the trainer's, whatever the model's depth
        make_batch = trl_batches(setup, carried_trainer(skeleton(replace(recipe, config=small).assemble)), flash=flash)
    padded = setup.size.shorter is not None and not flash
    notes = tuple(note for note in sized.notes if note not in NOTES.values())
    guessed = data.max_length is None and not setup.arguments.get("max_length")
    return replace(
        sized,
        build_model=recipe,
        make_batch=make_batch,
        shape=replace(sized.shape, padded=padded),
        compute_loss=trl_loss,
        assumed=tuple(replace(one, guessed=guessed) if one.what == "length" else one for one in sized.assumed),
        lengths=None if in_one_row(setup.arguments) else sized.lengths,
        notes=(*notes, *trl_notes(setup), *(cut_images(setup, data, sized.shape.length) if pictured else ()), *_wider_than_stored(recipe)),
        with_layers=partial(_trl_at_depth, recipe, data),
    )


def _wider_than_stored(recipe: Recipe) -> tuple[str, ...]:
    stored = checkpoint_dtype(recipe.config) or "float32"
    if weights_dtype(recipe.spec, recipe.config) != torch.float32 or stored == "float32":
        return ()
    if recipe.spec.loads_itself:
        return (f"the weights are taken to be float32, which TRL loads unless it is told; a script that loads them in {stored} takes half",)
    return (f"the weights are float32 though the checkpoint is {stored}: dtype: {stored} halves them",)


def _trl_at_depth(recipe: Recipe, data: DataSpec, layers: int) -> Workload | None:
    config = _config_of_depth(recipe.config, layers)
    return None if config is None else _trl_workload(replace(recipe, config=config), data)


def _workload(recipe: Recipe, data: DataSpec, trainer: str, *, arguments: Mapping[str, Any] | None = None, trl: bool = False) -> Workload:
    model, source, config, head = recipe.spec, recipe.source, recipe.config, recipe.head
    facts = recipe.facts()
    if not facts.trainable_parameters:
        raise WorkloadError(f"nothing of {source.name} trains: {_why_nothing(model)}", hint="add an adapter (LoRA), or freeze less")
    if data.lengths:
        data = replace(data, max_length=min(data.max_length or max(data.lengths), max(data.lengths)))
    accepts = accepted_inputs(facts.model_class)
    sized = size_batch(config, facts.main_input, head.task, data, trainer, Reading(folder=source.folder, accepts=accepts))
    notes = [note for note in (source.note, head.note, *model.notes) if note]
    if uses_flash(model):
        sized = replace(sized, shape=replace(sized.shape, padded=False))
        notes.append(f"{model.attn_implementation} is estimated as PyTorch's own flash attention")
    notes += [NOTES[trainer]] if trainer in NOTES else []
    if trl:
        notes.append(_NO_PICTURES.format(trainer) if head.task == PICTURED and trl_classes(trainer) is not None else _NO_TRL)
    notes += slow_state_space(facts.model_class)
    make_batch: Callable[[int], dict[str, Any]] = BatchMaker(
        task=head.task,
        shape=sized.shape,
        config=config,
        main_input=facts.main_input,
        accepts=accepts,
        sample=sized.sample,
        model_class=facts.model_class.__name__,
    )
    if trainer in PAIRED:
        make_batch = Pairs(single=make_batch, keep_labels=trainer != "Reward")
    return Workload(
        name=source.name,
        model_class=facts.model_class.__name__,
        task=head.task,
        build_model=recipe,
        make_batch=make_batch,
        shape=sized.shape,
        compute_loss=_loss(recipe, trainer),
        parameters=facts.parameters,
        trainable_parameters=facts.trainable_parameters,
        layers=facts.layers,
        tokens_per_sample=2 * sized.tokens if sized.tokens and trainer in PAIRED else sized.tokens,
        checkpointable=facts.checkpointable,
        batch_dependent_loss=known_dependence(trainer, arguments or {}) or why_batch_dependent(facts.model, head.task, accepts),
        config=config,
        facts=ConfigFacts.of(config),
        weights_dtype=dtype_name(weights_dtype(model, config)),
        checkpoint_dtype=checkpoint_dtype(config),
        lengths=_spread(data, sized.shape.length),
        assumed=(
            *_architecture(source, model.overrides),
            head.assumption,
            *_labels(recipe, trainer),
            *sized.assumed,
            *_text_alone(recipe),
            *_targets(recipe),
            *assumed_build(recipe, facts.model),
            *_reference(recipe, trainer),
        ),
        notes=tuple(notes),
        with_layers=partial(_at_depth, recipe, data, trainer),
    )


def _text_alone(recipe: Recipe) -> tuple[Assumption, ...]:
    """Of a model that could take images."""
    sees = recipe.head.task == "causal_lm" and getattr(recipe.config, "vision_config", None) is not None
    return (Assumption(what="images", value="none: text alone", guessed=True, settle="images_per_sample"),) if sees else ()


def _loss(recipe: Recipe, trainer: str) -> Callable[[Any, dict[str, Any]], Any] | None:
    if trainer == "Reward" and recipe.head.task == "causal_lm":
        return valued_reward
    return preference_loss(trainer, asks_reference=recipe.reference) or loss_for(recipe.head.task)


def _architecture(source: ConfigSource, overrides: Mapping[str, Any]) -> tuple[Assumption, ...]:
    if overrides:
        sizes = ", ".join(f"{key} {value}" for key, value in overrides.items() if key != "model_type")
        return (Assumption(what="architecture", value=f"{source.name} with {sizes}"),)
    if source.taken_for is None:
        return ()
    whole = "" if source.packing is None else f", in 16 bits, as {source.packing} is not modelled"
    return (Assumption(what="architecture", value=f"that of {source.taken_for}, by its name{whole}", guessed=True, settle="--like"),)


def _reference(recipe: Recipe, trainer: str) -> tuple[Assumption, ...]:
    """Of trainers that may hold the policy against one: it can be as large as the model."""
    if trainer not in WITH_REFERENCE and trainer not in GENERATING:
        return ()
    copied = f"a frozen copy in {dtype_name(weights_dtype(recipe.spec, recipe.config))}"
    held = copied if recipe.spec.lora is None else "the model without its adapter"
    return (Assumption(what="reference model", value=held if recipe.reference else "none"),)


_LABELLED = ("sequence_classification", "token_classification", "image_classification", "audio_classification", "semantic_segmentation")


def _labels(recipe: Recipe, trainer: str) -> tuple[Assumption, ...]:
    """A checkpoint that was never fine-tuned has transformers' default of two."""
    if recipe.head.task not in _LABELLED:
        return ()
    stated = trainer == "Reward" or recipe.spec.num_labels is not None
    count = getattr(recipe.config, "num_labels", None)
    return (Assumption(what="labels", value=None if count is None else str(count), guessed=not stated, settle="num_labels"),)


_STATE_SPACE_KERNELS = {"causal_conv1d": "causal_conv1d_fn", "mamba_ssm": "mamba"}
"""Package → what a modeling file of transformers names where it would use it."""


def slow_state_space(model_class: type) -> list[str]:
    """A note where transformers falls back to its own torch code for state-space layers: that is what is traced."""
    names = " ".join(vars(sys.modules[model_class.__module__])).lower()
    if "causal_conv1d_fn" not in names and "is_fast_path_available" not in names:
        return []
    missing = [package for package, sign in _STATE_SPACE_KERNELS.items() if sign in names and find_spec(package) is None]
    if not missing:
        return []
    return [
        f"{' and '.join(missing)} not installed: transformers' own torch code is traced for the state-space layers; "
        "with the fast kernels a step takes less memory and time"
    ]


def _spread(data: DataSpec, longest: int | None) -> LengthSpread | None:
    """Samples beyond the longest are cut; packed ones are all alike."""
    if not data.lengths or longest is None or data.packing:
        return None
    return LengthSpread(longest=longest, lengths=tuple(sorted(min(length, longest) for length in data.lengths)))


def _at_depth(recipe: Recipe, data: DataSpec, trainer: str, layers: int) -> Workload | None:
    """The same architecture with another number of blocks; None where blocks differ, so that some would be missing."""
    config = _config_of_depth(recipe.config, layers)
    return None if config is None else _workload(replace(recipe, config=config), data, trainer)


def _config_of_depth(config: Any, layers: int) -> Any:
    config = copy.deepcopy(config)
    kinds = getattr(config, "layer_types", None)
    if not isinstance(getattr(config, "num_hidden_layers", None), int) or (kinds and len(set(kinds)) > 1):
        return None
    try:
        if kinds:
            config.layer_types = kinds[:1] * layers
        config.num_hidden_layers = layers
    except AttributeError:  # it follows from other fields (RecurrentGemma)
        return None
    return config


def _why_nothing(spec: ModelSpec) -> str:
    return "its weights are packed and there is no adapter" if spec.quantization is not None else "everything is frozen"


def _config(source: ConfigSource, spec: ModelSpec) -> tuple[Any, bool]:
    """transformers' config object with the YAML's overrides, and whether it comes with code of its own."""
    fields = copy.deepcopy({**source.fields, **spec.overrides})  # transformers writes into what is nested in it (rope_scaling)
    model_type = fields.get("model_type")
    if "auto_map" in fields and not (isinstance(model_type, str) and model_type in transformers.CONFIG_MAPPING):
        return remote_config(source, trusted=spec.trust_remote_code), True
    if not isinstance(model_type, str):
        raise WorkloadError(f"the config of {source.name} ({source.where}) has no model_type", hint='add for example "model_type": "bert"')
    if model_type not in transformers.CONFIG_MAPPING:
        raise WorkloadError(
            f"model type {model_type!r} of {source.name} is not known to transformers {transformers.__version__}",
            hint="install a newer transformers, or check the spelling of model_type in its config.json",
        )
    try:
        with quietly():
            return transformers.CONFIG_MAPPING[model_type].from_dict(fields), False
    except FAILURES as error:
        why = " ".join(str(error).split())
        raise WorkloadError(f"the config of {source.name} ({source.where}) is not a valid {model_type} config: {why}") from error


def _set_labels(config: Any, task: Task, num_labels: int | None) -> None:
    if num_labels is not None:
        if num_labels < 1:
            raise WorkloadError(f"num_labels is {num_labels}; it must be at least 1")
        config.num_labels = num_labels
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if task == "sequence_classification" and getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = 0  # decoders find the last token by it
        config.pad_token_id = 0
