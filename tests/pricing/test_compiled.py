"""`torch_compile` in a plan: where it can be looked at, what is said where it cannot, and its cost over the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from hfopt.errors import DryRunError
from hfopt.job.request import Request
from hfopt.job.subject import Subject, from_file
from hfopt.planner import plan
from hfopt.planner.choices import compile_choices
from hfopt.pricing import compiled
from hfopt.pricing.candidate_prices import Pricing
from hfopt.pricing.compiled import (
    compile_assumed,
    compile_note,
    compile_reason,
    compiler_of,
    over_the_run,
    run_steps,
    uncollected_note,
    why_not_compiled,
)
from hfopt.probe.compiled_step import PLANNED_AS
from hfopt.schema import Candidate, CompiledStep, Gpu, MemoryPeak, StepSettings, StepTime
from hfopt.speed.step_time import RankTraffic
from hfopt.units import GIB, MIB

CARD = Gpu(name="card", vendor="nvidia", memory_bytes=24 * GIB, capability=(8, 6), sms=28)
STEP = CompiledStep(compile_s=100.0, graphs=2, graph_breaks=0, kernels=20, launches=60, eager_launches=100)
ALLOWED = frozenset({"torch_compile"})


def time(step_s: float) -> StepTime:
    return StepTime(step_s=step_s, busy_s=step_s, samples_per_s=8 / step_s, tokens_per_s=None, mfu=0.5, bound="bandwidth", shares={})


def subject(folder: Path, more: str = "") -> Subject:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    facts = '"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64'
    (model / "config.json").write_text("{" + facts + ', "vocab_size": 50, "architectures": ["BertForSequenceClassification"]}')
    path = folder / "train.yaml"
    path.write_text(f"model_name_or_path: {model}\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n{more}")
    return from_file(path, Request(gpu="rtx 3090"))


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if everything were installed."""
    monkeypatch.setattr(compiled, "why_not", lambda gpu: None)


def test_it_is_offered_only_where_it_is_allowed_and_can_be_looked_at(tmp_path: Path, tools: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = subject(tmp_path)
    assert compile_choices(made, frozenset(), CARD).values == (False,)
    assert compile_choices(made, ALLOWED, CARD).values == (False, True)
    monkeypatch.setattr(compiled, "why_not", lambda gpu: "there is no Triton")
    offer = compile_choices(made, ALLOWED, CARD)
    assert offer.values == (False,) and offer.note == "torch_compile was not tried: there is no Triton"


def test_what_cannot_be_compiled_is_said_in_one_sentence(tmp_path: Path, tools: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_note(subject(tmp_path, "torch_compile: true\n"), CARD) == ()
    (said,) = compile_note(subject(tmp_path, "torch_compile_backend: aot_eager\n"), CARD)
    assert "aot_eager is not Inductor" in said and "by a rule" in said
    (said,) = compile_note(subject(tmp_path, "torch_compile_mode: max-autotune\n"), CARD)
    assert said.startswith("torch_compile_mode: max-autotune is planned as reduce-overhead"), "it has CUDA graphs too"
    (said,) = compile_note(subject(tmp_path, "torch_compile_mode: max-autotune-no-cudagraphs\n"), CARD)
    assert said.startswith("torch_compile_mode: max-autotune-no-cudagraphs is planned as default")
    several = subject(tmp_path, "torch_compile: true\n")
    several = replace(several, job=replace(several.job, world_size=2))
    assert "several devices" in (why_not_compiled(several, CARD) or "")
    assert why_not_compiled(replace(several, trainer=cast(Any, object())), CARD) == "a live model is not compiled for a plan"
    monkeypatch.undo()
    assert compiler_of(subject(tmp_path), None) is None, "a CPU has no virtual GPU"


def test_a_model_that_cannot_be_compiled_keeps_its_eager_figures(tmp_path: Path, tools: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise DryRunError("Unsupported: a strange call")

    monkeypatch.setattr(compiled, "compiled_step", fails)
    made = subject(tmp_path)
    compile_step = compiler_of(made, CARD)
    assert compile_step is not None
    from hfopt.memory.step_memory import Estimate

    eager = Estimate(curve=cast(Any, "a curve"), ops=(), seconds=1.0, notes=("a note",))
    found = compile_step(replace(made.workload, key=None), StepSettings(torch_compile=True), eager)
    assert found.curve == "a curve" and found.compiled is None
    assert found.notes[1].startswith(compiled.UNCOMPILED)
    assert found.notes[0] == "a note" and found.notes[1].endswith("(Unsupported: a strange call)")


@pytest.mark.parametrize(
    ("more", "steps"),
    [("max_steps: 500\n", 500.0), ("num_train_epochs: 2\ntrain_samples: 80\n", 20.0), ("num_train_epochs: 2\n", None)],
)
def test_the_length_of_the_run(tmp_path: Path, more: str, steps: float | None) -> None:
    made = subject(tmp_path, more)
    if "train_samples" in more:
        made = replace(made, job=replace(made.job, data=replace(made.job.data, samples=80)))
    assert run_steps(made) == steps


def test_compiling_is_spread_over_the_run() -> None:
    spread = over_the_run(time(0.5), STEP, 100)
    assert spread.step_s == pytest.approx(1.5) and spread.samples_per_s == pytest.approx(8 / 1.5) and spread.mfu == pytest.approx(0.5 / 3)
    assert over_the_run(time(0.5), STEP, None) == time(0.5)


def test_the_reason_says_when_it_has_paid_for_itself() -> None:
    said = compile_reason(STEP, time(1.0), time(0.6), 1000)
    assert "600.0 ms a step instead of 1.0 s" in said and "are in it" in said and "after 200 steps" in said
    assert "the length of the run is unknown" in compile_reason(STEP, time(1.0), time(0.6), None)
    assert "paid" not in compile_reason(STEP, time(1.0), time(1.2), None)
    assert compile_reason(None, time(1.0), time(1.0), None).endswith("allowed by --allow torch_compile")


def test_what_a_run_may_be_without_is_said_where_it_is_much() -> None:
    peak = MemoryPeak(batch=8, allocated_bytes=1000 * MIB, reserved_bytes=1200 * MIB, context_bytes=0)
    held = replace(STEP, uncollected=(20.0 * MIB, 10.0 * MIB))
    (said,) = uncollected_note(held, 8, peak)
    assert "100 MiB of the memory" in said and "garbage collector" in said
    assert uncollected_note(STEP, 8, peak) == uncollected_note(None, 8, peak) == ()
    assert uncollected_note(replace(STEP, uncollected=(10.0 * MIB, 0.0)), 8, peak) == (), "a hundredth is not much"


def test_what_compiled_figures_rest_on_is_said_before_them() -> None:
    guess = compile_assumed(None)
    assert guess.guessed and guess.value == "with the eager step's memory"
    known = compile_assumed(replace(STEP, mode="reduce-overhead"))
    assert not known.guessed and known.value is not None
    assert known.value.startswith("(reduce-overhead) as compiled on the virtual GPU") and "not compared with a card" in known.value


def test_a_candidate_is_compiled_only_where_something_can_compile_it(tmp_path: Path) -> None:
    base = StepSettings(compile_mode="reduce-overhead")
    workload, nothing = subject(tmp_path).workload, cast(Any, None)
    pricing = Pricing(workload=workload, base=base, speed=None, budget_bytes=GIB, ranks=RankTraffic(), estimator=nothing)
    plain = Candidate(per_device_batch=4, accumulation=1, precision="bf16")
    asked = replace(plain, torch_compile=True)
    assert not pricing.settings(asked).torch_compile
    able = replace(pricing, compiler=cast(Any, lambda *_: None))
    planned = {mode: replace(able, base=StepSettings(compile_mode=mode)).settings(asked).compile_mode for mode in PLANNED_AS}
    assert planned == PLANNED_AS and PLANNED_AS["max-autotune"] == "reduce-overhead"
    assert able.settings(asked).torch_compile and able.settings(asked).compile_mode == "reduce-overhead"
    assert not able.settings(plain).torch_compile and able.settings(plain).compile_mode == "default"
    assert able.bound_s(asked) == 0.0, "nothing is known before its eager step is traced"


@pytest.mark.slow
def test_a_plan_compiles_what_can_win_and_not_what_only_takes_longer(tmp_path: Path, tools: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each compile takes a minute or more; checkpointed and float32 steps were compiled too, and before the one that won."""
    made = []

    def compiles(job: object, card: object, workload: object, settings: StepSettings, eager: Any) -> Any:
        made.append((settings.precision, settings.checkpointing.on))
        fewer = tuple(op for op in eager.ops if op.kind in ("matmul", "attention") or op.phase == "optimizer")
        return replace(eager, ops=fewer, compiled=replace(STEP, compile_s=1.0, uncollected=(0.0, 16.0 * MIB)))

    monkeypatch.setattr(compiled, "compiled_step", compiles)
    subject(tmp_path, "bf16: true\nmax_steps: 100000\nmax_seq_length: 256\n")
    wide = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}  # bound by its products, not by launches
    facts = tmp_path / "model" / "config.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | wide))
    found = plan(tmp_path / "train.yaml", Request(gpu="rtx 3090", allow=ALLOWED, dry_run=False))
    assert found.candidate.torch_compile
    assert set(made) == {("bf16", False)}
    told = found.to_json()
    assert any(one["what"] == "torch_compile" and "not compared with a card" in one["value"] for one in told["assumed"])
    assert any("64 MiB of the memory" in warning for warning in told["warnings"])
