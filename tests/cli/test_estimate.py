"""`hfopt estimate`: the JSON's promises, the words for people, and what is said about wrong input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hfopt.compat.versions import TorchBuild

Run = Callable[..., tuple[int, str, str]]

TINY_BERT = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder that holds only a config.json is a model."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TINY_BERT))
    return str(path)


@pytest.fixture
def config(tmp_path: Path, folder: str) -> str:
    path = tmp_path / "train.yaml"
    path.write_text(
        f"model_name_or_path: {folder}\nmax_seq_length: 64\noutput_dir: out\n"
        "per_device_train_batch_size: 16\ngradient_accumulation_steps: 2\nbf16: true\n"
    )
    return str(path)


def _json(run: Run, *arguments: str) -> dict[str, Any]:
    code, out, err = run("estimate", *arguments, "--json")
    assert code == 0, err
    data: dict[str, Any] = json.loads(out)
    return data


def test_json_has_every_promised_name(run: Run, config: str) -> None:
    data = _json(run, config, "--gpu", "rtx 3070", "--batch-sizes", "4,64")
    assert {"model", "parameters", "device", "largest_batch", "rows"} <= data.keys()
    assert "3070" in data["device"] and isinstance(data["largest_batch"], int)
    asked = [(row["per_device_train_batch_size"], row["gradient_checkpointing"]) for row in data["rows"]]
    assert asked == [(4, False), (64, False), (4, True), (64, True)]
    for row in data["rows"]:
        assert row["device_bytes"] == row["peak_reserved_bytes"] + row["context_bytes"]
        assert row["peak_allocated_bytes"] <= row["peak_reserved_bytes"]
        assert sum(row["breakdown"].values()) == row["device_bytes"]
        assert row["fits"] is True
    without, with_it = (
        next(r for r in data["rows"] if r["gradient_checkpointing"] is on and r["per_device_train_batch_size"] == 64)
        for on in (False, True)
    )
    assert with_it["peak_allocated_bytes"] < without["peak_allocated_bytes"]
    assert data["precision"] == "bf16"
    guessed = {item["what"]: item["guessed"] for item in data["assumed"]}
    assert guessed.items() >= {"head": True, "length": False, "weights": True}.items()


@pytest.mark.slow
def test_a_folder_is_enough_and_architectures_names_the_head(run: Run, folder: str) -> None:
    data = _json(run, folder, "--vram", "4", "--batch-sizes", "2")
    assert data["model_class"] == "BertForSequenceClassification" and data["precision"] == "fp32"
    embeddings = 64 * (1000 + 128 + 2) + 2 * 64
    layer = 4 * (64 * 64 + 64) + 2 * 64 * 128 + 64 + 128 + 4 * 64
    assert data["parameters"] == embeddings + 2 * layer + 64 * 64 + 64 + 2 * 64 + 2


@pytest.mark.slow
def test_the_largest_batch_is_where_fits_ends(run: Run, folder: str) -> None:
    small = ("--vram", "0.75", "--seq-len", "128")
    largest = _json(run, folder, *small, "--batch-sizes", "1")["largest_batch"]
    rows = _json(run, folder, *small, "--batch-sizes", f"{largest},{largest + 1}")["rows"]
    assert [row["fits"] for row in rows if not row["gradient_checkpointing"]] == [True, False]
    for row in rows:
        assert row["fits"] == (row["device_bytes"] <= 768 * 2**20) == (row["spare_bytes"] >= 0)


@pytest.mark.slow
def test_the_allocator_is_the_one_the_environment_asks_for(run: Run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (folder, "--gpu", "t4", "--batch-sizes", "300", "--seq-len", "128")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    plain = _json(run, *asked)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    told = _json(run, *asked)
    assert told["rows"][0]["peak_reserved_bytes"] < plain["rows"][0]["peak_reserved_bytes"]
    said = "the allocator as the environment sets it here: expandable_segments:True"
    assert said in told["notes"] and said not in plain["notes"]


@pytest.mark.slow
def test_lengths_that_vary_are_replayed_and_said(run: Run, folder: str) -> None:
    data = _json(run, folder, "--gpu", "cpu", "--batch-sizes", "2", "--lengths", "24,40,64")
    assert any("padded to its own longest sample" in note and "up to 64" in note for note in data["notes"])


@pytest.mark.slow
def test_without_a_card_there_is_no_verdict(run: Run, folder: str) -> None:
    data = _json(run, folder, "--batch-sizes", "2", "--gpu", "cpu")
    assert data["device"] is None and data["largest_batch"] is None
    assert all(row["fits"] is None and row["device_bytes"] > 0 for row in data["rows"])


def test_people_get_a_table_on_stderr_and_nothing_on_stdout(run: Run, config: str) -> None:
    code, out, err = run("estimate", config, "--gpu", "rtx 3070")
    assert (code, out) == (0, "")
    for words in (
        "batch 16 fits with",
        "to spare",
        "largest batch without gradient checkpointing:",
        "weights",
        "CUDA context",
        "64 tokens",
    ):
        assert words in err
    assert "does not fit" in err, "the table goes on until something does not"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch-sizes", "0,4"], "at least one sample"),
        (["--batch-sizes", "a"], "not a list of whole numbers"),
        (["--lengths", "64,0"], "at least one token"),
        (["--precision", "int8"], "--precision int8 is not known"),
        (["--task", "poetry"], "--task poetry is not known"),
        (["--task", "image_classification"], "no head for image_classification"),
        (["--seq-len", "129"], "129 tokens is over the model's 128 positions"),
        (["--seq-len", "0"], "--seq-len"),
        (["--gpu", "rtx 9999 super"], "rtx 9999 super"),
        (["--vram", "lots"], "--vram"),
        (["--vram", "0"], "--vram"),
        (["--model", "./nowhere"], "unknown model"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_one_clear_message(run: Run, config: str, arguments: list[str], words: str) -> None:
    code, out, err = run("estimate", config, *arguments)
    assert code == 2 and out == ""
    assert words in err and "Traceback" not in err


def test_a_missing_config_is_said(run: Run, tmp_path: Path) -> None:
    code, out, err = run("estimate", str(tmp_path / "gone.yaml"))
    assert code == 2 and out == "" and "gone.yaml" in err


def test_a_yaml_without_a_model_asks_for_one(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("per_device_train_batch_size: 4\noutput_dir: out\n")
    code, _, err = run("estimate", str(path))
    assert code == 2 and "--model" in err


def test_an_unknown_model_is_estimated_like_a_known_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_BERT))
    options = ("--gpu", "4090", "--seq-len", "64", "--batch-sizes", "1", "--json")
    code, _, err = run("estimate", "acme/my-SmolLM2-135M-sft", *options)
    assert code == 2 and "acme/my-SmolLM2-135M-sft looks like HuggingFaceTB/SmolLM2-135M: --like HuggingFaceTB/SmolLM2-135M" in err
    code, out, _ = run("estimate", "acme/my-SmolLM2-135M-sft", "--like", str(tmp_path), *options)
    answer = json.loads(out)
    assert code == 0 and answer["model"] == "acme/my-SmolLM2-135M-sft" and answer["model_class"] == "BertForSequenceClassification"
    assert any(f"taken for {tmp_path} (--like)" in note for note in answer["notes"])


def test_the_model_may_stand_in_another_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_BERT))
    train, model = tmp_path / "train.yaml", tmp_path / "model.yaml"
    train.write_text("per_device_train_batch_size: 1\nlearning_rate: 1.0e-4\nmax_length: 64\n")
    model.write_text(f"model_name: {tmp_path}\n")
    options = ("--gpu", "4090", "--batch-sizes", "1", "--json")
    code, _, err = run("estimate", str(train), *options)
    assert code == 2 and f"--model-from {model}" in err.replace("\n", "")
    code, out, _ = run("estimate", str(train), "--model-from", str(model), *options)
    assert code == 0 and json.loads(out)["model_class"] == "BertForSequenceClassification"


@pytest.mark.slow
def test_estimate_and_plan_take_the_same_step(run: Run, config: str, tmp_path: Path) -> None:
    """An adapter's gradients through the accumulation are counted in one way by both."""
    path, told = Path(config), tmp_path / "plan.json"
    path.write_text(path.read_text().replace("steps: 2", "steps: 8") + "lora:\n  r: 2\n  target_modules: [query, value]\n")
    code, _, err = run("plan", config, "--gpu", "rtx 3070", "--no-dry-run", "-q", "--json", str(told), "-o", str(tmp_path / "new.yaml"))
    assert code == 0, err
    before = json.loads(told.read_text())["before"]
    (row,) = (row for row in _json(run, config, "--gpu", "rtx 3070", "--batch-sizes", "16")["rows"] if not row["gradient_checkpointing"])
    assert (row["peak_allocated_bytes"], row["peak_reserved_bytes"], row["device_bytes"]) == (
        before["peak_allocated_bytes"],
        before["peak_reserved_bytes"],
        before["peak_device_bytes"],
    )


@pytest.mark.slow
def test_several_devices_share_the_model_as_the_engine_does(run: Run, config: str) -> None:
    asked = (config, "--gpu", "rtx 3070", "--batch-sizes", "16")
    one, ddp = _json(run, *asked), _json(run, *asked, "--num-gpus", "4")
    zero = _json(run, *asked, "--num-gpus", "4", "--engine", "zero3")
    assert [(data["devices"], data["engine"]) for data in (one, ddp, zero)] == [(1, None), (4, "ddp"), (4, "zero3")]
    states = [data["rows"][0]["breakdown"]["optimizer_bytes"] for data in (one, ddp, zero)]
    assert states[2] < states[0] / 2 and states[0] == states[1]
    assert any("4 devices, ZeRO-3" in note for note in zero["notes"])


def test_an_engine_is_for_several_devices(run: Run, config: str) -> None:
    code, _, err = run("estimate", config, "--gpu", "rtx 3070", "--engine", "fsdp2")
    assert code != 0 and "--num-gpus" in err
    code, _, err = run("estimate", config, "--gpu", "rtx 3070", "--num-gpus", "2", "--engine", "zero9")
    assert code != 0 and "zero9 is not known" in err


def test_a_card_without_kernels_in_the_installed_torch_is_said(run: Run, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build = TorchBuild(version="2.15.0", cuda="13.2")
    monkeypatch.setattr("hfopt.planner.memory_table.torch_build", lambda: build)
    _, out, _ = run("estimate", folder, "--gpu", "gtx 1080", "--batch-sizes", "1", "--json")
    assert "no kernels for GeForce GTX 1080" in json.loads(out)["notes"][0]
