"""The order of the candidates: predicted time per effective batch; where two are as good as equal, the one that risks less.

Times within `TIE` of the group's best are equal: no roofline is finer than that. Among equals: fewer accumulation steps (and with them
the batch is said), no checkpointing, the checkpointing and the precision the user has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hfopt.schema import Candidate, StepTime, TimeModel

TIE = 0.02  # ratios between settings are met to 3 % in the median (benchmarks/speed_accuracy.py): less than that decides nothing


def rank(candidates: Iterable[Candidate], time: TimeModel, *, current: Candidate | None = None) -> tuple[tuple[Candidate, StepTime], ...]:
    """Fastest first. All candidates share the effective batch, so the time of their optimizer step compares them."""
    priced = sorted(
        ((candidate, time(candidate)) for candidate in candidates), key=lambda pair: (pair[1].step_s, _preference(pair[0], current))
    )
    ordered: list[tuple[Candidate, StepTime]] = []
    start = 0
    while start < len(priced):
        end = start
        while end < len(priced) and priced[end][1].step_s <= priced[start][1].step_s * (1 + TIE):
            end += 1
        ordered.extend(sorted(priced[start:end], key=lambda pair: _preference(pair[0], current)))
        start = end
    return tuple(ordered)


def _preference(candidate: Candidate, current: Candidate | None) -> tuple[object, ...]:
    extras: Sequence[bool] = (
        candidate.torch_compile,
        candidate.use_liger_kernel,
        candidate.optim is not None,
        candidate.attn_implementation is not None,
    )
    return (
        sum(extras),
        candidate.accumulation,
        candidate.checkpointing.on,
        current is not None and candidate.checkpointing != current.checkpointing,
        current is not None and candidate.precision != current.precision,
        candidate.checkpointing.every_n_layers,
        candidate.precision,
    )
