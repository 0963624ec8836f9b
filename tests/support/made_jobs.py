"""Jobs for tests: a TrainJob with the settings that follow from its keys."""

from __future__ import annotations

from typing import Any

from hfopt.config.settings import trainer_settings
from hfopt.schema import DataSpec, ModelSpec, TrainJob


def made_job(**fields: Any) -> TrainJob:
    """A job of the plain Trainer with a batch of 8 unless said otherwise."""
    raw, trainer = fields.pop("raw", {}), fields.pop("trainer", "Trainer")
    given = {"path": None, "section": (), "model": ModelSpec(name=None), "data": DataSpec(), "per_device_batch": 8, "accumulation": 1}
    return TrainJob(raw=raw, trainer=trainer, settings=trainer_settings(raw, trainer), **{**given, **fields})
