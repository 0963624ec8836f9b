"""Does trading batch for accumulation leave the gradients alone? Real steps of a tiny model of the same class answer.

A tiny configuration of the same architecture: what its class does stays, what it costs goes.

Sizes shrink by the names configs use for them; dropout goes to zero, so that two runs can be compared. Sub-configs shrink likewise.

The gradients of one optimizer step by the real Trainer, whole and in micro-batches, compared.

The Trainer sets seeds, environment variables and accelerate's global state; all of it is put back, because the caller may be in the
middle of a training script of their own.

Does trading batch for accumulation leave the gradients alone, for this model class and this version of transformers?

The real Trainer takes one step of n samples as n × 1 and as (n/k) × k on a tiny copy of the architecture; the gradients should be equal.
For many heads they are k times as large: the Trainer leaves the division by k to a model whose forward takes **kwargs, and the head
ignores the number of items it is given (trainer.model_accepts_loss_kwargs = False restores it). Lengths are equal in the probe: what
unequal ones add under a mean per micro-batch is the user's own choice of batch and accumulation, in any framework.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers

from hfopt import files
from hfopt.compat.transformers_patches import accelerate_state_kept
from hfopt.errors import WorkloadError
from hfopt.facts.loss_rule import REMEDY
from hfopt.model.batch import with_decoder_inputs
from hfopt.schema import DataSpec, Neutrality, TrainJob, Workload

_MOST: tuple[tuple[str, int], ...] = (
    # the first pattern that matches the whole key decides
    (r"vocab_size|.*_vocab_size(_per_layer_input)?", 128),
    (r"num_hidden_groups|inner_group_num", 1),
    (r"(num_)?(hidden_|encoder_|decoder_|n_)*layers?(_num)?|n_layer|num_(encoder|decoder)_blocks", 2),
    (r"num_key_value_heads|num_kv_heads", 2),
    (r"(num_|n_|encoder_|decoder_)*(attention_)?heads?|n_head|num_heads", 2),
    (r"head_dim|d_kv|.*_head_dim", 16),
    (r"hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|word_embed_proj_dim|projection_dim|output_hidden_size", 32),
    (r"conv_dim|hidden_sizes|classifier_proj_size|codevector_dim|proj_codevector_dim", 32),
    (r"(moe_)?intermediate_size|ffn_dim|(encoder|decoder)_ffn_dim|d_ff|n_inner|hidden_dim|ffn_hidden_size", 64),
    (r"num_(local_|routed_)?experts|n_routed_experts", 4),
    (r"max_position_embeddings|n_positions|max_source_positions|max_target_positions|max_sequence_length", 128),
    (r"num_labels", 3),
)
_RULES = tuple((re.compile(pattern), most) for pattern, most in _MOST)
SMALL_IMAGE = 64  # pixels a side, rounded up to whole patches
_DROPOUT = re.compile(r".*(drop|dropout|pdrop|dropout_prob|dropout_rate|layerdrop|drop_path_rate|_dropout_p)$|mask_(time|feature)_prob")
_DEPENDENT = frozenset(
    {
        "layer_types",
        "mlp_layer_types",
        "rope_scaling",
        "rope_parameters",
        "quantization_config",
        "out_features",
        "out_indices",
        "stage_names",
    }
)
"""Lists and tables that follow from the sizes: None makes the class fill them in again."""
_WIDTHS = frozenset({"embed_dim", "hidden_size", "hidden_sizes"})


def shrink(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json, tiny."""
    staged = any(isinstance(fields.get(key), (list, tuple)) for key in ("num_heads", "num_attention_heads"))  # widths follow the heads
    small = {key: value if staged and key in _WIDTHS else _small(key, value) for key, value in fields.items()}
    if isinstance(small.get("image_size"), int) and not staged:
        patch = small["patch_size"] if isinstance(small.get("patch_size"), int) else 1
        small["image_size"] = -(-SMALL_IMAGE // patch) * patch
    vocabulary = small.get("vocab_size")
    if isinstance(vocabulary, int):
        for key, value in small.items():
            if key.endswith("_token_id") and isinstance(value, int) and value >= vocabulary:
                small[key] = 1
            elif key.endswith("_token_id") and isinstance(value, list):
                small[key] = [min(item, 1) for item in value]
    return small


def _small(key: str, value: Any) -> Any:
    if key in _DEPENDENT:
        return None
    if isinstance(value, Mapping) and (key.endswith("_config") or key == "config"):
        return shrink(value)
    if _DROPOUT.match(key) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return 0.0
    if key == "depths" and isinstance(value, list):
        return [1] * len(value)
    most = next((most for pattern, most in _RULES if pattern.fullmatch(key)), None)
    if most is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return min(value, most)
    if isinstance(value, (list, tuple)) and key in ("conv_dim", "hidden_sizes"):
        return [min(item, most) for item in value]
    return value


def has_image_size(fields: Mapping[str, Any]) -> bool:
    """Whether the configuration fixes the size of images, itself or in a part."""
    return "image_size" in fields or any(has_image_size(part) for part in fields.values() if isinstance(part, Mapping))


_SEED = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientRatio:
    norm_ratio: float  # in micro-batches over whole
    difference: float  # norm of the difference over the norm of the whole


def gradient_ratio(
    workload: Workload, *, samples: int, split: int, arguments: Mapping[str, Any], divide: bool = False
) -> GradientRatio | None:
    """`samples` × 1 against (samples / split) × split. divide: with model_accepts_loss_kwargs = False. None: no gradient to compare."""
    with undisturbed():
        torch.manual_seed(_SEED)
        model = workload.build_model()
        batch = {name: _varied(name, tensor, getattr(model, "config", None)) for name, tensor in workload.make_batch(samples).items()}
        if arguments.get("label_smoothing_factor"):
            batch = with_decoder_inputs(batch, model)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        found = []
        for accumulation in (1, split):
            model.load_state_dict(weights)
            found.append(_gradient(workload, model, batch, samples // accumulation, accumulation, arguments, divide))
    whole, pieces = found
    norm = whole.norm().item()
    if not norm or not numpy.isfinite(norm):
        return None
    return GradientRatio(norm_ratio=pieces.norm().item() / norm, difference=(pieces - whole).norm().item() / norm)


def _gradient(
    workload: Workload,
    model: Any,
    batch: Mapping[str, torch.Tensor],
    micro: int,
    accumulation: int,
    arguments: Mapping[str, Any],
    divide: bool,
) -> torch.Tensor:
    kept: list[torch.Tensor] = []

    class Keep(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            kept.extend(parameter.grad.flatten().clone() for parameter in model.parameters() if parameter.grad is not None)

    with tempfile.TemporaryDirectory(prefix="hfopt-") as folder:
        args = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            optim="sgd",
            max_grad_norm=0,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            remove_unused_columns=False,
            **arguments,
        )
        rows = [{name: _row(value, index) for name, value in batch.items()} for index in range(micro * accumulation)]
        trainer = _trainer_class(workload)(model=model, args=args, train_dataset=rows, data_collator=_stacked, callbacks=[Keep()])
        trainer.remove_callback(transformers.PrinterCallback)
        if divide:
            trainer.model_accepts_loss_kwargs = False
        trainer.train()
    return torch.cat(kept) if kept else torch.zeros(1)


def _trainer_class(workload: Workload) -> Any:
    own_loss = workload.compute_loss
    if own_loss is None:
        return transformers.Trainer

    class OwnLoss(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            assert own_loss is not None
            loss = own_loss(model, inputs)
            return (loss, {"loss": loss}) if return_outputs else loss

    return OwnLoss


def _row(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, torch.Tensor) else value


def _stacked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    first = rows[0]
    return {name: torch.stack([row[name] for row in rows]) if isinstance(first[name], torch.Tensor) else first[name] for name in first}


def _varied(name: str, tensor: Any, config: Any) -> Any:
    """Samples that differ from each other and are equally long."""
    if not isinstance(tensor, torch.Tensor):  # a flag such as return_loss
        return tensor
    if "mask" in name:
        return torch.ones_like(tensor)
    if tensor.is_floating_point():
        return torch.rand_like(tensor) if "labels" in name else torch.randn_like(tensor)
    if "positions" in name or "token_type_ids" in name:
        return tensor
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    classes = int(getattr(config, "num_labels", 2))
    vocabulary = int(getattr(text, "vocab_size", None) or 16)
    is_classes = name == "labels" and not tensor.gt(0).any()
    return torch.randint(0, classes, tensor.shape) if is_classes else torch.randint(2, max(3, vocabulary), tensor.shape)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Puts back random states, environment, verbosity and accelerate's shared state."""
    environment = dict(os.environ)
    seeds = random.getstate(), numpy.random.get_state()
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with accelerate_state_kept(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        random.setstate(seeds[0])
        numpy.random.set_state(seeds[1])
        os.environ.clear()
        os.environ.update(environment)


_SAMPLES, _SPLIT = 8, 4
_TOLERANCE = 0.01
"""Equal gradients agree to about 1e-6 in float32, a missing division is off by k - 1: anything between is a loss over the batch."""
_VERSION = 2  # of the probe: part of the cache's key
_SMALL_DATA = DataSpec(max_length=16, max_target_length=8, audio_seconds=0.5)
_MOST_CUSTOM_PARAMETERS = 5_000_000
_CANNOT_STEP = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, NotImplementedError)
"""What a model may raise on a shape it was never meant for; then there is no answer."""


def probe(job: TrainJob, workload: Workload | None = None) -> Neutrality | None:
    """The answer for the job's model class, from the cache or from a probe of about a second. None: it could not be probed.

    workload: the job's own, when the caller has it; then a cached answer needs no model at all.
    """
    import transformers

    from hfopt.model.from_config import from_spec

    if workload is None:
        workload = from_spec(job.model, job.data, trainer=job.trainer)
    place = _cached_at(job, workload, transformers.__version__)
    if place is not None and (known := _read(place)) is not None:
        return known
    small = _tiny_workload(job, workload)
    if small is None:
        return None
    try:
        answer = _answer(small, workload, job, transformers.__version__)
    except _CANNOT_STEP:
        return None
    if place is not None and answer is not None:
        _write(place, answer)
    return answer


def _tiny_workload(job: TrainJob, workload: Workload) -> Workload | None:
    import transformers

    from hfopt.model.from_config import from_spec
    from hfopt.model.sources import find_config

    if workload.task == "custom":
        return workload if workload.parameters <= _MOST_CUSTOM_PARAMETERS else None
    assert job.model.name is not None
    fields = {**find_config(job.model.name).fields, **job.model.overrides}
    model_type = fields.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        return None  # code of its own
    whole = {**transformers.CONFIG_MAPPING[model_type].from_dict(fields).to_dict(), "architectures": fields.get("architectures")}
    small = shrink({key: value for key, value in whole.items() if key != "transformers_version"})
    still = job.model.lora and dataclasses.replace(job.model.lora, dropout=0.0)  # what it drops at random is no difference of gradients
    plain = dataclasses.replace(
        job.model, overrides=small, lora=still, quantization=None, weights_dtype="float32", task=workload.task, attn_implementation="eager"
    )
    data = _SMALL_DATA if has_image_size(small) else dataclasses.replace(_SMALL_DATA, image_size=SMALL_IMAGE)
    for spec in (plain, dataclasses.replace(plain, attn_implementation=None), dataclasses.replace(plain, lora=None, frozen=())):
        try:
            return from_spec(spec, data, trainer=job.trainer)
        except WorkloadError:
            continue
    return None


def _answer(small: Workload, workload: Workload, job: TrainJob, version: str) -> Neutrality | None:

    settings = {key: job.args[key] for key in ("label_smoothing_factor",) if key in job.args}
    measured = gradient_ratio(small, samples=_SAMPLES, split=_SPLIT, arguments=settings)
    if measured is None:
        return None
    neutral = measured.difference <= _TOLERANCE
    fixed = None if neutral else gradient_ratio(small, samples=_SAMPLES, split=_SPLIT, arguments=settings, divide=True)
    fixable = fixed is not None and fixed.difference <= _TOLERANCE
    return Neutrality(
        model_class=workload.model_class,
        transformers_version=version,
        neutral=neutral,
        ratio=measured.norm_ratio,
        fixable=fixable,
        reason=_reason(workload, neutral, fixable, measured.norm_ratio),
    )


def _reason(workload: Workload, neutral: bool, fixable: bool, ratio: float) -> str:
    if neutral:
        return f"{workload.model_class}: {_SAMPLES} samples at once and in {_SPLIT} micro-batches give the same gradients"
    if fixable:
        return (
            f"{workload.model_class}: with {_SPLIT} micro-batches the Trainer makes gradients {ratio:.2f} times as large, because the head "
            f"ignores num_items_in_batch and the Trainer leaves the division to it; {REMEDY}"
        )
    why = workload.batch_dependent_loss or "the loss is not a mean over samples"
    return f"{workload.model_class}: micro-batches change the gradients ({ratio:.2f} times the norm): {why}"


def _cached_at(job: TrainJob, workload: Workload, version: str) -> Path | None:
    """The user's own code is not cached: it may change under the same name."""
    if workload.task == "custom" or job.model.trust_remote_code:
        return None
    facts = (_VERSION, job.model.lora is not None, job.trainer, bool(job.args.get("label_smoothing_factor")))
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    return files.location("neutrality") / f"{workload.model_class}-{version}-{key}.json"


def _read(place: Path) -> Neutrality | None:
    try:
        known: Mapping[str, Any] = json.loads(place.read_text())
        return Neutrality(**known)
    except (OSError, ValueError, TypeError):
        return None


def _write(place: Path, answer: Neutrality) -> None:
    """A cache that cannot be written is no reason to fail."""
    with suppress(OSError):
        files.write_private(place, json.dumps(dataclasses.asdict(answer)))
