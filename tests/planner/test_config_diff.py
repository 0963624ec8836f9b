"""What a change of a config does on each card, in words and figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hfopt.cli import application
from hfopt.planner import Request
from hfopt.planner.plan_diff import AsWritten, CardDiff, diff_configs
from hfopt.units import GIB

MODEL = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 500,
}


def side(gib: float, rate: float, *, fits: bool = True) -> AsWritten:
    return AsWritten(device_bytes=int(gib * GIB), budget_bytes=int(20 * GIB), fits=fits, samples_per_s=rate, effective_batch=8)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (side(17, 100), side(20.1, 92, fits=False), "L4: +3.10 GiB (17.00 GiB → 20.10 GiB), no longer fits, 8.0 % slower"),
        (side(17, 100), side(16, 150), "L4: -1.00 GiB (17.00 GiB → 16.00 GiB), fits, 50.0 % faster (100 → 150 samples/s)"),
        (side(17, 100), side(17, 100.1), "L4: the same memory (17.00 GiB), fits, as fast (100 samples/s)"),
        (side(30, 100, fits=False), side(17, 103), "fits now, 3.0 % faster (100 → 103 samples/s, cannot be told apart)"),
        (side(30, 100, fits=False), side(31, 10, fits=False), "fits neither way, 90.0 % slower"),
    ],
)
def test_words_of_a_card(first: AsWritten, second: AsWritten, words: str) -> None:
    assert words in CardDiff(card="L4", first=first, second=second).words


@pytest.fixture
def configs(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    text = f"model_name_or_path: {tmp_path}\nmax_seq_length: 32\noutput_dir: out\nper_device_train_batch_size: 4\n"
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text(text)
    second.write_text(text.replace("size: 4", "size: 64") + "bf16: true\n")
    return first, second


def test_two_configs_on_two_cards(configs: tuple[Path, Path]) -> None:
    found = diff_configs(*configs, ["t4", "rtx 4090"], Request(dry_run=False))
    assert {key: (old, new) for key, old, new in found.keys} == {"per_device_train_batch_size": (4, 64), "bf16": (None, True)}
    assert found.effective_batches == (4, 64) and [one.card for one in found.cards] == ["Tesla T4", "GeForce RTX 4090"]
    for one in found.cards:
        assert one.second.device_bytes > one.first.device_bytes and one.first.fits and one.second.fits
        assert one.second.samples_per_s > one.first.samples_per_s


def test_the_command(configs: tuple[Path, Path]) -> None:
    first, second = configs
    result = CliRunner().invoke(application(["diff"]), ["diff", str(first), str(second), "--gpus", "l4", "--fail"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "per_device_train_batch_size: 4 → 64" in lines and "bf16: unset → true" in lines
    assert "effective batch: 4 → 64: this trains something else" in lines and any(line.startswith("L4: +") for line in lines)
    data = json.loads(CliRunner().invoke(application(["diff"]), ["diff", str(first), str(first), "--gpus", "l4", "--json"]).stdout)
    assert data["keys"] == [] and data["cards"][0]["first"] == data["cards"][0]["second"]
    tight = CliRunner().invoke(application(["diff"]), ["diff", str(first), str(second), "--gpus", "nosuch"])
    assert tight.exit_code != 0
