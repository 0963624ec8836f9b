"""FSDP2's own checkpointing, where a plan writes it in place of the Trainer's: the same memory, one gather of each block's weights less.

The Trainer's checkpointing lies outside of FSDP's hooks, so the backward gathers a block's weights for the recomputation and once more for
its gradients; transformers warns of it. `activation_checkpointing` in the fsdp_config puts the recomputation inside of the sharded block.
But accelerate recomputes without the random state of the forward (`fsdp2_apply_ac`, preserve_rng_state=False): with dropout the gradients
would be those of another forward. So it is written only for a model that draws nothing, and all layers: it knows no grades.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hfopt.compat.versions import release
from hfopt.config.settings import with_raw
from hfopt.facts.training_keys import CHECKPOINTING_KEYS, installed
from hfopt.job.subject import Subject
from hfopt.memory.trace_store import kept_names
from hfopt.probe.neutrality import DROPOUT
from hfopt.schema import Candidate, TrainJob, Workload

OWN = "activation_checkpointing"
WHY = (
    "checkpointing inside of each sharded block gathers its weights once less than the Trainer's; nothing is drawn at random in this model"
)


def with_own_checkpointing(subject: Subject) -> Subject:
    """The job whose checkpointing, where a candidate has it, is FSDP2's own; the job itself where it may not be."""
    job = subject.job
    config = job.raw.get("fsdp_config") or {}
    if not _may_write(job) or not isinstance(config, Mapping) or OWN in config or str(config.get("version", 2)) != "2":
        return subject
    lora = job.model.lora
    if (lora is not None and lora.dropout) or kept_names("random parts", subject.workload, _random_parts):
        return subject
    return replace(subject, job=with_raw(job, {**job.raw, "fsdp_config": {**config, OWN: True}}))


def _may_write(job: TrainJob) -> bool:
    """FSDP2 came with transformers 5; a live Trainer has read its keys, another tool writes its own."""
    written = job.path is not None and job.tool is None and not job.fixed.intersection((*CHECKPOINTING_KEYS, "fsdp_config"))
    return written and release(job.for_transformers or installed().version) >= (5, 0)


def as_chosen(before: Mapping[str, Any], planned: Mapping[str, Any], candidate: Candidate) -> dict[str, Any]:
    """The planned arguments, without a setting that this candidate does not use and the file did not have."""
    config = planned.get("fsdp_config")
    had = before.get("fsdp_config")
    if not isinstance(config, Mapping) or candidate.checkpointing.every_n_layers == 1 or (isinstance(had, Mapping) and OWN in had):
        return dict(planned)
    kept = {key: value for key, value in config.items() if key != OWN}
    return {**planned, "fsdp_config": kept or had}


def _random_parts(workload: Workload) -> tuple[str, ...]:
    """What draws at random in the forward: dropout modules, and settings of the configuration that say so."""
    import torch

    with torch.device("meta"):
        model = workload.build_model()
    modules = (type(one).__name__ for one in model.modules() if isinstance(one, torch.nn.Dropout) and one.p > 0)
    config: Any = getattr(model, "config", None)
    return tuple(dict.fromkeys((*modules, *_random_settings(config.to_dict() if hasattr(config, "to_dict") else {}))))


def _random_settings(fields: Mapping[str, Any]) -> Iterator[str]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _random_settings(value)
        elif isinstance(value, (int, float)) and value > 0 and (DROPOUT.match(name) or "jitter" in name):
            yield name
