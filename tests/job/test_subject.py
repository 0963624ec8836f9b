"""What is read from a file for a plan, beyond the job itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hfopt.errors import ConfigError
from hfopt.job import subject as request
from hfopt.job.request import Request
from hfopt.job.subject import from_file
from hfopt.planner.comparison import compare_cards
from hfopt.planner.trials import where_to_try


def test_a_misspelt_key_is_a_warning_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "workload_of", lambda job, **_: None)
    config = tmp_path / "train.yaml"
    config.write_text("model_name_or_path: m\noutput_dir: o\nper_device_train_batch_size: 16\ngradient_acumulation_steps: 4\n")
    subject = from_file(config, Request(gpu="t4"))
    assert subject.job.effective_batch == 16
    assert [note for note in subject.warnings if "gradient_acumulation_steps" in note and "gradient_accumulation_steps?" in note]
    config.write_text("model_name_or_path: m\noutput_dir: o\nper_device_train_batch_size: 16\nmy_own_key: 4\n")
    assert from_file(config, Request(gpu="t4")).warnings == ()


@pytest.fixture
def with_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(request, "workload_of", lambda job, **_: None)

    def read(deepspeed: dict[str, Any], **wishes: Any) -> Any:
        (tmp_path / "ds.json").write_text(json.dumps(deepspeed))
        config = tmp_path / "train.yaml"
        lines = "model_name_or_path: m\noutput_dir: o\nper_device_train_batch_size: 16\nbf16: true\ndeepspeed: ds.json\n"
        config.write_text(lines)
        return from_file(config, Request(gpu="3090", num_gpus=2, **wishes))

    return read


def test_what_the_deepspeed_config_states_is_kept_and_auto_is_not(with_deepspeed: Any) -> None:
    stated = with_deepspeed(
        {
            "train_micro_batch_size_per_gpu": 16,
            "gradient_accumulation_steps": "auto",
            "bf16": {"enabled": True},
            "optimizer": {"type": "Adam"},
        }
    )
    assert stated.job.kept == {"per_device_train_batch_size", "bf16", "optim"}
    assert [note for note in stated.notes if "per_device_train_batch_size, bf16: not changed" in note]
    automatic = with_deepspeed({"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "bf16": {"enabled": "auto"}})
    assert not automatic.job.kept and not automatic.notes


@pytest.mark.parametrize(
    ("deepspeed", "said"),
    [
        ({"train_micro_batch_size_per_gpu": 8}, "per_device_train_batch_size: the DeepSpeed config says 8, the training arguments 16"),
        ({"train_batch_size": 16}, "train_batch_size: the DeepSpeed config says 16, the training arguments 32"),
        ({"fp16": {"enabled": True}}, "fp16: the DeepSpeed config says True, the training arguments False"),
    ],
)
def test_a_deepspeed_config_that_says_otherwise_would_not_start(with_deepspeed: Any, deepspeed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        with_deepspeed(deepspeed)
    assert not with_deepspeed(deepspeed, engine="ddp").job.kept  # another engine was asked for, and the file is not read


@pytest.mark.parametrize("key", ["use_cpu", "no_cuda"])
def test_a_config_that_uses_no_card_is_planned_for_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setattr(request, "workload_of", lambda job, **_: SimpleNamespace(assumed=()))
    path = tmp_path / "train.yaml"
    path.write_text(f"model_name_or_path: m\nper_device_train_batch_size: 4\n{key}: true\n")
    subject = from_file(path, Request(gpu="rtx 3070", num_gpus=2))
    assert subject.hardware.gpus == () and subject.job.world_size == 1 and subject.job.effective_batch == 4
    assert any("planned for; rtx 3070 is not used" in note for note in subject.notes)
    assert subject.assumed[0].what == "device" and "CPU" in str(subject.assumed[0].value)
    with pytest.raises(ConfigError, match="no card is used"):
        compare_cards(path, ["t4"], Request())


@pytest.fixture
def without_its_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(request, "workload_of", lambda job, **_: SimpleNamespace(assumed=()))
    config = tmp_path / "train.yaml"
    config.write_text("model_name_or_path: m\noutput_dir: o\nper_device_train_batch_size: 16\ndeepspeed: gone.json\n")
    return lambda **wishes: from_file(config, Request(gpu="3090", **wishes))


def test_a_missing_deepspeed_json_is_planned_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "workload_of", lambda job, **_: SimpleNamespace(assumed=()))
    config = tmp_path / "train.yaml"
    text = "model_name_or_path: m\noutput_dir: o\nper_device_train_batch_size: 16\ndeepspeed: configs/ds_z3_offload.json\n"
    config.write_text(text)
    for cards in (1, 2):
        subject = from_file(config, Request(gpu="3090", num_gpus=cards))
        zero = subject.job.raw["deepspeed"]["zero_optimization"]
        assert zero["stage"] == 3 and zero["offload_param"] == {"device": "cpu"}
        assert any("planned as ZeRO-3 by its name" in note for note in subject.notes)
        assert any("on one device divides nothing" in note for note in subject.notes) is (cards == 1)
        assert where_to_try(subject.job, subject.hardware) is None, "a plain run would not be DeepSpeed's"
    config.write_text(text + "load_in_4bit: true\nuse_peft: true\nlora_r: 8\n")
    packed = from_file(config, Request(gpu="3090"))
    assert "deepspeed" not in packed.job.raw and any("planned without DeepSpeed" in note for note in packed.notes)


def test_what_the_plan_cannot_change_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "workload_of", lambda job, **_: SimpleNamespace(assumed=()))
    config = tmp_path / "train.yaml"
    config.write_text("model_name_or_path: m\nper_device_train_batch_size: 16\nnum_generations: 14\noptim: galore_adamw\nfp8: true\n")
    subject = from_file(config, Request(gpu="3090"))
    for words in ("do not divide by num_generations 14", "optim: galore_adamw is not modelled", "fp8: true is set"):
        assert sum(words in note for note in (*subject.notes, *subject.warnings)) == 1, words
    assert where_to_try(subject.job, subject.hardware) is None
    config.write_text(
        "model_name_or_path: m\nwarmup_ratio: 0.1\noverwrite_output_dir: true\nper_device_train_batch_size: 16\nnum_generations: 14\n"
    )
    assert any(note.startswith("line 5: ") for note in from_file(config, Request(gpu="3090")).warnings), (
        "as the file is, not as it is repaired"
    )


def test_a_missing_deepspeed_json_is_a_note_on_one_device(without_its_json: Any) -> None:
    alone = without_its_json()
    assert "deepspeed" not in alone.job.raw and any("planned without it; --assume-zero" in note for note in alone.notes)
    with pytest.raises(ConfigError, match=r"gone\.json is not there"):
        without_its_json(num_gpus=2)
    assumed = without_its_json(num_gpus=2, assume_zero=3)
    assert assumed.job.raw["deepspeed"]["zero_optimization"]["stage"] == 3
    assert any("planned as ZeRO-3 with DeepSpeed's defaults" in note for note in assumed.notes)
    with pytest.raises(ConfigError, match="no stage of ZeRO"):
        without_its_json(assume_zero=4)


@pytest.mark.parametrize(
    ("line", "key"), [("max_steps: null", "max_steps"), ("adam_epsilon: tiny", "adam_epsilon"), ("sharing: {tp_size: 2}", "tp_size")]
)
def test_an_error_that_no_plan_rests_on_is_told_beside_it(line: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "workload_of", lambda job, **_: SimpleNamespace(assumed=()))
    config = tmp_path / "train.yaml"
    config.write_text(f"model_name_or_path: m\noutput_dir: o\nper_device_train_batch_size: 16\n{line}\n")
    assert [note for note in from_file(config, Request(gpu="t4")).warnings if key in note and "line 4" in note]


def test_an_error_that_a_plan_rests_on_stops_it(tmp_path: Path) -> None:
    config = tmp_path / "train.yaml"
    config.write_text("model_name_or_path: m\noutput_dir: o\nper_device_train_batch_size: 16\noptim: adamw_tensor\n")
    with pytest.raises(ConfigError, match="optim is 'adamw_tensor'"):
        from_file(config, Request(gpu="t4"))


def test_repairs_are_changes_and_what_a_dropped_key_said_is_still_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    monkeypatch.setattr(request, "workload_of", lambda job, **_: SimpleNamespace(assumed=()))
    config = tmp_path / "train.yaml"
    keys = "model_name_or_path: m\noutput_dir: o\nper_device_train_batch_size: 8\nnum_generations: 8\n"
    config.write_text(keys + "max_prompt_length: 777\nwarmup_ratio: 0.1\nhub_token: null\n")
    subject = from_file(config, Request(gpu="t4"))
    changed = {change.key: (change.before, change.after) for change in subject.repairs}
    assert changed == {"max_prompt_length": (777, None), "warmup_ratio": (0.1, None), "warmup_steps": (None, 0.1)}
    without = tmp_path / "without.yaml"
    without.write_text(keys)
    assert subject.job.data != from_file(without, Request(gpu="t4")).job.data


def test_an_unknown_attention_is_refused_before_anything_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "workload_of", lambda job, **_: SimpleNamespace(assumed=()))
    path = tmp_path / "train.yaml"
    text = "model_name_or_path: m\nper_device_train_batch_size: 4\nlearning_rate: 1.0e-4\nattn_implementation: "
    path.write_text(text + "flash_attn_2\n")
    with pytest.raises(ConfigError, match="flash_attn_2 is not known to transformers") as caught:
        from_file(path, Request(gpu="3090"))
    assert caught.value.hint == "did you mean flash_attention_2?"
    for name in ("sdpa", "flash_attention_2", "org/kernel", "paged|eager"):
        path.write_text(text + name + "\n")
        assert from_file(path, Request(gpu="3090")).job.model.attn_implementation == name


def test_checkpointing_by_fsdp_is_in_the_figures_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "workload_of", lambda job, **_: SimpleNamespace(assumed=()))
    path = tmp_path / "train.yaml"
    text = (
        "model_name_or_path: m\nper_device_train_batch_size: 4\nfsdp: full_shard auto_wrap\nfsdp_config: {activation_checkpointing: true}\n"
    )
    path.write_text(text)
    shared = from_file(path, Request(gpu="3090", num_gpus=2))
    assert shared.job.settings.checkpointing.on and not shared.job.settings.checkpointing.use_reentrant
    assert "gradient_checkpointing" in shared.job.fixed, "transformers refuses both"
    assert any("only without dropout" in note for note in shared.notes)
    for wishes in ({"num_gpus": 1}, {"num_gpus": 2, "engine": "zero2"}):
        assert not from_file(path, Request(gpu="3090", **wishes)).job.settings.checkpointing.on  # type: ignore[arg-type]
    path.write_text(text + "gradient_checkpointing: true\n")
    with pytest.raises(ConfigError, match="are both true: transformers refuses"):
        from_file(path, Request(gpu="3090", num_gpus=2))


@pytest.mark.parametrize(
    ("model", "targets", "refused"),
    [
        ("HuggingFaceTB/SmolLM2-135M", "[q_projj]", True),
        ("HuggingFaceTB/SmolLM2-135M", "[q_projj, v_proj]", False),  # peft takes what it finds
        ("gpt2", "[c_attn]", False),
        ("gpt2", "[q_proj, v_proj]", True),
        ("google/flan-t5-small", "[q, v]", False),
        ("google/gemma-3-4b-it", "[q_projj]", False),  # of several parts: only building it tells
        ("org/unknown", "[q_projj]", False),
    ],
)
def test_targets_that_a_model_has_none_of_are_refused_before_it_is_built(
    model: str, targets: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "workload_of", lambda job, **_: SimpleNamespace(assumed=()))
    path = tmp_path / "train.yaml"
    path.write_text(f"model_name_or_path: {model}\nper_device_train_batch_size: 4\nuse_peft: true\nlora_target_modules: {targets}\n")
    if refused:
        with pytest.raises(ConfigError, match="has no module called"):
            from_file(path, Request(gpu="3090"))
    else:
        assert from_file(path, Request(gpu="3090")).job.model.lora is not None


def test_other_profiles_faults_neither_stop_the_plan_nor_are_told_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "workload_of", lambda job, **_: None)
    config = tmp_path / "train.yaml"
    profile = "  {name}:\n    training: {{per_device_train_batch_size: {batch}, learning_rate: 1.0e-4, save_steps: null, fp16: {half}}}\n"
    config.write_text(
        "model_name_or_path: m\ntraining:\n  per_device_train_batch_size: 2\n  learning_rate: 1.0e-4\n  save_steps: null\n  bf16: true\n"
        "profiles:\n" + profile.format(name="small", batch=1, half="maybe") + profile.format(name="large", batch="null", half="true")
    )
    subject = from_file(config, Request(gpu="a100-80gb"))
    assert subject.job.per_device_batch == 2
    assert subject.warnings == ("line 5: save_steps is null, but a number is needed",)


def test_a_limit_on_samples_is_called_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "workload_of", lambda job, **_: SimpleNamespace(assumed=()))
    config = tmp_path / "train.yaml"
    config.write_text("model_name_or_path: m\noutput_dir: o\nper_device_train_batch_size: 16\nmax_train_samples: 500\n")
    assert "at most 500 samples" in [one.value for one in from_file(config, Request(gpu="t4")).assumed]
    assert "40 samples" in [one.value for one in from_file(config, Request(gpu="t4", samples=40)).assumed]


def test_a_key_that_is_misspelt_in_many_places_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "workload_of", lambda job, **_: None)
    config = tmp_path / "train.yaml"
    steps = "".join(f"  - {{loss: {at}, learning_rate: 0.1, num_train_epoch: {at}}}\n" for at in range(1, 5))
    config.write_text(f"model_name_or_path: m\nper_device_train_batch_size: 16\nlearning_rate: 1.0e-4\nhistory:\n{steps}")
    told = [warning for warning in from_file(config, Request(gpu="t4")).warnings if "num_train_epoch" in warning]
    assert len(told) <= 1


def test_the_word_none_is_no_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "workload_of", lambda job, **_: None)
    config = tmp_path / "train.yaml"
    config.write_text("model_name_or_path: m\ndataset_name: d\npacking: true\nmax_length: 'None'\nper_device_train_batch_size: 2\n")
    job = from_file(config, Request(gpu="t4")).job
    assert job.trainer == "SFT" and "max_length" not in job.raw and job.data.max_length is None
