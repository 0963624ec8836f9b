"""The probe with the real Trainer: heads whose gradients accumulation leaves alone, heads it multiplies, and losses over the batch."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from made_jobs import made_job

from hfopt.compat import transformers_patches
from hfopt.probe import neutrality, step_gradients
from hfopt.probe.neutrality import probe
from hfopt.schema import DataSpec, ModelSpec, TrainJob

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
    "bert": {"model_type": "bert", "architectures": ["BertForSequenceClassification"]},
    "llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "max_position_embeddings": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    },
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hfopt" / "neutrality"


@pytest.fixture
def job_of(tmp_path: Path) -> Callable[..., TrainJob]:
    def make(name: str, job: Mapping[str, Any] | None = None, **model: Any) -> TrainJob:
        path = tmp_path / name / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(CONFIGS[name]))
        spec = ModelSpec(name=str(path), **model)
        return made_job(**{"model": spec, "data": DataSpec(max_length=64), **(job or {})})

    return make


def test_widths_that_must_agree_shrink_alike() -> None:
    assert neutrality.shrink({"hidden_size": 1024, "pooler_hidden_size": 1024}) == {"hidden_size": 32, "pooler_hidden_size": 32}  # DeBERTa
    experts = neutrality.shrink({"num_experts": 128, "num_experts_per_tok": 8})
    assert experts["num_experts_per_tok"] <= experts["num_experts"]


def test_a_language_model_that_counts_its_items_is_neutral(job_of: Callable[..., TrainJob]) -> None:
    answer = probe(job_of("gpt2"))
    assert answer is not None and answer.neutral
    assert answer.ratio == pytest.approx(1, abs=1e-4)
    assert (answer.model_class, answer.transformers_version) == ("GPT2LMHeadModel", transformers.__version__)


def test_a_head_that_ignores_the_count_agrees_with_the_trainers_own_steps(
    job_of: Callable[..., TrainJob], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether this version multiplies the gradients is its own affair; the probe must agree with a plain Trainer, and the fix must hold."""
    answer = probe(job_of("bert"))
    assert answer is not None
    expected = _grad_norm_ratio()
    assert answer.ratio == pytest.approx(expected, rel=0.05)
    assert answer.neutral == (expected == pytest.approx(1, rel=0.05))
    assert answer.neutral or answer.fixable
    assert answer.neutral or "model_accepts_loss_kwargs" in answer.reason
    monkeypatch.setattr(neutrality, "_answer", None)  # what is known is not probed again
    assert probe(job_of("bert")) == answer
    assert len(list(own_cache.iterdir())) == 1


def _grad_norm_ratio() -> float:
    """The same question asked of a plain Trainer, through the gradient norm it logs itself."""
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    rows = [{"input_ids": torch.arange(8) + i, "labels": torch.tensor(i % 3)} for i in range(8)]
    norms = []
    for batch, accumulation in ((8, 1), (2, 4)):
        torch.manual_seed(0)
        logs: list[dict[str, float]] = []

        class Keep(transformers.TrainerCallback):
            def on_log(self, *_: Any, logs: Any = None, kept: list[dict[str, float]] = logs, **__: Any) -> None:
                kept.append(dict(logs))

        with transformers_patches.undisturbed():
            args = transformers.TrainingArguments(
                output_dir="unused", per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=1, optim="sgd",
                max_grad_norm=1e9, use_cpu=True, report_to=[], logging_steps=1, save_strategy="no", disable_tqdm=True,
            )  # fmt: skip
            trainer = transformers.Trainer(
                model=transformers.BertForSequenceClassification(config), args=args, train_dataset=rows, callbacks=[Keep()]
            )
            trainer.train()
        norms.append(next(float(entry["grad_norm"]) for entry in logs if "grad_norm" in entry))
    Path("unused").rmdir()
    return norms[1] / norms[0]


def test_a_loss_over_the_batch_is_not_neutral_and_not_fixable(job_of: Callable[..., TrainJob]) -> None:
    answer = probe(job_of("bert", task="embedding"))
    assert answer is not None
    assert not answer.neutral and not answer.fixable
    assert "contrastive" in answer.reason


def test_the_callers_state_is_left_alone(job_of: Callable[..., TrainJob]) -> None:
    from accelerate.state import PartialState

    PartialState._shared_state["mine"] = 1
    random.seed(5)
    torch.manual_seed(5)
    before = dict(os.environ), random.getstate(), torch.get_rng_state(), transformers.logging.get_verbosity()
    try:
        assert probe(job_of("gpt2")) is not None
        assert PartialState._shared_state.get("mine") == 1
    finally:
        PartialState._shared_state.pop("mine", None)
    assert dict(os.environ) == before[0]
    assert random.getstate() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert transformers.logging.get_verbosity() == before[3]


def test_no_answer_rather_than_a_wrong_one(job_of: Callable[..., TrainJob], monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    def cannot(*_: Any, **__: Any) -> None:
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(step_gradients, "gradient_ratio", cannot)
    assert probe(job_of("gpt2")) is None
    assert not own_cache.exists()


def test_a_broken_cache_entry_is_probed_again(job_of: Callable[..., TrainJob], own_cache: Path) -> None:
    first = probe(job_of("gpt2"))
    (entry,) = own_cache.iterdir()
    entry.write_text("{")
    assert probe(job_of("gpt2")) == first
    assert json.loads(entry.read_text())["model_class"] == "GPT2LMHeadModel"


def test_a_users_own_code_is_not_cached(job_of: Callable[..., TrainJob]) -> None:
    job = job_of("gpt2", trust_remote_code=True)
    from hfopt.model.from_config import from_spec

    workload = from_spec(replace(job.model, trust_remote_code=False), job.data)
    assert neutrality._cached_at(job, workload, "5.0") is None
    assert neutrality._cached_at(job_of("gpt2"), workload, "5.0") is not None


@pytest.mark.parametrize("trainer", ["DPO", "Reward"])
def test_pairs_stay_together_without_trl(trainer: Any, job_of: Callable[..., TrainJob]) -> None:
    """LLaMA-Factory's own trainers: a mean over pairs, divided by the accumulation."""
    answer = probe(job_of("llama", {"trainer": trainer, "data": DataSpec(max_length=16)}, task="causal_lm"))
    assert answer is not None and answer.neutral, answer


@pytest.mark.parametrize(
    ("trainer", "arguments"),
    [("SFT", {}), ("DPO", {"loss_type": "ipo"}), ("Reward", {}), ("GRPO", {"num_generations": 2}), ("CPO", {"loss_type": "simpo"})],
)
def test_trl_s_own_losses_are_neutral_with_trl_s_own_scaling(
    trainer: Any, arguments: dict[str, Any], job_of: Callable[..., TrainJob]
) -> None:
    pytest.importorskip("trl", reason="TRL is not installed: its 1.0 asks for a newer transformers than the oldest here")
    answer = probe(job_of("llama", {"trainer": trainer, "raw": arguments, "data": DataSpec(max_length=16), "uses_trl": True}))
    assert answer is not None and answer.neutral, answer
    assert answer.ratio == pytest.approx(1.0, abs=1e-4)
