"""The first evaluation of a job: how the Trainer will run it, what it takes beside the training, and the batch to run it with.

What a YAML does not say is read the safe way, and the reading is said: a metric that picks the best model, or text to be generated, means
`compute_metrics`, and so does a task whose predictions are small. A language model's logits are only kept where something asks for a
metric: they would fill any card. TRL's trainers keep none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from hfopt.config.settings import EVALUATION_BATCH
from hfopt.errors import NothingFits, TraceError
from hfopt.job.subject import Subject
from hfopt.memory.trace_store import kept_evaluation
from hfopt.pricing.candidate_prices import Pricing
from hfopt.pricing.forked_traces import ForkedTraces, KeyedTask
from hfopt.schema import (
    GENERATING,
    Assumption,
    Candidate,
    EvaluationArguments,
    EvaluationPeak,
    EvaluationSettings,
    GenerationSettings,
    MemoryPeak,
    StepSettings,
    Task,
    Workload,
)
from hfopt.units import format_bytes

if TYPE_CHECKING:
    from hfopt.memory.curve import MemoryCurve
    from hfopt.memory.evaluation import EvaluationCurve


BATCH = EVALUATION_BATCH
STEPS = "eval_accumulation_steps"
ASSUMED_SAMPLES = 1000
NOT_ESTIMATED = "the first evaluation is not in the estimate"
LOSS_ALONE = (
    "should the Trainer have compute_metrics, the evaluation's logits stay on the card: set eval_accumulation_steps, or reduce them in "
    "preprocess_logits_for_metrics"
)
GENERATED_TOKENS = 20  # transformers' GenerationConfig.max_length, where nothing is said
SMALL_PREDICTIONS: frozenset[Task] = frozenset(
    ("sequence_classification", "token_classification", "question_answering", "image_classification", "audio_classification")
)
"""A few numbers for a sample or a token: keeping them costs little, and scripts for these tasks mostly compute metrics."""
_PLAIN = frozenset(("Trainer", "Seq2SeqTrainer"))
Wanted = tuple[str, int, str]  # key, value, reason


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationReading:
    """How the evaluation is taken to run, and what of it is assumed."""

    settings: EvaluationSettings
    assumed: tuple[Assumption, ...] = ()
    notes: tuple[str, ...] = ()


def read_evaluation(subject: Subject) -> EvaluationReading | None:
    """None where the job does not evaluate while it trains, or evaluates by the same steps that train it."""
    stated, spec = subject.job.settings.evaluation, subject.job.evaluation
    if not stated.runs or subject.job.trainer in GENERATING:  # those generate and score, as in training
        return None
    keeps, metrics = _keeps_predictions(subject)
    generation = _generation(subject) if keeps else None
    samples = ASSUMED_SAMPLES if spec.samples is None else spec.samples
    size = Assumption(what="evaluation data", value=f"{samples} samples", guessed=spec.samples is None, settle="max_eval_samples")
    return EvaluationReading(
        settings=EvaluationSettings(
            samples=samples,
            keeps_predictions=keeps,
            accumulation_steps=1 if stated.batchwise_metrics else stated.accumulation_steps,
            concatenates=stated.concatenates,
            generation=generation,
            world_size=subject.job.world_size,
        ),
        assumed=(*metrics, *([size] if keeps else [])),
        notes=() if keeps or not metrics else (LOSS_ALONE,),
    )


def _keeps_predictions(subject: Subject) -> tuple[bool, tuple[Assumption, ...]]:
    """Are they kept, and what is assumed there."""
    job = subject.job
    stated, known = job.settings.evaluation, job.evaluation.computes_metrics
    if stated.loss_only:
        return False, ()
    if known is not None:
        return known, ()
    if job.trainer not in _PLAIN:
        return False, ()
    sign = _sign_of_metrics(stated)
    if sign is not None:
        return True, (_metrics(f"with compute_metrics, as {sign} suggests", settle="prediction_loss_only"),)
    if subject.workload.task in SMALL_PREDICTIONS:
        return True, (_metrics("with compute_metrics, as is usual for the task", settle="prediction_loss_only"),)
    return False, (_metrics("of the loss alone, as no metric is named", settle="metric_for_best_model"),)


def _metrics(value: str, *, settle: str) -> Assumption:
    return Assumption(what="evaluation", value=value, guessed=True, settle=settle)


def _sign_of_metrics(stated: EvaluationArguments) -> str | None:
    best = stated.best_metric
    if best is not None and best.removeprefix("eval_") != "loss":
        return f"metric_for_best_model: {best}"
    return "predict_with_generate" if stated.generates else None


def _generation(subject: Subject) -> GenerationSettings | None:
    stated = subject.job.settings.evaluation
    if not stated.generates:
        return None
    return GenerationSettings(max_length=stated.generation_max_length or GENERATED_TOKENS, beams=stated.generation_beams)


@dataclass(kw_only=True)
class FirstEvaluation:
    """Prices the first evaluation after training with any candidate; each setting of the model is traced once."""

    subject: Subject
    pricing: Pricing
    reading: EvaluationReading
    untraced: str | None = None  # why there is no estimate, where there is none
    _curves: dict[StepSettings, EvaluationCurve | None] = field(default_factory=dict)
    _peaks: dict[tuple[Candidate, int, int | None], EvaluationPeak | None] = field(default_factory=dict)
    _planned: dict[Candidate, tuple[EvaluationPeak | None, tuple[Wanted, ...]]] = field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.reading.notes, *([self.untraced] if self.untraced else []))

    def aside(self) -> FirstEvaluation:
        """With the same traces; its answers are its own."""
        return replace(self, _peaks=dict(self._peaks), _planned=dict(self._planned))

    def as_configured(self, candidate: Candidate) -> EvaluationPeak | None:
        return self.peak(candidate, eval_batch_of(self.subject), self.reading.settings.accumulation_steps)

    def planned(self, candidate: Candidate) -> tuple[EvaluationPeak | None, tuple[Wanted, ...]]:
        """What it is run with, and what of that is not the config's."""
        if candidate not in self._planned:
            self._planned[candidate] = self._plan(candidate)
        return self._planned[candidate]

    def _plan(self, candidate: Candidate) -> tuple[EvaluationPeak | None, tuple[Wanted, ...]]:
        now = self.as_configured(candidate)
        if now is None:
            return None, ()
        found = self._raised(candidate, now) if now.fits else self._rescued(candidate, now)
        if found is None:
            raise NothingFits(
                f"nothing fits: the training fits, but the first evaluation at batch {now.batch} needs "
                f"{format_bytes(now.memory.allocated_bytes + now.memory.context_bytes)} of {self._budget}",
                hint=f"leave {BATCH} and {STEPS} free, set prediction_loss_only: true, or evaluate on fewer samples",
            )
        return found, tuple(self._changes(now, found))

    # ------------------------------------------------------------------------------------------ which batch

    def _raised(self, candidate: Candidate, now: EvaluationPeak) -> EvaluationPeak:
        """Up to twice the training batch: it keeps no activations, so what is larger is quicker as far as it fits."""
        wanted = 2 * candidate.per_device_batch
        while BATCH not in self.subject.job.fixed and (wanted := wanted // 8 * 8 if wanted >= 8 else wanted) > now.batch:
            found = self.peak(candidate, wanted, now.accumulation_steps)
            if found is not None and found.fits:
                return found
            wanted //= 2
        return now

    def _rescued(self, candidate: Candidate, now: EvaluationPeak) -> EvaluationPeak | None:
        """Predictions moved to the host more often, at the config's own batch; then ever smaller batches."""
        batch = now.batch
        while batch:
            for steps in self._accumulations(batch, now.accumulation_steps):
                found = self.peak(candidate, batch, steps)
                if found is not None and found.fits:
                    return found
            batch = 0 if BATCH in self.subject.job.fixed else batch // 2
        return None

    def _accumulations(self, batch: int, stated: int | None) -> Iterator[int | None]:
        yield stated
        kept = replace(self.reading.settings, accumulation_steps=stated).kept_batches(batch)
        if STEPS not in self.subject.job.fixed:
            yield from (1 << power for power in reversed(range(kept.bit_length())) if 1 << power < kept)

    def _changes(self, now: EvaluationPeak, found: EvaluationPeak) -> Iterator[Wanted]:
        takes = f"takes {_words(found.memory)} of {self._budget}"
        if found.batch > now.batch:
            yield BATCH, found.batch, f"evaluation keeps no activations: it {takes}, by its own trace"
        elif found.batch < now.batch:
            yield BATCH, found.batch, f"the first evaluation at {now.batch} takes {_words(now.memory)} and does not fit; this {takes}"
        if found.accumulation_steps != now.accumulation_steps and found.accumulation_steps is not None:
            kept = found.kept_bytes_per_sample * self.reading.settings.samples
            yield (
                STEPS,
                found.accumulation_steps,
                f"{self.reading.settings.samples} samples leave {format_bytes(kept)} of predictions on the card, more while they are "
                f"joined: {_words(now.memory)} do not fit; moved to the host this often the evaluation {takes}",
            )

    # ------------------------------------------------------------------------------------------ one batch

    @property
    def _budget(self) -> str:
        return f"{format_bytes(self.pricing.budget_bytes)} usable"

    def peak(self, candidate: Candidate, batch: int, accumulation_steps: int | None) -> EvaluationPeak | None:
        """None where it cannot be traced."""
        key = (candidate, batch, accumulation_steps)
        if key not in self._peaks:
            self._peaks[key] = self._priced(*key)
        return self._peaks[key]

    def _priced(self, candidate: Candidate, batch: int, accumulation_steps: int | None) -> EvaluationPeak | None:
        candidate = replace(candidate, torch_compile=False)  # an evaluation is traced eagerly, after an eager training
        curve, training = self._curve(candidate), self.pricing.curve(candidate)
        if curve is None:
            return None
        settings = replace(self.reading.settings, accumulation_steps=accumulation_steps)
        interrupted = InterruptedTraining(curve=training, batch=candidate.per_device_batch, room_bytes=self.pricing.room_bytes(candidate))
        return evaluation_peak(curve, interrupted, settings, batch)

    def _curve(self, candidate: Candidate) -> EvaluationCurve | None:
        """What an evaluation does does not depend on optimizer, accumulation and checkpointing."""
        if self.untraced is not None:
            return None
        key = self._key(candidate)
        if key not in self._curves:
            self.pricing.progress(f"tracing the evaluation of {self.subject.workload.name}")
            self._curves[key] = self._traced(key, self.pricing.estimate(candidate).curve.timeline.marks)
        return self._curves[key]

    def expected(self, *candidates: Candidate) -> tuple[KeyedTask, ...]:
        """Their traces, for a process that may make them before they are asked for."""
        keys = dict.fromkeys(self._key(replace(candidate, torch_compile=False)) for candidate in candidates)
        return tuple(
            (("evaluation", key), partial(trace_evaluation, self.subject, self.reading, *self.pricing.traced_as(key))) for key in keys
        )

    def _key(self, candidate: Candidate) -> StepSettings:
        settings = self.pricing.settings(candidate)
        return replace(settings, accumulation=1, checkpointing=type(settings.checkpointing)(), optim="adamw_torch")

    def _traced(self, settings: StepSettings, training_marks: Mapping[str, int]) -> EvaluationCurve | None:
        try:
            if "end" not in training_marks:
                raise TraceError("the training step itself is a coarse estimate")
            forked = self.pricing.estimator
            made: EvaluationCurve | None = forked.made(("evaluation", settings)) if isinstance(forked, ForkedTraces) else None
            return made or trace_evaluation(self.subject, self.reading, *self.pricing.traced_as(settings))
        except TraceError as error:
            self.untraced = f"{NOT_ESTIMATED}: {error}"
            return None


@dataclass(frozen=True, kw_only=True, slots=True)
class InterruptedTraining:
    """The training that an evaluation interrupts."""

    curve: MemoryCurve
    batch: int
    room_bytes: int | None  # what the allocator may reserve; None: no card is known


def evaluation_peak(curve: EvaluationCurve, interrupted: InterruptedTraining, settings: EvaluationSettings, batch: int) -> EvaluationPeak:
    replay = curve.replay(interrupted.curve, interrupted.batch, settings, batch, capacity_bytes=interrupted.room_bytes)
    whole = replay if replay.fits else curve.replay(interrupted.curve, interrupted.batch, settings, batch)
    return EvaluationPeak(
        batch=batch,
        accumulation_steps=settings.accumulation_steps,
        keeps_predictions=settings.keeps_predictions,
        memory=MemoryPeak(
            batch=batch,
            allocated_bytes=whole.allocated_bytes,
            reserved_bytes=max(whole.allocated_bytes, replay.reserved_bytes),
            context_bytes=interrupted.curve.context_bytes,
        ),
        kept_bytes_per_sample=curve.kept_bytes_per_sample(settings),
        fits=replay.fits,
    )


def eval_batch_of(subject: Subject) -> int:
    """The config's, or the Trainer's default."""
    return subject.job.settings.evaluation.batch


def trace_evaluation(subject: Subject, reading: EvaluationReading, workload: Workload, settings: StepSettings) -> EvaluationCurve:
    """Raises TraceError where the model cannot be traced, or is divided among ranks."""
    if settings.sharding is not None and settings.sharding.engine != "ddp":
        raise TraceError("an evaluation is traced for whole models, not for sharded ones")
    generation = reading.settings.generation

    def trace(whole: Workload) -> EvaluationCurve:
        from hfopt.memory.evaluation import evaluation_curve

        preprocess = getattr(subject.trainer, "preprocess_logits_for_metrics", None)
        return evaluation_curve(whole, settings, generation=generation, preprocess=preprocess)

    return kept_evaluation(workload, settings, generation, trace)


def first_evaluation(subject: Subject, pricing: Pricing, *, on_gpu: bool) -> FirstEvaluation | None:
    """None where nothing is evaluated, and on the CPU, whose memory nobody counts out."""
    reading = read_evaluation(subject) if on_gpu else None
    return None if reading is None else FirstEvaluation(subject=subject, pricing=pricing, reading=reading)


def _words(memory: MemoryPeak) -> str:
    return f"{format_bytes(memory.allocated_bytes + memory.context_bytes)}"
