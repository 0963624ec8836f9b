"""Which heads train with gradients that grow with the accumulation, read from transformers' sources: no import, a few milliseconds.

The Trainer counts the labels of all micro-batches and leaves the division to a model whose `forward` takes **kwargs (training_step in
trainer.py). A head that hands the count on to its loss divides by it. One that makes its own mean ignores it, and then nobody divides by
the accumulation: the gradient of (n/k) × k is k times that of n × 1 (transformers#47688). `hfopt.probe.neutrality` measures the same
with real steps; this rule answers where no model may be built. It says None where the source does not show it.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from hfopt.compat.versions import source_folder
from hfopt.facts.training_keys import installed

_TABLES = {
    "causal_lm": "CAUSAL_LM",
    "masked_lm": "MASKED_LM",
    "seq2seq_lm": "SEQ_TO_SEQ_CAUSAL_LM",
    "sequence_classification": "SEQUENCE_CLASSIFICATION",
    "token_classification": "TOKEN_CLASSIFICATION",
    "image_classification": "IMAGE_CLASSIFICATION",
    "semantic_segmentation": "SEMANTIC_SEGMENTATION",
    "ctc": "CTC",
    "speech_seq2seq": "SPEECH_SEQ_2_SEQ",
    "audio_classification": "AUDIO_CLASSIFICATION",
}
"""Tasks whose batches have `labels`, and their tables in models/auto/modeling_auto.py; without labels nothing is counted."""
_GENERIC = "modeling_layers.py"  # heads that several models share


def class_for(model_type: str, task: str) -> str | None:
    """The class that the auto class of this task builds for this model type."""
    folder = source_folder("transformers")
    if folder is None or task not in _TABLES:
        return None
    table = re.search(rf"^MODEL_FOR_{_TABLES[task]}_MAPPING_NAMES = .*?^\)$", _text(folder / "models/auto/modeling_auto.py"), re.M | re.S)
    entry = re.search(rf'\("{re.escape(model_type)}", \(?"(\w+)"', table[0]) if table is not None else None
    return entry[1] if entry is not None else None


def grows_with_accumulation(model_type: str, class_name: str) -> bool | None:
    """Are the gradients of this class k times as large in k micro-batches, with the plain Trainer? None: its source does not show it."""
    folder = source_folder("transformers")
    if folder is None:
        return None
    name = model_type.replace("-", "_")
    return _grows(folder / "models" / name / f"modeling_{name}.py", class_name)


def class_grows_with_accumulation(model_class: type) -> bool | None:
    """The same of a class that is loaded."""
    import inspect

    try:
        source = inspect.getsourcefile(model_class)
    except TypeError:
        return None
    return None if source is None else _grows(Path(source), model_class.__name__)


def words(class_name: str, accumulation: int) -> str:
    """What is wrong with a run that has it."""
    return (
        f"{class_name} with gradient_accumulation_steps {accumulation}: its loss ignores num_items_in_batch and the Trainer of "
        f"transformers {installed().version} leaves the division to it, so gradients are {accumulation} times those of the "
        "same batch at once (transformers#47688)"
    )


@cache
def _grows(file: Path, class_name: str) -> bool | None:
    found = _heads(file).get(class_name)
    if found is None:
        return None
    divided = next((value for base in found if (value := _stated(base)) is not None), None)
    if divided is False:
        return False  # the class says that the Trainer has to divide
    forward = next((method for base in found if (method := _forward(base)) is not None), None)
    if forward is None:
        return None
    if forward.args.kwarg is None or "labels" not in {arg.arg for arg in (*forward.args.args, *forward.args.kwonlyargs)}:
        return False  # it divides by itself
    losses = [call for call in ast.walk(forward) if isinstance(call, ast.Call) and _is_loss(call.func)]
    if not losses:
        return None
    return not any(keyword.arg in (None, "num_items_in_batch") for call in losses for keyword in call.keywords)


@cache
def _heads(file: Path) -> dict[str, tuple[ast.ClassDef, ...]]:
    """Every class of the file with its bases, nearest first, as far as they stand there or among the generic heads."""
    folder = source_folder("transformers")
    shared = _classes(folder / _GENERIC) if folder is not None else {}
    own = _classes(file)
    known = {**shared, **own}

    def lineage(name: str, seen: frozenset[str] = frozenset()) -> tuple[ast.ClassDef, ...]:
        if name not in known or name in seen:
            return ()
        bases = [base.id for base in known[name].bases if isinstance(base, ast.Name)]
        return (known[name], *(part for base in bases for part in lineage(base, seen | {name})))

    return {name: lineage(name) for name in own}


def _classes(file: Path) -> dict[str, ast.ClassDef]:
    text = _text(file)
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)} if text else {}


def _stated(node: ast.ClassDef) -> bool | None:
    for statement in node.body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if isinstance(statement, ast.Assign) and isinstance(target, ast.Name) and target.id == "accepts_loss_kwargs":
            return bool(isinstance(statement.value, ast.Constant) and statement.value.value)
    return None


def _forward(node: ast.ClassDef) -> ast.FunctionDef | None:
    return next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "forward"), None)


def _is_loss(function: ast.expr) -> bool:
    """`self.loss_function(...)`, `loss_fct(...)`, `nn.functional.ctc_loss(...)`; not the making of a loss (`CrossEntropyLoss()`)."""
    name = function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    return "loss" in name and name == name.lower()


@cache
def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
