"""Does trading batch for accumulation leave the gradients alone, for this model class and this version of transformers?

The real Trainer takes one step of n samples as n × 1 and as (n/k) × k on a tiny copy of the architecture; the gradients should be equal.
For many heads they are k times as large: the Trainer leaves the division by k to a model whose forward takes **kwargs, and the head
ignores the number of items it is given (trainer.model_accepts_loss_kwargs = False restores it). Lengths are equal in the probe: what
unequal ones add under a mean per micro-batch is the user's own choice of batch and accumulation, in any framework.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hfopt import files
from hfopt.errors import WorkloadError
from hfopt.schema import DataSpec, Neutrality, TrainJob, Workload

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
    from hfopt.probe.tiny import SMALL_IMAGE, has_image_size, shrink

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
    from hfopt.probe.gradients import gradient_ratio

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
            "ignores num_items_in_batch and the Trainer leaves the division to it; model_accepts_loss_kwargs = False restores them"
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
