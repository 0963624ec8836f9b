"""Memory of an evaluation during training: its out-of-memory error comes at the first evaluation, hours in, when nobody looks.

The Trainer's evaluation_loop runs the model without gradients beside weights and optimizer state. With metrics to compute, every batch's
logits stay on the card, concatenated, until `eval_accumulation_steps` batches are done and they move to the host; without that
setting until the end. At the last concatenation the old and the new tensor exist together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hfopt.memory.allocator import parse_alloc_conf
from hfopt.memory.curve import MemoryCurve
from hfopt.memory.step_memory import TRACED_BATCHES, context_bytes
from hfopt.memory.timeline import combine
from hfopt.schema import StepSettings, Workload
from hfopt.trace.cuda_allocations import Kernels
from hfopt.trace.tracer import Tracer, TraceSession, prepared
from hfopt.trace.trainer_step import TrainerLoop


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSettings:
    """How the Trainer evaluates. keeps_logits: compute_metrics is set and prediction_loss_only is not."""

    batches: int
    keeps_logits: bool = True
    accumulation_steps: int | None = None

    @property
    def kept_batches(self) -> int:
        if not self.keeps_logits:
            return 0
        return min(self.batches, self.accumulation_steps or self.batches)


def evaluation_curve(workload: Workload, settings: StepSettings, evaluation: EvaluationSettings) -> MemoryCurve:
    """Peak memory of training and one evaluation, over the evaluation's batch size (training runs at the same one)."""
    kernels = Kernels(capability=settings.capability, multiprocessors=settings.multiprocessors)
    tracer = Tracer(prepared(workload, settings), workload.make_batch, kernels)
    script = _script(settings, workload.compute_loss, evaluation)
    timeline = combine(*(tracer.record(script, batch) for batch in TRACED_BATCHES))
    context = context_bytes(settings.capability, multiprocessors=settings.multiprocessors)
    return MemoryCurve(timeline, context, options=parse_alloc_conf(settings.allocator))


def _script(settings: StepSettings, compute_loss: Any, evaluation: EvaluationSettings) -> Callable[[TraceSession], None]:
    def script(session: TraceSession) -> None:
        loop = TrainerLoop(session, settings, compute_loss)
        optimizer = loop.run(1)
        session.recorder.mark("evaluation")
        session.model.eval()
        with torch.no_grad(), session.phase("evaluation"):
            _evaluate(session, loop, evaluation)
        session.model.train()
        del optimizer

    return script


def _evaluate(session: TraceSession, loop: TrainerLoop, evaluation: EvaluationSettings) -> None:
    kept = None
    for number in range(min(evaluation.batches, 2)):
        inputs = session.to_device()
        outputs = loop.forward(inputs)
        logits = outputs.get("logits") if isinstance(outputs, dict) else outputs[-1]
        if not isinstance(logits, torch.Tensor) or not evaluation.kept_batches:
            continue
        if number == 0:
            before = max(evaluation.kept_batches - 2, 0)  # all but the last two batches, as the one tensor they have become
            kept = torch.cat([logits] * before) if before else None
        kept = logits if kept is None else torch.cat((kept, logits))
        session.recorder.classify([kept], "logits")
