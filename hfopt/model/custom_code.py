"""Models with code of their own: a factory in a file or package, or a config that brings its code along.

A model that no config.json describes: `path/to/file.py:factory` or `package.module:factory`, imported only when trusted. The factory takes
no arguments and returns an nn.Module. Beside it in the same module stand `make_batch(samples)`, which returns the dict of tensors one batch
is, and, unless `model(**batch)` returns a loss itself, `compute_loss(model, batch)`.

Models whose config brings its own code (`auto_map`): imported only when trusted, as transformers' trust_remote_code does.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from hfopt.errors import WorkloadError
from hfopt.model.builder import add_lora, build_here, freeze, skeleton
from hfopt.model.losses import why_batch_dependent
from hfopt.model.sources import ConfigSource, Head
from hfopt.schema import Assumption, BatchShape, ModelSpec, Task, Workload


def from_reference(spec: ModelSpec) -> Workload:
    """The workload of a model made by the user's own code."""
    assert spec.name is not None
    place, _, name = spec.name.rpartition(":")
    module = _import(place)
    factory = _callable(module, name, spec.name)
    make_batch = _callable(module, "make_batch", spec.name)
    recipe = _CustomRecipe(spec=spec, factory=factory)
    model = skeleton(recipe.assemble)
    return Workload(
        name=spec.name,
        model_class=type(model).__name__,
        task="custom",
        build_model=recipe,
        make_batch=_Checked(make=make_batch, name=spec.name),
        shape=BatchShape(kind="custom"),
        compute_loss=getattr(module, "compute_loss", None),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trainable_parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        checkpointable=bool(getattr(model, "supports_gradient_checkpointing", False)),
        batch_dependent_loss=why_batch_dependent(model, "custom", frozenset()),
        assumed=(Assumption(what="head", value=type(model).__name__),),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _CustomRecipe:
    spec: ModelSpec
    factory: Callable[[], Any]

    def __call__(self) -> nn.Module:
        return build_here(self.assemble)

    def assemble(self) -> nn.Module:
        model = self.factory()
        if not isinstance(model, nn.Module):
            raise WorkloadError(f"{self.spec.name} returned a {type(model).__name__}, not an nn.Module")
        freeze(model, self.spec.frozen)
        return add_lora(model, self.spec.lora, "custom") if self.spec.lora is not None else model


@dataclass(frozen=True, kw_only=True, slots=True)
class _Checked:
    """The user's make_batch with our rules: at least one sample, a dict."""

    make: Callable[[int], Any]
    name: str

    def __call__(self, samples: int) -> dict[str, Any]:
        if samples < 1:
            raise WorkloadError(f"a batch of {samples} samples cannot be made", hint="the smallest batch size is 1")
        batch = self.make(samples)
        if not isinstance(batch, dict):
            raise WorkloadError(f"make_batch beside {self.name} returned a {type(batch).__name__}, not a dict of tensors")
        return batch


def _import(reference: str) -> ModuleType:
    try:
        if not reference.endswith(".py"):
            return importlib.import_module(reference)
        path = Path(reference).expanduser().resolve()
        spec = importlib.util.spec_from_file_location(f"hfopt_user_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    except (ImportError, OSError, SyntaxError, NameError, AttributeError) as error:
        raise WorkloadError(f"{reference} cannot be imported: {error}") from error


def _callable(module: ModuleType, name: str, reference: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    able = ", ".join(key for key, value in vars(module).items() if inspect.isfunction(value) or inspect.isclass(value))
    raise WorkloadError(f"{reference}: the module has no {name}()", hint=f"it has: {able or 'nothing callable'}")


_AUTO_CLASSES: dict[str, Task] = {
    "AutoModelForCausalLM": "causal_lm",
    "AutoModelForMaskedLM": "masked_lm",
    "AutoModelForSeq2SeqLM": "seq2seq_lm",
    "AutoModelForSequenceClassification": "sequence_classification",
    "AutoModelForTokenClassification": "token_classification",
    "AutoModelForQuestionAnswering": "question_answering",
    "AutoModelForImageClassification": "image_classification",
    "AutoModelForSemanticSegmentation": "semantic_segmentation",
    "AutoModelForCTC": "ctc",
    "AutoModelForSpeechSeq2Seq": "speech_seq2seq",
    "AutoModelForAudioClassification": "audio_classification",
    "AutoModelForImageTextToText": "image_text",
}


def remote_config(source: ConfigSource, *, trusted: bool) -> Any:
    if not trusted:
        raise WorkloadError(
            f"{source.name} brings its own code ({source.where}), which is not run unasked",
            hint="set trust_remote_code: true in the YAML if you trust it",
        )
    return _load(source, "AutoConfig").from_dict(copy.deepcopy(dict(source.fields)))


def remote_head(source: ConfigSource, task: Task | None) -> Head:
    """The class for the task among those the config's auto_map names; the first with a loss when no task is asked."""
    able = {_AUTO_CLASSES[name]: name for name in source.fields["auto_map"] if name in _AUTO_CLASSES}
    chosen = task or next(iter(able), None)
    if chosen is None or chosen not in able:
        raise WorkloadError(
            f"the code of {source.name} has no head for {chosen or 'training'}", hint=f"it has: {', '.join(able) or 'none'}"
        )
    model_class = _load(source, able[chosen])
    return Head(task=chosen, class_name=model_class.__name__, model_class=model_class)


def _load(source: ConfigSource, auto_name: str) -> Any:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    reference = source.fields["auto_map"].get(auto_name)
    reference = reference[0] if isinstance(reference, list) else reference
    if not isinstance(reference, str):
        raise WorkloadError(f"the config of {source.name} names no {auto_name} in its auto_map")
    try:
        return get_class_from_dynamic_module(reference, str(source.folder or source.name))
    except (OSError, ImportError, AttributeError, SyntaxError) as error:
        raise WorkloadError(f"the code of {source.name} ({reference}) cannot be loaded: {error}") from error
