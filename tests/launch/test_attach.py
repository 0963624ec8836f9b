"""What happens at `train()` under `hfopt run`: planned once per Trainer, applied whole or not at all, and never in the training's way."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hfopt.launch import attach as preparing
from hfopt.launch.apply_plan import apply_changes
from hfopt.launch.attach import effective_config
from hfopt.launch.handoff import ORDERS
from hfopt.schema import Change

pytestmark = pytest.mark.usefixtures("desk")


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 64, (12,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids.clone()}


def trainer_in(folder: Path, **more: Any) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 2, "logging_steps": 1}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    args = TrainingArguments(output_dir=str(folder), **{**settings, **quiet, **more})
    return Trainer(model=LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)), args=args, train_dataset=Samples())


def changed(**after: Any) -> tuple[Change, ...]:
    return tuple(Change(key=key, before=None, after=value, reason="") for key, value in after.items())


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_settings_put_onto_a_trainer_do_what_they_do_from_the_start(tmp_path: Path) -> None:
    wanted = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "bf16": True, "gradient_checkpointing": True}
    late, early = trainer_in(tmp_path), trainer_in(tmp_path, **wanted)
    apply_changes(late, changed(**wanted))
    assert late.accelerator.mixed_precision == early.accelerator.mixed_precision == "bf16"
    late.train()
    assert late.model.is_gradient_checkpointing
    early.train()
    assert losses(late) == losses(early)
    assert late._train_batch_size == 8
    again = trainer_in(tmp_path, **wanted)
    again.model.gradient_checkpointing_enable()
    apply_changes(again, changed(bf16=False, gradient_checkpointing=False))
    assert again.accelerator.mixed_precision == "no" and not again.model.is_gradient_checkpointing


def test_a_plan_to_compile_has_the_model_compiled(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    trainer.args.torch_compile_backend = "aot_eager"  # quicker than generated code
    try:
        apply_changes(trainer, changed(torch_compile=True))
        trainer.train()
    finally:
        AcceleratorState._reset_state()
    assert isinstance(trainer.model_wrapped, torch._dynamo.OptimizedModule)
    assert len(losses(trainer)) == 2


def test_liger_is_put_onto_the_model_below_its_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fused: list[Any] = []
    package = ModuleType("liger_kernel.transformers")
    package._apply_liger_kernel_to_instance = lambda model, **options: fused.append((model, options))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    trainer = trainer_in(tmp_path)
    bare = trainer.model
    trainer.model = get_peft_model(bare, LoraConfig(target_modules=["q_proj"]))
    trainer.args.liger_kernel_config = {"rope": False}
    apply_changes(trainer, changed(use_liger_kernel=True))
    assert fused == [(bare, {"rope": False})]
    assert trainer.args.use_liger_kernel


def test_what_cannot_be_put_on_whole_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_in(tmp_path)
    before = dict(vars(trainer.args))
    monkeypatch.setattr("hfopt.launch.apply_plan._checkpoint", lambda trainer: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        apply_changes(trainer, changed(per_device_train_batch_size=8, gradient_checkpointing=True))
    assert vars(trainer.args) == before and trainer._train_batch_size == 2


def test_each_trainer_is_planned_once(tmp_path: Path, attached: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with attached(keep=("gradient_checkpointing",)):
        first, second = trainer_in(tmp_path / "a"), trainer_in(tmp_path / "b")
        first.train()
        first.train()
        second.train()
    assert capfd.readouterr().err.count("hfopt: planned") == 2
    for trainer in (first, second):
        assert (trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps) == (8, 1)
        config = yaml.safe_load((Path(trainer.args.output_dir) / "hfopt" / "config.yaml").read_text())
        assert effective_config(TrainingArguments(**config)) == config


def test_no_credential_is_in_the_written_config_however_deep() -> None:
    token = "hf_" + "Zq7" * 11

    @dataclass
    class Arguments:
        run_name: str = ""
        hub_token: str = ""
        model_init_kwargs: Any = None
        report_to: Any = None

    given = {"token": "plain", "revision": "main", "more": [{"note": token, "kept": 1}, token]}
    stated = effective_config(Arguments(run_name="a", hub_token="b", model_init_kwargs=given, report_to=[token, "wandb"]))
    assert stated == {"run_name": "a", "model_init_kwargs": {"revision": "main", "more": [{"kept": 1}]}, "report_to": ["wandb"]}


def test_keys_that_stay_and_trials_that_are_left_alone(tmp_path: Path, attached: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with attached(keep=("per_device_train_batch_size",)):
        trainer = trainer_in(tmp_path)
        trainer.train(trial={"learning_rate": 1e-3})
        assert "left alone" in capfd.readouterr().err and not (tmp_path / "hfopt" / "plan.json").exists()
        trainer.train()
    assert trainer.args.per_device_train_batch_size == 2 and (tmp_path / "hfopt" / "plan.json").exists()


@pytest.mark.parametrize("where", ["plan", "apply_changes"])
def test_a_fault_of_ours_is_one_line(
    where: str, tmp_path: Path, attached: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a bug\nover two lines")

    alone = trainer_in(tmp_path / "alone")
    alone.train()
    monkeypatch.setattr("hfopt.planner.algorithm.make_plan" if where == "plan" else f"{preparing.__name__}.{where}", broken)
    with attached():
        trainer = trainer_in(tmp_path / "run")
        trainer.train()
    lines = [line for line in capfd.readouterr().err.splitlines() if "not planned" in line]
    assert len(lines) == 1 and "ZeroDivisionError: a bug over two lines" in lines[0]
    assert losses(trainer) == losses(alone)


def test_only_a_plan(tmp_path: Path, attached: Any) -> None:
    with attached(mode="plan_only"), pytest.raises(SystemExit) as ended:
        trainer_in(tmp_path).train()
    assert ended.value.code == 0
    assert {entry.name for entry in (tmp_path / "hfopt").iterdir()} == {"plan.json", "plan.txt", "config.yaml"}


def test_a_dry_run_takes_a_few_steps_and_saves_nothing(tmp_path: Path, attached: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with attached(mode="dry_run", fallback=False), pytest.raises(SystemExit) as ended:
        trainer_in(tmp_path, max_steps=50, save_strategy="steps", save_steps=1).train()
    assert ended.value.code == 0
    assert "dry run: 3 steps" in capfd.readouterr().err
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_restart_keeps_the_plan_under_what_it_changed(
    tmp_path: Path, attached: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "hfopt"
    folder.mkdir()
    planned = [
        {"key": "per_device_train_batch_size", "before": 2, "after": 8, "reason": ""},
        {"key": "gradient_accumulation_steps", "before": 4, "after": 1, "reason": ""},
        {"key": "dataloader_prefetch_factor", "before": None, "after": None, "reason": ""},
        {"key": "per_device_eval_batch_size", "before": 8, "after": 32, "reason": ""},
    ]
    (folder / "plan.json").write_text(json.dumps({"changes": planned}))
    ordered = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    monkeypatch.setenv(ORDERS, json.dumps({"output_dir": str(tmp_path), "checkpoint": None, "changes": ordered}))
    with attached():
        trainer = trainer_in(tmp_path)
        trainer.train()
    args = trainer.args
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps, args.per_device_eval_batch_size) == (4, 2, 32)
    assert "hfopt: planned" not in capfd.readouterr().err
