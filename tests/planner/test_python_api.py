"""A live Trainer as the planner sees it: its own rules about batches, what its data allows, what it already does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from datasets import Dataset
from made_jobs import made_job
from transformers import BertConfig, BertForSequenceClassification, LlamaForCausalLM, Trainer, TrainingArguments

from hfopt.job.live_trainer import from_live
from hfopt.job.request import Request
from hfopt.job.subject import Subject
from hfopt.planner.search import Space, micro_batches
from hfopt.pricing.dataloader import Feeding
from hfopt.pricing.grpo import batch_rule
from hfopt.schema import DataSpec, ModelSpec, TrainJob

QUIET = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def subject_of(trainer: Any, **options: Any) -> Subject:
    return from_live(trainer, Request(**options))


def classifier(folder: Path, data: Any, **more: Any) -> Any:
    model = BertForSequenceClassification(BertConfig(vocab_size=64, **SHAPE))
    arguments = TrainingArguments(output_dir=str(folder), max_steps=2, **{**QUIET, **more})
    return Trainer(model=model, args=arguments, train_dataset=data)


def rows(count: int = 32) -> list[dict[str, Any]]:
    return [{"input_ids": [1 + i % 7] * 9, "labels": i % 2} for i in range(count)]


def test_a_stream_has_a_worker_for_each_shard(tmp_path: Path) -> None:
    stream = Dataset.from_list(rows(64)).to_iterable_dataset(num_shards=3)
    subject = subject_of(classifier(tmp_path, stream))
    assert subject.most_workers == 3 and any("3 shard" in note for note in subject.notes)
    assert subject.workload.shape.length == 9, "all samples that were looked at are of one length"


class OwnStream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from rows()


def test_workers_of_a_stream_of_ones_own_stay(tmp_path: Path) -> None:
    subject = subject_of(classifier(tmp_path, OwnStream(), dataloader_num_workers=1))
    assert "dataloader_num_workers" in subject.job.kept
    feeding = Feeding(subject=subject, host=subject.hardware.host, ranks=1, on_gpu=True)
    assert feeding.current().workers == 1


def test_what_is_in_force_counts(tmp_path: Path) -> None:
    trainer = classifier(tmp_path, rows())
    trainer.model.gradient_checkpointing_enable()
    trainer.accelerator.state._mixed_precision = "bf16"
    job = subject_of(trainer).job
    assert job.raw["bf16"] is True and job.raw["gradient_checkpointing"] is True
    trainer.accelerator.state._mixed_precision = "no"
    trainer.accelerator._models.append(trainer.model)
    assert {"bf16", "fp16", "tf32"} <= subject_of(trainer).job.kept


def grpo_job(**args: Any) -> TrainJob:
    return made_job(
        path=None, section=(), trainer="GRPO", raw=args, model=ModelSpec(name=None), data=DataSpec(), per_device_batch=4, accumulation=4
    )


@pytest.mark.parametrize(
    ("args", "world", "batches"),
    [
        ({}, 1, (16, 8, 4, 2, 1)),
        ({"generation_batch_size": 8}, 1, (8, 4, 2, 1)),
        ({"generation_batch_size": 8}, 2, (4, 2, 1)),
    ],
)
def test_grpo_cuts_what_it_generates_into_whole_micro_batches(args: dict[str, Any], world: int, batches: tuple[int, ...]) -> None:
    rule = batch_rule(replace(grpo_job(**args), world_size=world))
    space = Space(effective_batch=16 * world, world_size=world, precisions=(), checkpointings=(), batch_multiple=rule.multiple)
    assert micro_batches(replace(space, batch_divides=rule.divides)) == batches


def test_grpo_with_stated_steps_generates_as_much_at_once() -> None:
    job = grpo_job(steps_per_generation=2)
    assert batch_rule(job).divides == 2 * job.per_device_batch and not batch_rule(job).keeps_pair
    assert batch_rule(replace(job, kept=frozenset({"steps_per_generation"}))).keeps_pair, "where the steps may not change with the batch"
    assert not batch_rule(replace(job, trainer="SFT")).keeps_pair


@pytest.mark.slow
def test_a_live_grpo_trainer_is_traced_on_what_it_will_generate(tiny: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import GRPOConfig, GRPOTrainer

        arguments = GRPOConfig(
            output_dir=str(tmp_path), num_generations=4, max_completion_length=10, bf16=False, beta=0.1, max_steps=1, **QUIET
        )
        trainer = GRPOTrainer(
            model=LlamaForCausalLM.from_pretrained(tiny / "llama"),
            reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": "w1 w2 w3 " * (1 + i % 2)} for i in range(16)]),
            processing_class=tiny_models.tokenizer(),
        )
        subject = subject_of(trainer)
        assert (subject.job.trainer, subject.workload.shape.length) == ("GRPO", 6 + 10)
        assert batch_rule(subject.job).divides == 8
        assert subject.workload.compute_loss is not None
        model = subject.workload.build_model()
        subject.workload.compute_loss(model, subject.workload.make_batch(4)).backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


@pytest.mark.parametrize(("version", "multiple"), [("0.15.2", 8), ("0.16.0", 1), ("1.16.0", 1), (None, 1)])
def test_before_trl_0_16_a_batch_holds_whole_groups(version: str | None, multiple: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("hfopt.compat.versions", "hfopt.pricing.grpo"):
        monkeypatch.setattr(f"{place}.package_version", lambda name: version)
    assert batch_rule(grpo_job()).multiple == multiple
    assert batch_rule(grpo_job(num_generations=4)).multiple == (4 if multiple > 1 else 1)
