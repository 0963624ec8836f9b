"""Code that reads tensors on the host goes on in a trace: lists of scalars, matchings, cached answers, unknown numbers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from hfopt.schema import BatchShape, StepSettings, Workload
from hfopt.trace.tracer import tracer_of
from hfopt.trace.trainer_step import trainer_script

SETTINGS = StepSettings(capability=(8, 6), multiprocessors=28)
seen: dict[str, list[Any]] = {}


class _Positions(nn.Module):
    @staticmethod
    @functools.lru_cache(maxsize=4)
    def made(length: int) -> torch.Tensor:
        seen.setdefault("made", []).append(length)
        return torch.ones(length)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.made(x.shape[-1])


class _Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.positions = nn.Linear(8, 8), _Positions()

    def forward(self, x: torch.Tensor, sizes: torch.Tensor, labels: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        seen.setdefault("list", []).append(torch.tensor([sizes.max(), sizes.sum()]).tolist())
        real = (x == 0.0).sum(dim=-1) != x.shape[-1]
        y = self.positions(self.line(x[real]))
        seen.setdefault("kept", []).append(y.shape[0])
        low, high = y.min(-1).values, y.max(-1).values
        if not (high >= low).all():
            raise ValueError("out of order")
        rows = torch.nonzero(torch.ones(3, 4) * torch.tensor([1.0, 0.0, 1.0, 0.0]))
        seen.setdefault("rows", []).append(tuple(rows.shape))
        return {"loss": y.sum() + labels[0]["boxes"].sum()}


def _batch(samples: int) -> dict[str, Any]:
    return {
        "x": torch.ones(samples, 8),
        "sizes": torch.arange(samples),
        "labels": [{"boxes": torch.ones(2, 4)} for _ in range(samples)],
    }


def test_what_a_model_reads() -> None:
    seen.clear()
    workload = Workload(
        name="reading",
        model_class="_Reading",
        task="custom",
        build_model=_Reading,
        make_batch=_batch,
        shape=BatchShape(kind="custom"),
        compute_loss=lambda model, batch: model(**batch)["loss"],
        parameters=72,
        trainable_parameters=72,
    )
    with tracer_of(workload, SETTINGS) as tracer:
        traces = [tracer.record(trainer_script(SETTINGS, workload.compute_loss), samples) for samples in (3, 3)]
    assert seen["list"][0] == [2, 3], "0 + 1 + 2, and the largest of them"
    assert set(seen["kept"]) == {3}, "numbers that are not known are not zero"
    assert set(seen["rows"]) == {(6, 2)}
    assert len(seen["made"]) == len(traces), "each trace makes a cached tensor anew, once"
    assert traces[0].events == traces[1].events
    assert _Positions.made.cache_info().currsize == 0, "no fake tensor is left for a real run"
