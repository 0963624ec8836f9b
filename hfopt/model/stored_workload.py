"""What planning reads of a model besides its traces: plain facts, kept on disk, so that a second question builds no model.

The key is all that the workload is made from: the model's configuration as it was found (with the small files beside it), what the YAML
says of model and data, the trainer, and TRL's arguments where TRL makes the batches. Models with code of their own are not kept: the code
may change under the same name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hfopt.model.sources import is_reference, source_of, stated_model
from hfopt.schema import Assumption, BatchShape, ConfigFacts, LengthSpread, TrainJob, Workload
from hfopt.store import NotPlainError, Store, from_json, to_json


def whole(workload: Workload) -> Workload:
    """The workload with its model: built now where only its facts were kept."""
    return workload if workload.remake is None else workload.remake()


def sample_of(workload: Workload) -> tuple[int, bool]:
    """The same as `sample_facts`, kept or read off a batch of one."""
    if workload.facts.sample_bytes is not None:
        return workload.facts.sample_bytes, workload.facts.spectrogram
    return sample_facts(workload.make_batch(1))


def sample_facts(sample: dict[str, Any]) -> tuple[int, bool]:
    """The bytes of a sample's tensors, and whether sound comes as a spectrogram."""
    size = sum(value.numel() * value.element_size() for value in sample.values() if hasattr(value, "element_size"))
    return size, "input_features" in sample or any(getattr(value, "dim", int)() > 2 for value in sample.values())


_PLAIN = (
    *("name", "model_class", "task", "shape", "parameters", "trainable_parameters", "layers", "tokens_per_sample", "checkpointable"),
    *("batch_dependent_loss", "weights_dtype", "checkpoint_dtype", "lengths", "assumed", "notes", "facts"),
)
_CLASSES = (BatchShape, LengthSpread, Assumption, ConfigFacts)
_HASHED_BYTES = 1 << 20  # a larger file beside the config is known by its size and date
_NOT_TRL = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "learning_rate", "num_train_epochs"),
    *("max_steps", "output_dir", "run_name", "report_to", "seed", "weight_decay", "lr_scheduler_type", "warmup_steps", "warmup_ratio"),
    *("gradient_checkpointing", "bf16", "fp16", "tf32", "logging_steps", "save_steps", "eval_steps", "dataloader_num_workers"),
)
"""Arguments that say nothing of TRL's batches or loss."""
Build = Callable[[TrainJob], Workload]


def workload_key(job: TrainJob) -> str | None:
    """The same for the same workload; None where it may not be kept. A model that is not stated or not to be found is an error, as it is
    when the workload is built: only sooner."""
    if job.model.name is not None and is_reference(stated_model(job.model)):
        return None
    source = source_of(job.model)
    if "auto_map" in source.fields:
        return None
    parts = {
        "source": [source.name, source.where, source.note, dict(source.fields), _beside(source.folder)],
        "model": asdict(job.model),
        "data": asdict(replace(job.data, dataset=None, samples=None)),
        "trainer": job.trainer,
        "trl": {key: value for key, value in job.raw.items() if key not in _NOT_TRL} if job.uses_trl else None,
        "grouped": job.settings.loader.groups_by_length,
    }
    try:
        text = json.dumps(parts, sort_keys=True)
    except (TypeError, ValueError):  # a YAML may hold dates, or keys of several types
        return None
    return hashlib.sha256(text.encode()).hexdigest()


def _beside(folder: Path | None) -> list[list[Any]]:
    """The small files of a model's folder: its processor's and its tokenizer's settings shape the batches."""
    if folder is None:
        return []
    found = []
    for path in sorted(folder.glob("*.json")):
        info = path.stat()
        large = info.st_size > _HASHED_BYTES
        found.append([path.name, [info.st_size, info.st_mtime_ns] if large else hashlib.sha256(path.read_bytes()).hexdigest()])
    return found


def kept_workload(job: TrainJob, build: Build, store: Store | None, *, before_building: Callable[[], None]) -> Workload:
    """With the facts of the disk where they are, and its model to be built on demand; else built now, and kept."""
    key = workload_key(job)
    if key is None:
        before_building()
        return build(job)
    if store is not None and (known := _read(store, key)) is not None:
        return _on_demand(known, _Remaking(job=job, build=build, key=key, before=before_building))
    before_building()
    made = replace(build(job), key=key)
    size, spectrogram = sample_facts(made.make_batch(1))
    made = replace(made, facts=replace(made.facts, sample_bytes=size, spectrogram=spectrogram))
    if store is not None:
        _write(store, made)
    return made


@dataclass(kw_only=True)
class _Remaking:
    """The model behind facts that were kept: built once, when a trace needs it."""

    job: TrainJob
    build: Build
    key: str
    before: Callable[[], None]
    _made: Workload | None = field(default=None, init=False)

    def __call__(self) -> Workload:
        if self._made is None:
            self.before()
            self._made = replace(self.build(self.job), key=self.key)
        return self._made


def _parts(key: str) -> dict[str, str]:
    return {"what": "workload", "workload": key}


def _read(store: Store, key: str) -> Mapping[str, Any] | None:
    try:
        known = from_json(store.get(_parts(key)), _CLASSES)
    except NotPlainError:
        return None
    return known if isinstance(known, dict) and {*_PLAIN, "own_loss"} == known.keys() else None


def _write(store: Store, made: Workload) -> None:
    assert made.key is not None
    plain = {name: getattr(made, name) for name in _PLAIN} | {"own_loss": made.compute_loss is not None}
    store.put(_parts(made.key), to_json(plain), label=made.name)


def _on_demand(known: Mapping[str, Any], remake: _Remaking) -> Workload:
    def loss(model: Any, batch: dict[str, Any]) -> Any:
        own = remake().compute_loss
        assert own is not None, "the same job has the same loss"
        return own(model, batch)

    def with_layers(layers: int) -> Workload | None:
        own = remake().with_layers
        return None if own is None else own(layers)

    return Workload(
        **{name: known[name] for name in _PLAIN},
        build_model=lambda: remake().build_model(),
        make_batch=lambda size: remake().make_batch(size),
        compute_loss=loss if known["own_loss"] else None,
        with_layers=with_layers,
        key=remake.key,
        remake=remake,
    )
