"""Estimates on demand: each setting is traced at most once, and memory and time of any candidate are read off the traces.

tf32 computes other products than fp32 but allocates the same, so they share a trace. Accumulation changes the memory only (gradients live
through the forward, and the window's other batches wait on the device), so any trace of a setting gives its kernels; and the trace with
accumulation bounds the one without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hfopt.memory.allocator import LARGE_SEGMENT, parse_alloc_conf
from hfopt.memory.curve import MemoryCurve, replays_kept
from hfopt.memory.step_memory import Estimate, ParameterCount, context_bytes, state_bytes
from hfopt.memory.timeline import BatchInputs
from hfopt.memory.trace_store import kept_count, kept_inputs
from hfopt.pricing.compiled import UNCOMPILED, Compiler, over_the_run
from hfopt.pricing.forked_traces import Estimator, ForkedTraces, KeyedTask
from hfopt.probe.compiled_step import CAPTURED, PLANNED_AS
from hfopt.schema import Candidate, Checkpointing, CompiledStep, Correction, MemoryPeak, StepSettings, StepTime, Trial, Workload
from hfopt.speed.device_speed import Speed
from hfopt.speed.step_time import RankTraffic, StepTimer

RECOMPUTED_SHARE = 0.5  # of the forward's time, at the least, that full checkpointing repeats: a lower bound, its blocks hold more
SMALL_SHARE = 0.02
ADAPTER_SHARE = 0.1  # of the parameters that are trained, at most: LoRA trains a hundredth or two
LIGHTEST_PRECISION = 0.4  # of another precision's memory that one takes at the least: halves of all, less what stays float32


@dataclass(kw_only=True)
class Pricing:
    """The search's models, over lazily made traces. `dataclasses.replace` begins with none: those of another job are not its own."""

    workload: Workload
    base: StepSettings
    speed: Speed | None  # None: only memory is asked for
    budget_bytes: int
    ranks: RankTraffic
    capacity_bytes: int | None = None  # of the device, headroom included
    offset_bytes: int = 0  # what the world adds to one device (gradient buckets) or takes off it (shards)
    enough_batch: int | None = None  # no limit above it is asked for: what is larger need not be known exactly
    most_traces: int | None = None  # that a search can ask for
    estimator: Estimator
    with_attention: Callable[[str], Workload] | None = None  # the same model with another attention implementation
    compiler: Compiler | None = None  # None: compiled steps cannot be looked at, they have the eager one's memory
    run_steps: float | None = None  # over which compiling is spread; None: not known
    progress: Callable[[str], None] = lambda text: None
    _workloads: dict[str, Workload] = field(default_factory=dict, init=False)
    _estimates: dict[StepSettings, Estimate] = field(default_factory=dict, init=False)
    _curves: dict[tuple[StepSettings, int], MemoryCurve | None] = field(default_factory=dict, init=False)
    _timers: dict[tuple[StepSettings, str, bool], StepTimer] = field(default_factory=dict, init=False)
    _limits: dict[tuple[StepSettings, int], int | None] = field(default_factory=dict, init=False)
    _bounds: dict[tuple[StepSettings, float], int] = field(default_factory=dict, init=False)
    _correction: Correction | None = None
    _times: dict[Candidate, StepTime] = field(default_factory=dict, init=False)
    _replays: AbstractContextManager[None] | None = field(default=None, init=False)

    def __enter__(self) -> Pricing:
        """Until it is left, replays are looked up among those of this job, and what is new is kept."""
        self._replays = replays_kept(self.workload.key, self.workload.name)
        self._replays.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        assert self._replays is not None
        self._replays.__exit__(*failure)

    # ------------------------------------------------------------------------------------------ what the search asks

    def bound_s(self, candidate: Candidate) -> float:
        if self.known(candidate):
            return self.time(candidate).step_s
        plain = replace(candidate, checkpointing=Checkpointing())
        if self._compiles(candidate) and (plain == candidate or not self.known(plain)):  # a compile takes minutes: asked where it can win
            eager = [one for one in (replace(known, torch_compile=False) for known in (candidate, plain)) if self.known(one)]
            return max((self._timer(one).uncompiled_s(one.per_device_batch, one.accumulation) for one in eager), default=0.0)
        if not candidate.checkpointing.on or not self.known(plain):
            return 0.0
        repeated = RECOMPUTED_SHARE / candidate.checkpointing.every_n_layers
        bound_s = self._timer(plain).recomputing_s(candidate.per_device_batch, candidate.accumulation, repeated)
        return max(self.time(plain).step_s, bound_s)

    def time(self, candidate: Candidate) -> StepTime:
        if candidate not in self._times:
            found = self._timer(candidate).at(candidate.per_device_batch, candidate.accumulation)
            compiled = self.compiled(candidate)
            self._times[candidate] = found if compiled is None else over_the_run(found, compiled, self.run_steps)
        return self._times[candidate]

    def compiled(self, candidate: Candidate) -> CompiledStep | None:
        """What compiling its step takes; None where it is not compiled, or not looked at."""
        found = self._any_accumulation(candidate) if self._compiles(candidate) else None
        return None if found is None else self._estimate(found).compiled

    def _compiles(self, candidate: Candidate) -> bool:
        return candidate.torch_compile and self.compiler is not None

    @property
    def uncompiled(self) -> tuple[str, ...]:  # why a step that was to be compiled has the eager one's figures
        return tuple(dict.fromkeys(note for one in self._estimates.values() for note in one.notes if note.startswith(UNCOMPILED)))

    def known(self, candidate: Candidate) -> bool:
        return self._any_accumulation(candidate) is not None

    def has_own_trace(self, candidate: Candidate) -> bool:
        return self.settings(candidate) in self._estimates

    def largest_batch(self, candidate: Candidate) -> int | None:
        """Exact for its own settings; a bound from another trace that already decides saves the trace."""
        if self.settings(candidate) not in self._estimates:
            if (limit := self.known_limit(candidate)) is not None and limit >= candidate.per_device_batch:
                return limit
            if (at_most := self.at_most(candidate)) is not None and at_most < candidate.per_device_batch:
                return at_most or None
        return self._limit(self.settings(candidate), self._held_bytes(candidate))

    def known_limit(self, candidate: Candidate) -> int | None:
        settings = self.settings(candidate)
        if settings in self._estimates:
            return self._limit(settings, self._held_bytes(candidate))
        other = replace(settings, accumulation=3 - settings.accumulation)
        if other not in self._estimates:
            return None
        if settings.accumulation == 1:
            return self._limit(other)
        gradients = 2 * self._gradient_bytes(other)  # kept through the forward, and the second batch's inputs
        return self._largest(other, -gradients - self._waiting_bytes(candidate))

    def at_most(self, candidate: Candidate) -> int | None:
        """No batch above this can fit: by counting weights, gradients and states; by the trace with accumulation less its gradients; by a
        fuller precision's less its half; or by the one without checkpointing less the blocks that are checkpointed."""
        wanted = self.settings(candidate)
        if wanted in self._estimates:
            return None
        if self.least_bytes(candidate) > self.budget_bytes:
            return 0
        found = []
        for settings in self._estimates:
            kept = self._kept_share(settings.checkpointing, wanted.checkpointing)
            alike = replace(settings, accumulation=1, precision=wanted.precision, checkpointing=wanted.checkpointing)
            if not kept or alike != replace(wanted, accumulation=1):
                continue
            lightest = kept if settings.precision == wanted.precision else kept * LIGHTEST_PRECISION
            found.append(self._bound(settings, lightest))
        return min(found, default=None)

    @cached_property
    def count(self) -> ParameterCount:
        return kept_count(self.workload)

    def least_bytes(self, candidate: Candidate) -> int:
        """What the device holds at the least, whatever the batch: nothing is traced."""
        settings = self.settings(candidate)
        context = context_bytes(settings.capability, multiprocessors=settings.multiprocessors)
        return state_bytes(self.count, settings).total_bytes + context + self.offset_bytes

    def _bound(self, settings: StepSettings, share: float) -> int:
        key = (settings, share)
        if key not in self._bounds:
            self._bounds[key] = self._largest(settings, 2 * self._gradient_bytes(settings), share) or 0
        return self._bounds[key]

    def _kept_share(self, traced: Checkpointing, wanted: Checkpointing) -> float:
        """Of what the traced one takes, the part that the wanted one takes at the least; 0: not comparable."""
        if traced == wanted:
            return 1.0
        if traced.on or not wanted.on or self.workload.layers is None:
            return 0.0
        return 1 - -(-self.workload.layers // wanted.every_n_layers) / self.workload.layers

    def compare(self, trial: Trial) -> Correction:
        """The trial beside what was predicted for it, on a device that gives cached memory back when it is full."""
        candidate = trial.candidate
        predicted = None
        if trial.device != "cpu" and trial.peak_reserved_bytes is not None:  # a process on the CPU holds Python and libraries as well
            known = self.curve(candidate)
            # of the longest batches alone, as the dry run has them
            curve = MemoryCurve(known.timeline, known.context_bytes, third_step_follows=known.third_step_follows, options=known.options)
            capacity = None if self.capacity_bytes is None else self.capacity_bytes - curve.context_bytes
            predicted = curve.replay(candidate.per_device_batch, capacity_bytes=capacity).reserved_bytes
            predicted += self.added_bytes(candidate) - self.offset_bytes
        return Correction(
            candidate=candidate,
            device=trial.device,
            predicted_reserved_bytes=predicted,
            measured_reserved_bytes=None if predicted is None else trial.peak_reserved_bytes,
            predicted_step_s=None if trial.step_s is None else self.time(candidate).step_s,
            measured_step_s=trial.step_s,
        )

    def correct(self, correction: Correction) -> None:
        """From now on every limit is that of the corrected curve."""
        self._correction = correction
        self._limits.clear()
        self._bounds.clear()

    # ------------------------------------------------------------------------------------------ memory of one candidate

    def memory(self, candidate: Candidate, *, expandable_segments: bool = False) -> MemoryPeak:
        curve = self.curve(candidate)
        options = replace(curve.options, expandable_segments=True) if expandable_segments else None
        return self._adjusted(curve.peak(candidate.per_device_batch, options), candidate, self._whole_window(candidate))

    def _adjusted(self, peak: MemoryPeak, candidate: Candidate, whole: MemoryCurve | None = None) -> MemoryPeak:
        added, parts = self.offset_bytes + self._held_bytes(candidate, whole), peak.breakdown
        if not added:
            return peak
        waiting = self._waiting_bytes(candidate) if whole is None else 0
        if parts is not None and waiting:
            held = parts.weights_bytes + parts.optimizer_bytes + parts.context_bytes + LARGE_SEGMENT  # they fill no whole segment
            fetched = held + self.offset_bytes + self.windows_bytes(candidate)
            short = max(0, fetched - peak.device_bytes - added)
            added, waiting = added + short, waiting + short
        if parts is not None:
            gradients, activations = parts.gradients_bytes + added - waiting, parts.activations_bytes + waiting
            parts = replace(parts, gradients_bytes=gradients, activations_bytes=activations)
        return replace(peak, allocated_bytes=peak.allocated_bytes + added, reserved_bytes=peak.reserved_bytes + added, breakdown=parts)

    def nearest_memories(self, candidates: Sequence[Candidate]) -> tuple[MemoryPeak, ...]:
        """From their own traces, or from those with the other kind of accumulation: no new trace, and few replays, for runners-up."""
        by_settings: dict[StepSettings, list[Candidate]] = {}
        for candidate in candidates:
            by_settings.setdefault(self._any_accumulation(candidate) or self.settings(candidate), []).append(candidate)
        found: dict[Candidate, MemoryPeak] = {}
        for settings, alike in by_settings.items():
            curve = self._estimate(settings).curve
            for candidate, peak in zip(alike, curve.peaks([one.per_device_batch for one in alike]), strict=True):
                near = self._adjusted(peak, candidate)
                over = near.device_bytes > self.budget_bytes  # by the few per cent of the interpolation, or truly
                found[candidate] = self._adjusted(curve.peak(peak.batch), candidate) if over else near
        return tuple(found[candidate] for candidate in candidates)

    def nearest_device_bytes(self, candidate: Candidate, batches: Sequence[int]) -> tuple[int, ...]:
        """The same for many batch sizes, quickly and to a few per cent; the candidate's settings must be traced."""
        settings = self._any_accumulation(candidate)
        assert settings is not None, "a curve is drawn only where there is a trace"
        added = self.offset_bytes + self._held_bytes(candidate)
        return tuple(peak.device_bytes + added for peak in self._estimate(settings).curve.peaks(batches))

    def added_bytes(self, candidate: Candidate) -> int:
        """What `curve` leaves out: the other devices' part, and what accumulation holds through the forward."""
        return self.offset_bytes + self._held_bytes(candidate, self._whole_window(candidate))

    def _held_bytes(self, candidate: Candidate, whole: MemoryCurve | None = None) -> int:
        """What accumulation holds and a curve leaves out: gradients that are added and not traced; the window's further batches, which
        the `whole` one has."""
        gradients = self._gradient_share_bytes if self._adds_gradients and candidate.accumulation > 1 else 0
        return gradients + (self._waiting_bytes(candidate) if whole is None else 0)

    def windows_bytes(self, candidate: Candidate) -> int:
        """The inputs of two whole windows: while one is fetched the Trainer still holds the one before, and nothing else of a step."""
        return self._input_bytes(candidate, 2 * candidate.accumulation)

    def _waiting_bytes(self, candidate: Candidate) -> int:
        """The inputs of the window's batches beyond those that are traced."""
        return self._input_bytes(candidate, candidate.accumulation - self.settings(candidate).accumulation)

    def _input_bytes(self, candidate: Candidate, batches: int) -> int:
        return self._inputs.waiting_bytes(candidate.per_device_batch, batches, parse_alloc_conf(self.base.allocator)) if batches else 0

    @cached_property
    def _inputs(self) -> BatchInputs:
        return kept_inputs(self.workload)

    @property
    def _gradient_share_bytes(self) -> int:
        """This device's gradients in float32: a share of them where they are divided."""
        sharding = self.base.sharding
        zero = sharding is not None and sharding.engine in ("zero2", "zero3") and sharding.zero.divides_gradients
        divided = zero or (sharding is not None and sharding.sync_each_batch)
        return 4 * self.workload.trainable_parameters // (sharding.world_size if sharding is not None and divided else 1)

    def fits(self, candidate: Candidate) -> bool:
        """By its own trace at its own batch: a limit does not hold for every batch below it."""
        curve, whole = self.curve(candidate), self._whole_window(candidate)
        if not curve.fits(candidate.per_device_batch, self.room_bytes(candidate) + curve.context_bytes):
            return False
        return whole is not None or not self._waiting_bytes(candidate) or self.memory(candidate).device_bytes <= self.budget_bytes

    def room_bytes(self, candidate: Candidate) -> int:
        """Of the budget, what its curve's allocator may reserve."""
        curve = self.curve(candidate)
        return self._budget_of(curve, self.offset_bytes - self.added_bytes(candidate)) - curve.context_bytes

    def curve(self, candidate: Candidate) -> MemoryCurve:
        """Of its steps with all their micro-batches where the trace shows their window, else with the two that are traced."""
        return self._whole_window(candidate) or self.estimate(candidate).curve

    def _whole_window(self, candidate: Candidate) -> MemoryCurve | None:
        key = (self.settings(candidate), candidate.accumulation)
        if key not in self._curves:
            self._curves[key] = self.estimate(candidate).curve.of_window(candidate.accumulation)
        return self._curves[key]

    def estimate(self, candidate: Candidate) -> Estimate:
        return self._estimate(self.settings(candidate))

    @property
    def _adds_gradients(self) -> bool:
        """Adapters: what accumulation holds through the forward is below a fiftieth of the budget, and is added instead of traced.
        Shares of divided gradients are added too: they are all that a second micro-batch finds. Not the gradients of a whole small model:
        beside its own few bytes they are much, and the peak may be where they are not."""
        whole = 4 * self.workload.trainable_parameters
        adapter = self.workload.trainable_parameters <= ADAPTER_SHARE * self.workload.parameters
        return self._gradient_share_bytes < whole or (adapter and whole <= SMALL_SHARE * self.budget_bytes)

    def settings(self, candidate: Candidate) -> StepSettings:
        """The candidate as the tracer knows it, without what does not change a trace."""
        return replace(
            self.base,
            precision="fp32" if candidate.precision == "tf32" else candidate.precision,
            checkpointing=candidate.checkpointing,
            accumulation=1 if self._adds_gradients else min(candidate.accumulation, 2),
            optim=candidate.optim or self.base.optim,
            attn_implementation=candidate.attn_implementation or self.base.attn_implementation,
            fused_loss=candidate.use_liger_kernel,
            torch_compile=self._compiles(candidate),
            compile_mode=PLANNED_AS.get(self.base.compile_mode, "default") if self._compiles(candidate) else "default",
        )

    def expect(self, candidates: Sequence[Candidate], then: Sequence[KeyedTask] = ()) -> None:
        """These will be asked for, in this order: an estimator that can trace beside us may begin, and go on with `then`."""
        if isinstance(self.estimator, ForkedTraces):
            self.estimator.start([self.traced_as(self.settings(candidate).eager) for candidate in candidates], then)

    def _estimate(self, settings: StepSettings) -> Estimate:
        if settings not in self._estimates and settings.torch_compile:
            eager = self._estimate(settings.eager)
            assert self.compiler is not None, "settings that compile come from a pricing that can"
            self.progress(f"compiling {self.workload.name} on the virtual GPU: {settings.words}")
            self._estimates[settings] = self.compiler(self.traced_as(settings)[0], settings, eager)
        elif settings not in self._estimates:
            number = "" if self.most_traces is None else f", trace {len(self._estimates) + 1} of at most {self.most_traces}"
            self.progress(f"tracing {self.workload.name}: {settings.words}{number}")
            self._estimates[settings] = self.estimator(*self.traced_as(settings))
        return self._estimates[settings]

    def traced_as(self, settings: StepSettings) -> tuple[Workload, StepSettings]:
        """Another attention is another model: it is built with it, and its batches may look different."""
        name = settings.attn_implementation
        if name is None or self.with_attention is None:
            return self.workload, settings
        if name not in self._workloads:
            self._workloads[name] = self.with_attention(name)
        return self._workloads[name], replace(settings, attn_implementation=None)

    def _any_accumulation(self, candidate: Candidate) -> StepSettings | None:
        settings = self.settings(candidate)
        both = (settings, replace(settings, accumulation=3 - settings.accumulation))
        return next((one for one in both if one in self._estimates), None)

    def _worth_tracing(self, candidate: Candidate) -> StepSettings:
        """Its own settings; those with accumulation where it surely does not fit whole, since the smaller ones will be asked for next."""
        own = self.settings(candidate)
        at_most = self.at_most(candidate) if own.accumulation == 1 and not self._adds_gradients else None
        return own if at_most is None or at_most >= candidate.per_device_batch else replace(own, accumulation=2)

    def _timer(self, candidate: Candidate) -> StepTimer:
        settings = self._any_accumulation(candidate) or self._worth_tracing(candidate)
        key = (replace(settings, accumulation=1), candidate.precision, candidate.torch_compile)
        if key not in self._timers:
            assert self.speed is not None, "times are asked for only where the device's speed is known"
            self._timers[key] = StepTimer(
                self._estimate(settings).ops,
                self.speed,
                candidate.precision,
                ranks=self.ranks,
                tokens_per_sample=self.workload.tokens_per_sample,
                compiled=candidate.torch_compile and self.compiler is None,
                captured=settings.compile_mode == CAPTURED,
            )
        return self._timers[key]

    def _limit(self, settings: StepSettings, held_bytes: int = 0) -> int | None:
        key = (settings, held_bytes)
        if key not in self._limits:
            self._limits[key] = self._largest(settings, -held_bytes)
        return self._limits[key]

    def _largest(self, settings: StepSettings, more_bytes: int, share: float = 1.0) -> int | None:
        """The largest batch by this trace, with so many bytes more than the budget and where only this share of what it takes counts."""
        curve = self._estimate(settings).curve
        return curve.largest_batch(self._budget_of(curve, more_bytes, share), enough=self.enough_batch)

    def _budget_of(self, curve: MemoryCurve, more_bytes: int, share: float = 1.0) -> int:
        """The budget as this curve counts: without what is added to it, and as a trial corrected it."""
        room = int((self.budget_bytes - self.offset_bytes + more_bytes) / share) - curve.context_bytes
        if self._correction is not None:
            room = self._correction.predicted_room_bytes(room)
        return room + curve.context_bytes

    def _gradient_bytes(self, settings: StepSettings) -> int:
        breakdown = self._estimates[settings].curve.peak(1).breakdown
        return 0 if breakdown is None else max(breakdown.gradients_bytes, self._gradient_share_bytes)
