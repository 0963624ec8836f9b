"""`hfopt explain`: words, JSON and exit codes; with a config the step is replayed and every change has its figure."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from hfopt.planner.explanation import otherwise
from hfopt.schema import OomPhase, ReplayedOom
from hfopt.units import GIB

Run = Callable[..., tuple[int, str, str]]
OOM = (
    "  Instantaneous batch size per device = 16\n  Gradient Accumulation steps = 1\nTraceback (most recent call last):\n"
    '  File "/env/transformers/trainer.py", line 3782, in training_step\n    self.accelerator.backward(loss)\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 250.00 MiB. GPU 0 has a total capacity of {total} GiB of which "
    "101.12 MiB is free. Of the allocated memory 1.00 GiB is allocated by PyTorch, and 20.00 MiB is reserved by PyTorch but unallocated.\n"
)


@pytest.fixture
def run(run: Run) -> Run:
    return partial(run, "explain", given=b"")


def test_words_for_people_from_standard_input(run: Run) -> None:
    code, out, err = run("-", given=OOM.format(total="1.60").encode())
    assert code == 0 and out == ""
    for words in ("requested 250 MiB", "101 MiB free", "fragmentation: no", "phase: the backward", "--config FILE"):
        assert words in err


def test_json_for_programs(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(OOM.format(total="1.60"))
    code, out, _ = run(str(log), "--json")
    data = json.loads(out)
    assert code == 0 and data["found"] is True and (data["cause"], data["phase"]) == ("device_full", "backward")
    assert data["figures"]["requested_bytes"] == 250 << 20 and data["batch"] == 16 and data["changes"]


def test_a_log_without_one_ends_with_1(run: Run) -> None:
    code, _, err = run("-", given=b"loss 1.2\nCUDA error: device-side assert triggered\n")
    assert code == 1 and "no out-of-memory error" in err and "device-side assert" in err
    code, out, _ = run("-", "--json", given=b"loss 1.2\n")
    assert code == 1 and json.loads(out) == {"schema": "hfopt/explain/1", "found": False, "other_fault": None}


@pytest.mark.parametrize("name", ["nowhere.log", "."])
def test_what_cannot_be_read_ends_with_2(run: Run, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(name)
    assert code == 2 and err.startswith("hfopt: ") and "Traceback" not in err


def test_what_is_not_text_is_refused_at_once(run: Run, tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(range(256)) * 400)
    code, _, err = run(str(weights))
    assert code == 2 and "is not text" in err and "Traceback" not in err


def test_a_config_that_cannot_be_read_ends_with_2(run: Run, tmp_path: Path) -> None:
    code, _, err = run("-", "--config", str(tmp_path / "none.yaml"), given=OOM.format(total="1.60").encode())
    assert code == 2 and "none.yaml" in err


@pytest.mark.parametrize(
    ("said", "moment", "words"),
    [("backward", "optimizer, the whole model, aten::zeros_like", "took more"), ("optimizer", "forward, layers.2, aten::mm", "took less")],
)
def test_a_replay_that_runs_out_elsewhere_says_so(said: OomPhase, moment: str, words: str) -> None:
    replay = ReplayedOom(device="a card", available_bytes=1, needed_bytes=2, fits=False, batch=1, moment=moment, failed_bytes=None)
    assert [words in note for note in otherwise(said, replay)] == [True]
    assert not list(otherwise("unknown", replay)) and not list(otherwise(said, replace(replay, fits=True)))
    assert not list(otherwise("loss", replace(replay, moment="forward, lm_head, aten::mm")))


@pytest.mark.slow
def test_with_the_config_every_change_fits_and_keeps_the_effective_batch(run: Run, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 8000}
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}))
    config = tmp_path / "train.yaml"
    config.write_text(
        f"model_name_or_path: {model}\ntask: causal_lm\nmax_length: 512\nper_device_train_batch_size: 8\ngradient_accumulation_steps: 2\n"
        "learning_rate: 2.0e-4\nbf16: true\noutput_dir: o\n"
    )
    code, out, err = run("-", "--json", "--config", str(config), given=OOM.format(total="1.00").encode())
    data = json.loads(out)
    assert code == 0, err
    replay = data["replay"]
    assert replay["batch"] == 16 and not replay["fits"] and replay["needed_bytes"] > replay["available_bytes"]
    assert replay["moment"].split(",")[0] in ("forward", "backward") and replay["failed_bytes"] > 0
    assert any("the log's is replayed" in note for note in data["notes"])
    first = data["changes"][0]
    batch, accumulation = (int(part.split(": ")[1]) for part in first["how"].split(", "))
    assert batch * accumulation == 16
    assert all(change["device_bytes"] is None or change["device_bytes"] <= GIB for change in data["changes"])


@pytest.mark.slow
def test_a_smaller_batch_whose_gradients_grow_stands_last(run: Run, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 8000}
    (model / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertForSequenceClassification"], **sizes}))
    config = tmp_path / "train.yaml"
    config.write_text(f"model_name_or_path: {model}\nnum_labels: 2\nmax_seq_length: 512\nper_device_train_batch_size: 16\noutput_dir: o\n")
    code, out, err = run("-", "--json", "--config", str(config), given=OOM.format(total="1.00").encode())
    assert code == 0, err
    changes = json.loads(out)["changes"]
    traded = [change for change in changes if "gradient_accumulation_steps" in change["how"]]
    assert traded and all(change["effect"] == "training" and "hfopt run" in change["what"] for change in traded)
    assert changes[-len(traded) :] == traded and changes[0]["effect"] == "same"
