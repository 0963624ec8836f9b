"""What of a config reaches the dry run, and what must not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hfopt.config.settings import with_raw
from hfopt.probe.dry_run import Device, training_arguments
from hfopt.schema import Candidate, Checkpointing, TrainJob

CANDIDATE = Candidate(per_device_batch=8, accumulation=4, precision="bf16")
FIELDS = frozenset(
    """
    output_dir max_steps per_device_train_batch_size gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs
    bf16 fp16 tf32 optim optim_args learning_rate save_strategy report_to use_cpu push_to_hub max_grad_norm deepspeed num_train_epochs
    """.split()  # noqa: SIM905
)


def _arguments(job: TrainJob, candidate: Candidate = CANDIDATE, device: Device = "cuda") -> dict[str, object]:
    return training_arguments(job, candidate, device=device, steps=3, output_dir="/scratch", fields=FIELDS)


def test_the_candidate_decides_and_the_jobs_step_settings_stay(tiny_job: TrainJob) -> None:
    args = {"max_grad_norm": 0.3, "optim": "adafactor", "bf16": False, "per_device_train_batch_size": 99, "num_train_epochs": 50}
    chosen = _arguments(with_raw(tiny_job, args))
    assert chosen["max_grad_norm"] == 0.3
    assert chosen["optim"] == "adafactor"
    assert (chosen["bf16"], chosen["fp16"]) == (True, False)
    assert (chosen["per_device_train_batch_size"], chosen["gradient_accumulation_steps"]) == (8, 4)
    assert "num_train_epochs" not in chosen
    assert _arguments(with_raw(tiny_job, args), replace(CANDIDATE, optim="adamw_8bit"))["optim"] == "adamw_8bit"


def test_nothing_is_written_reported_or_pushed(tiny_job: TrainJob) -> None:
    args = {"output_dir": "mine", "save_strategy": "steps", "report_to": ["wandb"], "push_to_hub": True, "deepspeed": "zero3.json"}
    chosen = _arguments(with_raw(tiny_job, args))
    assert (chosen["output_dir"], chosen["save_strategy"], chosen["report_to"], chosen["push_to_hub"]) == ("/scratch", "no", [], False)
    assert "deepspeed" not in chosen


def test_keys_this_version_does_not_have_are_left_out(tiny_job: TrainJob) -> None:
    assert set(_arguments(tiny_job)) <= FIELDS


@pytest.mark.parametrize(("every", "expected"), [(1, {"use_reentrant": True}), (3, {"use_reentrant": True, "every_n_layers": 3})])
def test_graded_checkpointing(every: int, expected: dict[str, object], tiny_job: TrainJob) -> None:
    candidate = replace(CANDIDATE, checkpointing=Checkpointing(every_n_layers=every, use_reentrant=True))
    chosen = _arguments(with_raw(tiny_job, {"gradient_checkpointing_kwargs": {"every_n_layers": 2}}), candidate)
    assert chosen["gradient_checkpointing"] is True
    assert chosen["gradient_checkpointing_kwargs"] == expected


def test_tf32_is_asked_for_on_cards_only(tiny_job: TrainJob) -> None:
    candidate = replace(CANDIDATE, precision="tf32")
    assert _arguments(tiny_job, candidate)["tf32"] is True
    assert _arguments(tiny_job, candidate, "cpu")["tf32"] is None
    assert _arguments(tiny_job, candidate, "cpu")["use_cpu"] is True
