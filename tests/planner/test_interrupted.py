"""A first answer by counting, before anything is imported; Ctrl-C keeps the best answer so far, and says that it is one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_jobs import made_job

from hfopt.cli.output import print_error
from hfopt.errors import NothingFits
from hfopt.hardware.detect import named
from hfopt.memory import trace_store
from hfopt.memory.counted_step import first_answer
from hfopt.planner import Request, plan
from hfopt.schema import DataSpec, Lora, ModelSpec


def test_what_was_traced_by_then_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 192, "vocab_size": 500}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertForSequenceClassification"], **sizes}))
    config = tmp_path / "train.yaml"
    lines = "output_dir: o\nmax_seq_length: 64\nper_device_train_batch_size: 8\ngradient_accumulation_steps: 4\n"
    config.write_text(f"model_name_or_path: {tmp_path}\n{lines}")
    traced, calls = trace_store.estimate, []

    def interrupted(*asked: Any) -> Any:
        calls.append(asked)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return traced(*asked)

    monkeypatch.setattr(trace_store, "estimate", interrupted)
    said: list[str] = []
    made = plan(config, Request(gpu="rtx 3070", dry_run=False), progress=said.append)
    assert len(calls) == 2
    assert made.candidate.precision in ("fp32", "tf32") and "interrupted" in made.facts.warnings[-1]
    assert any("trace 2 of at most" in line for line in said)
    monkeypatch.setattr(trace_store, "estimate", lambda *asked: interrupted(*asked))
    with pytest.raises(KeyboardInterrupt):  # nothing was traced: there is no answer to keep
        plan(config, Request(gpu="rtx 3070", dry_run=False))


def test_nothing_fits_is_said_before_what_would_is_priced(capsys: pytest.CaptureFixture[str]) -> None:
    def priced() -> str:
        assert "nothing fits" in capsys.readouterr().err
        raise KeyboardInterrupt

    print_error(NothingFits("nothing fits: 112 GiB", what_would=priced))
    assert "interrupted" in capsys.readouterr().err


def first(gpu: str, batch: int = 1, length: int | None = None, **changes: Any) -> str:
    """The verdict and its words."""
    model = ModelSpec(**{"name": "meta-llama/Llama-3.1-8B", "weights_dtype": "bfloat16", **changes})
    data = DataSpec(max_length=length)
    job = made_job(path="c.yaml", section=(), trainer="Trainer", raw={}, model=model, data=data, per_device_batch=batch, accumulation=1)
    found = first_answer(job, named(gpu), 0.06)
    assert found is not None
    return f"{found.verdict}: {found.words}"


def test_what_cannot_fit_what_must_and_what_is_open_is_known_by_counting() -> None:
    assert first("rtx 4090").startswith("impossible: Cannot fit as it is: at least 59.83 GiB")
    assert first("h200").startswith("open")
    assert first("rtx 4090", lora=Lora()) == "open: Open: at least 14.96 GiB (weights), 22.19 GiB usable; tracing the rest"
    assert first("rtx 3070", lora=Lora()).startswith("impossible") and "traced now" in first("rtx 4090", name="somebody/unknown")
    bert = {"name": "bert-base-uncased", "weights_dtype": None}
    assert first("rtx 4090", batch=8, length=128, **bert).startswith("fits: Certainly fits: at most")
    assert first("rtx 4090", batch=512, length=512, **bert).startswith("open") and first("rtx 4090", **bert).startswith("open")


def test_what_cannot_fit_is_answered_and_priced_without_torch(tmp_path: Path) -> None:
    config = tmp_path / "train.yaml"
    stated = "model_name_or_path: meta-llama/Llama-3.1-8B\ntorch_dtype: bfloat16\ntask: causal-lm\nmax_seq_length: 1024\n"
    config.write_text(f"{stated}output_dir: o\nbf16: true\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 16\n")
    words = [sys.executable, "-X", "importtime", "-m", "hfopt", "plan", str(config), "--gpu", "rtx 4090"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines() if line.startswith("import time")}
    assert ended.returncode == 3 and "numpy" in imported and not imported & {"torch", "transformers"}
    for remedy in ("ZeRO-2", "ZeRO-3", "sharding over 8 such cards", "a card with more memory", "- LoRA", "- QLoRA"):
        assert remedy in ended.stderr
    assert "about 63." in ended.stderr and "samples/s" in ended.stderr


MISTAKES = {
    "no model": ("output_dir: o\nper_device_train_batch_size: 8\n", "which model is trained is not stated"),
    "a missing folder": ("model_name_or_path: ./nowhere\noutput_dir: o\nper_device_train_batch_size: 8\n", "unknown model './nowhere'"),
    "a text for a number": ("model_name_or_path: bert-base-uncased\nper_device_train_batch_size: eight\n", "a whole number is needed"),
    "two precisions": ("model_name_or_path: bert-base-uncased\noutput_dir: o\nfp16: true\nbf16: true\n", "both true"),
    "an unknown optimizer": ("model_name_or_path: bert-base-uncased\noutput_dir: o\noptim: adamwx\n", "does not know"),
    "no YAML": ("model_name_or_path: [bert\noutput_dir: o\n", "not valid YAML"),
}
REFUSED = """
import sys
from hfopt.errors import HfoptError
from hfopt.planner import Request, plan
for path in sys.argv[1:]:
    try:
        plan(path, Request(gpu="rtx 3070", dry_run=False))
    except HfoptError as error:
        print(str(error).replace("\\n", " "))
print({"torch", "transformers"} & sys.modules.keys())
"""


def test_a_mistake_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    for name, (text, _) in MISTAKES.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    words = [sys.executable, "-c", REFUSED, *(str(tmp_path / f"{name}.yaml") for name in MISTAKES), str(tmp_path / "missing.yaml")]
    *said, imported = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path).stdout.splitlines()
    assert imported == "set()" and len(said) == len(MISTAKES) + 1 and "no such file" in said[-1]
    assert all(sentence in line for line, (_, sentence) in zip(said, MISTAKES.values(), strict=False)), said
