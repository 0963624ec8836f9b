"""Does trading batch for accumulation leave the gradients alone? Real steps of a tiny model of the same class answer.

A tiny configuration of the same architecture: what its class does stays, what it costs goes. Sizes shrink by the names configs use for
them; dropout goes to zero, so that two runs can be compared. Sub-configs shrink likewise.

The real Trainer takes one step of n samples as n × 1 and as (n/k) × k on a tiny copy of the architecture; the gradients should be equal.
For many heads they are k times as large: the Trainer leaves the division by k to a model whose forward takes **kwargs, and the head
ignores the number of items it is given (trainer.model_accepts_loss_kwargs = False restores it). Lengths are equal in the probe: what
unequal ones add under a mean per micro-batch is the user's own choice of batch and accumulation, in any framework.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from hfopt import files
from hfopt.compat.versions import package_version
from hfopt.errors import WorkloadError
from hfopt.schema import DataSpec, Neutrality, TrainJob, Workload

_MOST: tuple[tuple[str, int], ...] = (
    # the first pattern that matches the whole key decides
    (r"vocab_size|.*_vocab_size(_per_layer_input)?", 128),
    (r"num_hidden_groups|inner_group_num", 1),
    (r"(num_)?(hidden_|encoder_|decoder_|n_)*layers?(_num)?|n_layer|num_(encoder|decoder)_blocks", 2),
    (r"num_key_value_heads|num_kv_heads", 2),
    (r"(num_|n_|encoder_|decoder_)*(attention_)?heads?|n_head|num_heads", 2),
    (r"head_dim|d_kv|.*_head_dim", 16),
    (r"hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|word_embed_proj_dim|projection_dim|(output|pooler)_hidden_size", 32),
    (r"conv_dim|hidden_sizes|classifier_proj_size|codevector_dim|proj_codevector_dim", 32),
    (r"(moe_)?intermediate_size|ffn_dim|(encoder|decoder)_ffn_dim|d_ff|n_inner|hidden_dim|ffn_hidden_size", 64),
    (r"num_(local_|routed_)?experts|n_routed_experts", 4),
    (r"(num_)?experts_per_tok(en)?|num_selected_experts|moe_(top_?k|k)", 2),
    (r"max_position_embeddings|n_positions|max_source_positions|max_target_positions|max_sequence_length", 128),
    (r"num_labels", 3),
)
_RULES = tuple((re.compile(pattern), most) for pattern, most in _MOST)
SMALL_IMAGE = 64  # pixels a side, rounded up to whole patches
DROPOUT = re.compile(r".*(drop|dropout|pdrop|dropout_prob|dropout_rate|layerdrop|drop_path_rate|_dropout_p)$|mask_(time|feature)_prob")
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
    if DROPOUT.match(key) and isinstance(value, (int, float)) and not isinstance(value, bool):
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


_SAMPLES, _SPLIT = 8, 4
_TOLERANCE = 0.01
"""Equal gradients agree to about 1e-6 in float32, a missing division is off by k - 1: anything between is a loss over the batch."""
_VERSION = 4  # of the probe: part of the cache's key
_SMALL_DATA = DataSpec(max_length=16, max_target_length=8, audio_seconds=0.5)
_MOST_CUSTOM_PARAMETERS = 5_000_000
_CANNOT_STEP = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, NotImplementedError)
"""What a model may raise on a shape it was never meant for; then there is no answer."""


def probe(job: TrainJob, workload: Workload | None = None) -> Neutrality | None:
    """The answer for the job's model class, from the cache or from a probe of about a second. None: it could not be probed.

    workload: the job's own, when the caller has it; then a cached answer needs no model at all.
    """
    if workload is None:
        from hfopt.model.from_config import from_job

        workload = from_job(job)
    version = package_version("transformers") or ""
    place = _cached_at(job, workload, version)
    if place is not None and (known := _read(place)) is not None:
        return known
    answer = _probed(job, workload, version)
    if place is not None and answer is not None:
        _write(place, answer)
    return answer


def _probed(job: TrainJob, workload: Workload, version: str) -> Neutrality | None:
    small = _tiny_workload(job, workload)
    if small is None:
        return None
    try:
        return _answer(small, workload, job, version)
    except _CANNOT_STEP:
        return None


def _tiny_workload(job: TrainJob, workload: Workload) -> Workload | None:
    import transformers

    from hfopt.model.from_config import from_job
    from hfopt.model.sources import source_of

    if workload.task == "custom":
        return workload if workload.parameters <= _MOST_CUSTOM_PARAMETERS else None
    fields = {**source_of(job.model).fields, **job.model.overrides}
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
            return from_job(dataclasses.replace(job, model=spec, data=data))
        except WorkloadError:
            continue
    return None


def _answer(small: Workload, workload: Workload, job: TrainJob, version: str) -> Neutrality | None:

    from hfopt.probe.step_gradients import gradient_ratio

    settings = {"label_smoothing_factor": job.settings.label_smoothing} if job.settings.label_smoothing else {}
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
        from hfopt.facts.loss_rule import REMEDY

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
    loss = (job.trainer, _trl_version() if job.uses_trl else None, str(job.settings.loss_type), job.settings.label_smoothing)
    facts = (_VERSION, job.model.lora is not None, loss)
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    return files.location("neutrality") / f"{workload.model_class}-{version}-{key}.json"


def _trl_version() -> str | None:
    try:
        return metadata.version("trl")
    except metadata.PackageNotFoundError:
        return None


def _read(place: Path) -> Neutrality | None:
    try:
        files.check_own(place)
        known: Mapping[str, Any] = json.loads(place.read_text())
        return Neutrality(**known)
    except (OSError, ValueError, TypeError):
        return None


def _write(place: Path, answer: Neutrality) -> None:
    """A cache that cannot be written is no reason to fail."""
    with suppress(OSError):
        files.write_private(place, json.dumps(dataclasses.asdict(answer)))
