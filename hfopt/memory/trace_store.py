"""Steps and evaluations by workload and settings: from memory, from the disk, else traced now and kept.

A trace is kept without the card it was made for. What depends on the card is put back when it is read: the context, the multiprocessors
that a reduction splits over, cuBLAS's workspace; and a kernel that was chosen by the card's capability is a condition of the entry
(`trace.events.answers_noted`), so a trace made for one card answers for every other that chooses alike, to the byte. A curve that is not a
timeline (a line through two peaks, a model that loops over its samples) answers for its own card only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any

from hfopt.memory.allocator import AllocatorOptions, parse_alloc_conf
from hfopt.memory.counted_step import counted_parameters
from hfopt.memory.curve import MemoryCurve
from hfopt.memory.evaluation import AffineBytes, EvaluationCurve, WritingBytes
from hfopt.memory.layer_extrapolation import DepthCurve, RoughStep
from hfopt.memory.per_sample import PerSampleTimeline, SampleMatch
from hfopt.memory.phase_curve import PhaseCurve
from hfopt.memory.real_steps import Growth, VaryingLengths
from hfopt.memory.step_memory import Estimate, ParameterCount, TrainedTensors, context_bytes, counted, estimate
from hfopt.memory.timeline import AffineFormula, BatchInputs, Timeline
from hfopt.model.stored_workload import whole
from hfopt.schema import CompiledStep, GenerationSettings, LengthSpread, OpCost, StepSettings, Workload
from hfopt.store import NotPlainError, Store, default_store, from_json, to_json
from hfopt.trace.events import Formula, Kernels, Trace, Where, answers_alike, answers_noted, of_card

_CLASSES = (
    *(Estimate, MemoryCurve, DepthCurve, VaryingLengths, Growth, Timeline, PerSampleTimeline, SampleMatch, AffineFormula, LengthSpread),
    *(Trace, Where, Formula, OpCost, AllocatorOptions, EvaluationCurve, AffineBytes, WritingBytes, GenerationSettings),
    *(RoughStep, ParameterCount, TrainedTensors, BatchInputs, CompiledStep, PhaseCurve),
)
_nothing: Callable[[], None] = lambda: None  # noqa: E731
_before: ContextVar[Callable[[], None]] = ContextVar("before", default=_nothing)
Condition = dict[str, Any]


@contextmanager
def before_tracing(call: Callable[[], None]) -> Iterator[None]:
    """`call` is made before anything is built or traced in here; it may be called several times."""
    token = _before.set(call)
    try:
        yield
    finally:
        _before.reset(token)


def begin_tracing() -> None:
    _before.get()()


@dataclass(frozen=True, slots=True)
class _Known:
    condition: Condition
    value: Estimate


class TraceStore:
    """An estimator: what it has traced once it knows, and the disk remembers what the process forgets."""

    def __init__(self, store: Store | None = None) -> None:
        self._store = store
        self._known: dict[tuple[str, StepSettings], list[_Known]] = {}

    def __call__(self, workload: Workload, settings: StepSettings) -> Estimate:
        found = self.known(workload, settings)
        if found is not None:
            return found
        begin_tracing()
        with answers_noted() as answers:
            made = estimate(workload, settings)
        if workload.key is not None:
            condition = _condition(settings, answers, exact=not _follows_card(made.curve))
            self.remember(workload, settings, made, condition)
            _put(self._store, _step_parts(workload.key, settings), made, workload.name, condition)
        return made

    def known(self, workload: Workload, settings: StepSettings) -> Estimate | None:
        """Without a trace; None where it takes one."""
        if workload.key is None:
            return None
        place = (workload.key, _any_card(settings))
        for one in self._known.get(place, []):
            if _holds(one.condition, settings):
                return _for_card(one.value, settings)
        held: list[Condition] = []

        def accepts(condition: Condition) -> bool:
            held[:] = [condition]
            return _holds(condition, settings)

        found = _get(self._store, _step_parts(workload.key, settings), Estimate, accepts)
        if not isinstance(found, Estimate):
            return None
        self.remember(workload, settings, found, held[0])
        return _for_card(found, settings)

    def remember(self, workload: Workload, settings: StepSettings, made: Estimate, condition: Condition) -> None:
        assert workload.key is not None
        self._known.setdefault((workload.key, _any_card(settings)), []).append(_Known(condition, made))


def kept_count(workload: Workload) -> ParameterCount:
    """The parameters of a model, from the disk or counted."""
    if workload.blocks is not None:
        return counted_parameters(workload.blocks)

    def count() -> ParameterCount:
        return counted(whole(workload))

    found: ParameterCount = _kept(workload, {"what": "parameters"}, ParameterCount, count, {})
    return found


def kept_inputs(workload: Workload) -> BatchInputs:
    """The tensors of its batches; of a model that was counted, those of a decoder."""
    if workload.blocks is not None and workload.tokens_per_sample is not None:
        return BatchInputs.of_tokens(workload.tokens_per_sample)

    def made() -> BatchInputs:
        return BatchInputs.of(whole(workload).make_batch)

    found: BatchInputs = _kept(workload, {"what": "inputs"}, BatchInputs, made, {})
    return found


def kept_names(what: str, workload: Workload, find: Callable[[Workload], tuple[str, ...]]) -> tuple[str, ...]:
    """Names that are read off the built model, such as the classes of its blocks."""
    found: tuple[str, ...] = _kept(workload, {"what": what}, tuple, lambda: find(whole(workload)), {})
    return found


def kept_rough_step(workload: Workload, batch: int, settings: StepSettings, trace: Callable[[], RoughStep]) -> RoughStep:
    """Good for every card that takes the same kernels: of what else depends on a card, only its context is more than a rounding."""
    alike = replace(settings, capability=(0, 0), multiprocessors=None)
    parts = {"what": "rough step", "batch": batch, "settings": to_json(alike), "workload": workload.key}
    store = default_store() if workload.key is not None else None
    found = _get(store, parts, RoughStep, lambda condition: _holds(condition, settings))
    if not isinstance(found, RoughStep):
        begin_tracing()
        with answers_noted() as answers:
            found = trace()
        _put(store, parts, found, workload.name, _condition(settings, answers, exact=False))
    return replace(found, context_bytes=context_bytes(settings.capability, multiprocessors=settings.multiprocessors))


def kept_compiled(workload: Workload, settings: StepSettings, make: Callable[[Workload], Estimate]) -> Estimate:
    """A compiled step, for its own card only: the compiler looks at it."""
    parts = {"what": "compiled step", "settings": to_json(settings)}
    condition = _condition(settings, (), exact=True)
    found: Estimate = _kept(workload, parts, Estimate, lambda: make(whole(workload)), condition)
    return found


def kept_evaluation(
    workload: Workload, settings: StepSettings, generation: GenerationSettings | None, trace: Callable[[Workload], EvaluationCurve]
) -> EvaluationCurve:
    parts = {"what": "evaluation", "settings": to_json(_any_card(settings)), "generation": to_json(generation)}
    store = default_store() if workload.key is not None else None
    found = _get(store, {**parts, "workload": workload.key}, EvaluationCurve, lambda condition: _holds(condition, settings))
    if isinstance(found, EvaluationCurve):
        return replace(found, timeline=_timeline_for(found.timeline, settings))
    begin_tracing()
    with answers_noted() as answers:
        made = trace(workload)
    condition = _condition(settings, answers, exact=made.writing is not None)
    _put(store, {**parts, "workload": workload.key}, made, workload.name, condition)
    return made


def _kept(workload: Workload, parts: dict[str, Any], kind: type, make: Callable[[], Any], condition: Condition) -> Any:
    store = default_store() if workload.key is not None else None
    where = {**parts, "workload": workload.key}
    found = _get(store, where, kind, lambda held: held == condition)
    if found is not None:
        return found
    begin_tracing()
    made = make()
    _put(store, where, made, workload.name, condition)
    return made


def _get(store: Store | None, parts: dict[str, Any], kind: type, accepts: Callable[[Any], bool]) -> Any | None:
    found = None if store is None else store.get(parts, accepts)
    try:
        value = None if found is None else from_json(found, _CLASSES)
    except NotPlainError:
        return None
    return value if isinstance(value, kind) else None


def _put(store: Store | None, parts: dict[str, Any], value: Any, label: str, condition: Condition) -> None:
    """What cannot be said in JSON is not kept."""
    if store is None:
        return
    try:
        store.put(parts, to_json(value), label=label, condition=condition)
    except ValueError:
        return


# ------------------------------------------------------------------------------------------------- one trace, many cards


def _any_card(settings: StepSettings) -> StepSettings:
    return replace(settings, capability=(0, 0), multiprocessors=None, allocator=None)


def _step_parts(key: str, settings: StepSettings) -> dict[str, Any]:
    return {"what": "step", "workload": key, "settings": to_json(_any_card(settings))}


def _condition(settings: StepSettings, answers: Any, *, exact: bool) -> Condition:
    if exact:
        return {"card": [*settings.capability, settings.multiprocessors, settings.allocator]}
    return {"answers": sorted([question, [list(one) for one in others], answer] for question, others, answer in answers)}


def _holds(condition: Any, settings: StepSettings) -> bool:
    if not isinstance(condition, dict) or condition.keys() not in ({"card"}, {"answers"}):
        return False
    if "card" in condition:
        return condition == _condition(settings, (), exact=True)
    answers = [(question, tuple(tuple(one) for one in others), answer) for question, others, answer in condition["answers"]]
    return answers_alike(settings.capability, answers)


def _follows_card(curve: MemoryCurve) -> bool:
    """Whether what depends on the card can be put into it again."""
    if isinstance(curve, DepthCurve):
        return _follows_card(curve.shallow) and _follows_card(curve.deep)
    return "end" in curve.timeline.marks and not isinstance(curve.timeline, PerSampleTimeline)


def _for_card(made: Estimate, settings: StepSettings) -> Estimate:
    return replace(made, curve=_curve_for(made.curve, settings))


def _curve_for(curve: MemoryCurve, settings: StepSettings) -> MemoryCurve:
    context = context_bytes(settings.capability, multiprocessors=settings.multiprocessors)
    if isinstance(curve, DepthCurve):
        shallow, deep = _curve_for(curve.shallow, settings), _curve_for(curve.deep, settings)
        return _changed(curve, timeline=deep.timeline, context_bytes=context, options=deep.options, shallow=shallow, deep=deep)
    if not _follows_card(curve):
        return _changed(curve, context_bytes=context)
    timeline = _timeline_for(curve.timeline, settings)
    varying = None if curve.varying is None else replace(curve.varying, timeline=timeline)
    return _changed(curve, timeline=timeline, context_bytes=context, varying=varying, options=parse_alloc_conf(settings.allocator))


def _changed(curve: MemoryCurve, **changes: Any) -> MemoryCurve:
    """The curve with other values, and none of the answers that it has worked out so far."""
    own = {one.name: getattr(curve, one.name) for one in fields(curve) if not one.name.startswith("_")}
    return type(curve)(**{**own, **changes})


def _timeline_for(timeline: Timeline, settings: StepSettings) -> Timeline:
    kernels = Kernels(capability=settings.capability, multiprocessors=settings.multiprocessors)
    known: dict[AffineFormula, AffineFormula] = {}
    for one in {id(one): one for one in timeline.formulas.values()}.values():
        constants, slopes = zip(*one.dims, strict=True)
        known[one] = AffineFormula(one.name, tuple(zip(of_card(one.name, constants, kernels), slopes, strict=True)))
    return replace(timeline, formulas={event: known[one] for event, one in timeline.formulas.items()})
