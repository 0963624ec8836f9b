"""Rehearsals on the virtual GPU, kept on disk: the same candidate of the same job on the same card takes the same memory.

Only the virtual GPU's: a real device is measured anew, whatever was measured on it before.
"""

from __future__ import annotations

from typing import Any

from hfopt.model.stored_workload import workload_key
from hfopt.schema import Candidate, Checkpointing, EvaluationPeak, Gpu, TrainJob, Trial
from hfopt.store import default_store
from hfopt.typed_json import NotPlainError, from_json, to_json

_KEPT = ("ok", "oom")  # what failed for another reason may not fail again
_UNMEASURED = ("output_dir", "logging_dir", "run_name", "report_to")


Parts = dict[str, Any]


def rehearsal_parts(job: TrainJob | None, gpu: Gpu | None, candidate: Candidate, evaluation: EvaluationPeak | None) -> Parts | None:
    """What a rehearsal rests on; None where it may not be kept."""
    if job is None or gpu is None or default_store() is None or (key := workload_key(job)) is None:
        return None
    try:
        return {
            "what": "rehearsal",
            "workload": key,
            "arguments": {name: to_json(value) for name, value in job.raw.items() if name not in _UNMEASURED},
            "card": to_json(gpu),
            "candidate": to_json(candidate),
            "evaluation": None if evaluation is None else [evaluation.batch, evaluation.accumulation_steps, evaluation.keeps_predictions],
        }
    except NotPlainError:  # a YAML may hold dates
        return None


def kept_rehearsal(parts: Parts | None) -> Trial | None:
    store = default_store()
    found = None if store is None or parts is None else store.get(parts)
    try:
        trial = None if found is None else from_json(found, (Trial, Candidate, Checkpointing))
    except NotPlainError:
        return None
    return trial if isinstance(trial, Trial) and trial.outcome in _KEPT else None


def keep_rehearsal(parts: Parts | None, trial: Trial) -> None:
    store = default_store()
    if store is not None and parts is not None and trial.outcome in _KEPT:
        store.put(parts, to_json(trial), label=f"rehearsals on {parts['card']['Gpu'][0]}")
