"""Evaluation that runs out of memory gives the same metrics, and training does not notice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer

import hfopt


def metrics(prediction: Any) -> dict[str, float]:
    labels = prediction.label_ids
    predicted = prediction.predictions.argmax(-1)
    return {"accuracy": float((predicted == labels)[labels != -100].mean()), "spread": float(np.asarray(prediction.predictions).std())}


class MeanOverSamples(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses = torch.nn.functional.cross_entropy(outputs.logits.transpose(1, 2), labels, reduction="none")
        kept = labels.ne(-100)
        loss = ((losses * kept).sum(1) / kept.sum(1)).mean()
        return (loss, {"loss": loss, "logits": outputs.logits}) if return_outputs else loss


def fails_above(most: int, layer: torch.nn.Module) -> list[int]:
    seen: list[int] = []

    def hook(module: Any, args: Any, output: Any) -> None:
        hidden = output if torch.is_tensor(output) else output[0]
        if not torch.is_grad_enabled() and hidden.shape[0] > most:
            seen.append(hidden.shape[0])
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    hook.__module__ = "torch"  # an instrument: what it counts is nothing that a script keeps
    layer.register_forward_hook(hook)
    return seen


@pytest.mark.parametrize(
    "run",
    [{"task": "causal"}, {"task": "token"}, {"task": "sequence"}, {"task": "image"}, {"task": "token", "kind": MeanOverSamples}],
    ids=["causal", "token", "sequence", "image", "custom"],
)
def test_the_metrics_are_the_same(lab: Any, layer_of: Any, run: dict[str, Any]) -> None:
    settings = {
        **run,
        "per_device_eval_batch_size": 12,
        "max_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "label_names": ["labels"],
    }

    def trainer() -> Any:
        held_out = type(lab.trainer(**run).train_dataset)(run["task"], count=30)  # batches of 12, 12 and 6
        return lab.trainer(**settings, eval_dataset=held_out, compute_metrics=metrics)

    undisturbed, protected = trainer(), hfopt.protect(trainer())
    undisturbed.train()
    seen = fails_above(3, layer_of(protected.model))
    protected.train()
    assert seen[:2] == [12, 6], "once per size"
    assert len(seen) == 2
    for mine, theirs in zip(protected.state.log_history, undisturbed.state.log_history, strict=True):
        compared = {"eval_loss", "eval_accuracy", "eval_spread", "loss"} & theirs.keys()
        assert {key: mine[key] for key in compared} == pytest.approx({key: theirs[key] for key in compared}, rel=2e-6)
    assert any("eval_loss" in row for row in protected.state.log_history)
    assert protected.predict(protected.eval_dataset).predictions == pytest.approx(undisturbed.predict(undisturbed.eval_dataset).predictions)


def test_one_sample_that_does_not_fit_is_the_users_error(lab: Any, layer_of: Any) -> None:
    protected = hfopt.protect(lab.trainer("causal", per_device_eval_batch_size=2, eval_dataset=lab.trainer("causal").train_dataset))
    seen = fails_above(0, layer_of(protected.model))
    with pytest.raises(torch.OutOfMemoryError):
        protected.evaluate()
    assert seen[0] == 2
    assert seen[-1] == 1


def test_a_bug_in_evaluation_is_the_users_own(lab: Any, layer_of: Any) -> None:
    protected = hfopt.protect(lab.trainer("causal", eval_dataset=lab.trainer("causal").train_dataset))

    def bug(*_: Any) -> None:
        raise RuntimeError("shape mismatch")

    layer_of(protected.model).register_forward_hook(bug)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        protected.evaluate()
