"""An OOM in evaluation shrinks the evaluation batch only: the same predictions, computed in pieces."""

from __future__ import annotations

import functools
from typing import Any

from hfopt.runtime import chunks, device, exactness, oom, record
from hfopt.runtime.replan import next_size
from hfopt.schema import OomSeen, ReplanStep


class _Evaluation:
    def __init__(self, trainer: Any, guard: Any) -> None:
        self.trainer = trainer
        self.guard = guard
        self.original = trainer.prediction_step
        self.size: int | None = None  # kept to the end: evaluation memory does not change from one batch to the next by itself

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None, **more: Any) -> Any:
        size = self.guard.pieces.size(inputs)
        while True:
            try:
                if self.size is None or size is None or size <= self.size:
                    return self.original(model, inputs, prediction_loss_only, ignore_keys=ignore_keys, **more)
                return self._in_pieces(model, inputs, size, prediction_loss_only, ignore_keys=ignore_keys, **more)
            except oom.RAISED_AS as error:
                known = oom.recognise(error)
                piece = min(self.size or size or 1, size or 1)
                if known is None or piece == 1 or size is None or chunks.why_not(inputs, size) is not None:
                    raise
                now = device.read(self.trainer.args.device)
                seen = OomSeen(
                    phase="evaluation",
                    step=self.trainer.state.global_step,
                    micro_batch=piece,
                    allocated_bytes=now.allocated_bytes,
                    reserved_bytes=now.reserved_bytes,
                    requested_bytes=known.requested_bytes,
                    capacity_bytes=now.capacity_bytes,
                )
            self._step_down(seen)

    def _step_down(self, seen: OomSeen) -> None:
        device.clear(self.trainer.args.device)
        fit = self.guard.fit
        candidate = fit.candidate(seen.micro_batch)
        self.size, reason = next_size(candidate, seen)
        step = ReplanStep(action="chunk", candidate=fit.candidate(self.size), reason=reason)
        record.tell(record.sentence(seen, step, fit.effective_batch))
        fit.log(record.entry(seen, step, fit.effective_batch))

    def _in_pieces(self, model: Any, inputs: Any, size: int, prediction_loss_only: bool, **more: Any) -> Any:
        from transformers.trainer_pt_utils import nested_concat

        assert self.size is not None
        parts = chunks.split(inputs, size, self.size)
        sizes = [min(self.size, size - start) for start in range(0, size, self.size)]
        shares = exactness.weights("counted", parts, sizes, self.guard.pieces.loss_shape(inputs))
        results = [self.original(model, part, prediction_loss_only, **more) for part, share in zip(parts, shares, strict=True)]
        losses = [result[0] * share for result, share in zip(results, shares, strict=True) if result[0] is not None and share]
        loss = sum(losses[1:], losses[0]) if losses else None
        joined: list[Any] = []
        for column in (1, 2):
            values = [result[column] for result in results]
            joined.append(None if any(value is None for value in values) else functools.reduce(nested_concat, values))
        return (loss, *joined)


def protected(trainer: Any, guard: Any) -> Any:
    return _Evaluation(trainer, guard).prediction_step
