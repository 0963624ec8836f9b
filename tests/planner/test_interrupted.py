"""A first answer by counting, before anything is imported; Ctrl-C keeps the best answer so far, and says that it is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_jobs import made_job

from hfopt.cli.output import print_error
from hfopt.errors import NothingFits
from hfopt.hardware.detect import named
from hfopt.memory import trace_store
from hfopt.planner import Request, plan
from hfopt.planner.nothing_fits import first_answer
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


def first(gpu: str, **changes: Any) -> str | None:
    model = ModelSpec(**{"name": "meta-llama/Llama-3.1-8B", "weights_dtype": "bfloat16", **changes})
    job = made_job(path="c.yaml", section=(), trainer="Trainer", raw={}, model=model, data=DataSpec(), per_device_batch=1, accumulation=1)
    return first_answer(job, named(gpu), 0.06)


def test_what_cannot_fit_is_known_by_counting() -> None:
    said = first("rtx 4090")
    assert said is not None and "8.0 billion parameters take 59" in said and "RTX 4090" in said
    assert first("h200") is None
    assert first("rtx 4090", lora=Lora()) is None
    assert first("rtx 4090", name="somebody/unknown") is None
    assert first("rtx 4090", name="bert-base-uncased", weights_dtype=None) is None
