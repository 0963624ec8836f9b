"""The first evaluation: what is kept, what is written, and how near the prediction is to PyTorch's own allocator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from evaluated_models import LENGTH, MODELS, batch_of

from hfopt.memory.curve import MemoryCurve
from hfopt.memory.evaluation import EvaluationCurve, evaluation_curve
from hfopt.memory.step_memory import estimate
from hfopt.schema import BatchShape, EvaluationSettings, GenerationSettings, Gpu, StepSettings, Workload
from hfopt.units import GIB, MIB

Make = Callable[..., Workload]
LOGITS = 64 * 1000 * 4  # of one sample of the tiny GPT-2

RUN = """
import json, sys, tempfile, torch
from evaluated_models import MODELS, batch_of
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments
case = json.loads(sys.argv[1])
seen = []
class Run(Seq2SeqTrainer):
    def evaluate(self, *args, **kwargs):
        torch.cuda.reset_peak_memory_stats()
        metrics = super().evaluate(*args, **kwargs)
        seen.append(torch.cuda.max_memory_allocated())
        return metrics
arguments = Seq2SeqTrainingArguments(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=case["batch"],
    per_device_eval_batch_size=case["eval_batch"], max_steps=3, eval_strategy="steps", eval_steps=3, optim="adamw_torch", report_to=[],
    save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, remove_unused_columns=False, **case["args"])
Run(model=MODELS[case["model"]](), args=arguments, train_dataset=list(range(3 * case["batch"])), eval_dataset=list(range(case["samples"])),
    data_collator=lambda samples: batch_of(case["model"], len(samples)),
    compute_metrics=(lambda _: {}) if case["metrics"] else None).train()
print("PEAK", seen[0])
"""


@pytest.fixture
def evaluated(tiny_gpt2: Make) -> tuple[MemoryCurve, EvaluationCurve]:
    workload = tiny_gpt2()
    return estimate(workload, StepSettings()).curve, evaluation_curve(workload, StepSettings())


def test_predictions_are_kept_until_they_are_moved(evaluated: tuple[MemoryCurve, EvaluationCurve]) -> None:
    training, curve = evaluated

    def peak(**more: Any) -> int:
        return curve.replay(training, 8, EvaluationSettings(samples=400, **more), 8).allocated_bytes

    nothing, moved, kept = peak(keeps_predictions=False), peak(accumulation_steps=4), peak()
    labels = 64 * 8
    assert kept - moved == pytest.approx(2 * (400 - 32) * (LOGITS + labels), rel=0.02), "the old whole and the new one"
    assert nothing < moved < kept
    assert peak(concatenates=False) < 0.6 * kept, "a list of batches is never copied"
    assert curve.kept_bytes_per_sample(EvaluationSettings(samples=400)) == LOGITS + labels


def test_ranks_gather_each_others_predictions(evaluated: tuple[MemoryCurve, EvaluationCurve]) -> None:
    training, curve = evaluated
    one, two = (curve.replay(training, 8, EvaluationSettings(samples=400, world_size=n), 8).allocated_bytes for n in (1, 2))
    assert two >= one, "each rank holds the predictions of all samples, not of its own"


def test_training_stays_beside_the_evaluation(evaluated: tuple[MemoryCurve, EvaluationCurve]) -> None:
    training, curve = evaluated
    loss_only = EvaluationSettings(samples=8, keeps_predictions=False)
    breakdown = training.peak(8).breakdown
    assert breakdown is not None
    found = curve.replay(training, 8, loss_only, 1).allocated_bytes
    assert found > breakdown.weights_bytes + breakdown.optimizer_bytes, "weights and both states of Adam"
    assert found < training.peak(8).allocated_bytes, "neither gradients nor saved activations"


def test_a_card_too_small_for_the_predictions(evaluated: tuple[MemoryCurve, EvaluationCurve]) -> None:
    training, curve = evaluated
    settings = EvaluationSettings(samples=4000)
    whole = curve.replay(training, 8, settings, 8).allocated_bytes
    assert curve.replay(training, 8, settings, 8, capacity_bytes=whole + 64 * MIB).fits
    assert not curve.replay(training, 8, settings, 8, capacity_bytes=whole - MIB).fits


def test_preprocessed_logits_are_what_is_kept(tiny_gpt2: Make) -> None:
    curve = evaluation_curve(tiny_gpt2(), StepSettings(), preprocess=lambda logits, labels: logits.argmax(-1))
    assert curve.kept_bytes_per_sample(EvaluationSettings(samples=1)) == 2 * 64 * 8, "a token and a label for each position"


def _workload(name: str) -> Workload:
    return Workload(
        name=name,
        model_class=name,
        task="custom",
        build_model=MODELS[name],
        make_batch=partial(batch_of, name),
        shape=BatchShape(kind="text", length=LENGTH),
        parameters=0,
        trainable_parameters=0,
    )


@pytest.mark.slow
def test_longer_texts_and_more_beams_take_more() -> None:
    def written(length: int, beams: int = 1) -> int:
        curve = evaluation_curve(_workload("t5"), StepSettings(), generation=GenerationSettings(max_length=length, beams=beams))
        assert curve.writing is not None
        return curve.writing.at(8)

    width, layers = 4 * 64, 2
    token = 2 * layers * width * 8 * 4
    assert written(364) - written(264) == pytest.approx(100 * token, rel=0.01), "keys and values of each layer"
    assert written(64, beams=4) > 2 * written(64)


CASES = {
    "bert": ("bert", 64, 640, True, {}),
    "bert bf16": ("bert", 64, 640, True, {"bf16": True}),
    "gpt2 loss only": ("gpt2", 32, 320, False, {}),
    "gpt2 metrics bf16": ("gpt2", 32, 320, True, {"bf16": True}),
    "gpt2 moved": ("gpt2", 32, 320, True, {"eval_accumulation_steps": 3}),
    "t5 generates": ("t5", 32, 96, True, {"predict_with_generate": True, "generation_max_length": 32}),
}


@pytest.mark.slow
@pytest.mark.virtual_gpu
@pytest.mark.parametrize("name", CASES)
def test_against_the_allocator(name: str) -> None:
    from hfopt.virtual.environment import environment

    model, eval_batch, samples, metrics, args = CASES[name]
    env = environment(Gpu(name="Virtual", memory_bytes=16 * GIB, capability=(8, 6), sms=28))
    env["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parents[1] / "support"), env["PYTHONPATH"]))
    case = {"model": model, "batch": 16, "eval_batch": eval_batch, "samples": samples, "metrics": metrics, "args": args}
    done = subprocess.run([sys.executable, "-c", RUN, json.dumps(case)], env=env, capture_output=True, text=True, check=True)
    counted = int(done.stdout.rpartition("PEAK")[2])
    workload = _workload(model)
    settings = StepSettings(precision="bf16" if args.get("bf16") else "fp32", capability=(8, 6), multiprocessors=28)
    generation = GenerationSettings(max_length=args["generation_max_length"]) if "generation_max_length" in args else None
    evaluation = EvaluationSettings(
        samples=samples, keeps_predictions=metrics, accumulation_steps=args.get("eval_accumulation_steps"), generation=generation
    )
    curve = evaluation_curve(workload, settings, generation=generation)
    found = curve.replay(estimate(workload, settings).curve, 16, evaluation, eval_batch).allocated_bytes
    assert found == pytest.approx(counted, rel=0.02)
