"""What follows from the winner: before and after, the changes with their reasons, and advice.

What only the user may do: a larger effective batch, an environment variable. Each with what it would bring, computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from hfopt.facts.argument_effects import not_modelled
from hfopt.facts.gradient_growth import grows_with_accumulation, words
from hfopt.facts.oom_advice import EXPANDABLE
from hfopt.facts.training_keys import CHECKPOINTING_KWARGS, NEW_SPELLINGS
from hfopt.job.request import Request
from hfopt.job.subject import Subject
from hfopt.planner.changes import Outcome, Setting, changes
from hfopt.planner.choices import attention_choices, attention_note, compile_choices, defaults, liger_choices, liger_note, tool_checkpoints
from hfopt.planner.memory_table import charts
from hfopt.planner.result import Plan
from hfopt.planner.search import Precisions, Space
from hfopt.planner.trials import Confirmed
from hfopt.pricing.candidate_prices import Pricing
from hfopt.pricing.compiled import UNCOMPILED, compile_assumed, compile_note, compile_reason, uncollected_note
from hfopt.pricing.dataloader import Feeding
from hfopt.pricing.evaluation_choice import FirstEvaluation
from hfopt.pricing.grpo import batch_rule, check_generation, check_vllm, evaluation_notes, phases, steps_change
from hfopt.pricing.target_device import TargetDevice
from hfopt.schema import (
    Advice,
    Assumption,
    Candidate,
    Change,
    Checkpointing,
    Chosen,
    LoaderPlan,
    MemoryPeak,
    Neutrality,
    PlanCharts,
    PlanFacts,
    PlannedMemory,
    Priced,
    StepTime,
)
from hfopt.units import format_bytes, format_percent, format_rate

LARGER_BATCHES = (2, 4, 8)  # times the effective batch, that are looked at
IDLE = 0.85  # below this utilization the effective batch is looked at
WORTH = 1.05  # a gain below this is not worth a word
EXPANDABLE_SHARE = 0.03  # of the budget that expandable segments must give back


def advice(facts: PlanFacts, pricing: Pricing, alone: StepTime) -> tuple[Advice, ...]:
    """`alone` is the winner's step without the loader."""
    return (*_larger_batch(facts, pricing, alone), *_expandable_segments(facts, pricing), *_neutrality(facts))


def _larger_batch(facts: PlanFacts, pricing: Pricing, alone: StepTime) -> Iterator[Advice]:
    """When one whole effective batch leaves the card idle, its multiples are priced: only the user may change the training."""
    winner, gains = facts.after.candidate, []
    if winner.accumulation != 1 or alone.gpu_utilization >= IDLE:
        return
    limit = pricing.known_limit(winner) or 0
    for factor in LARGER_BATCHES:
        batch = winner.per_device_batch * factor
        if batch > limit:
            break
        larger = pricing.time(replace(winner, per_device_batch=batch))
        if larger.samples_per_s >= WORTH * alone.samples_per_s:
            gain = larger.samples_per_s / alone.samples_per_s
            gains.append(f"{factor}x ({facts.effective_batch * factor}): {gain:.1f} times the samples/s")
    if gains:
        busy, rate = format_percent(alone.gpu_utilization), format_rate(alone.samples_per_s, "samples")
        device = "CPU" if facts.hardware.smallest is None else "card"
        yield Advice(
            title=f"an effective batch of {facts.effective_batch} keeps the {device} busy only {busy} of the time",
            detail=f"{'; '.join(gains)} (now {rate}). It changes the training, so the learning rate may need scaling",
            flag=f"--effective-batch {facts.effective_batch * 2} --lr-scaling sqrt",
        )


def _expandable_segments(facts: PlanFacts, pricing: Pricing) -> Iterator[Advice]:
    if facts.hardware.smallest is None:
        return
    winner = facts.after.candidate
    plain, expandable = facts.after.memory, pricing.memory(winner, expandable_segments=True)
    saved = plain.reserved_bytes - expandable.reserved_bytes
    if saved >= EXPANDABLE_SHARE * facts.budget_bytes:
        yield Advice(
            title="expandable segments would give memory back",
            detail=f"{format_bytes(saved)} of the {format_bytes(plain.reserved_bytes)} reserved are fragments by prediction",
            flag=EXPANDABLE,
        )


def _neutrality(facts: PlanFacts) -> Iterator[Advice]:
    found = facts.neutrality
    if found is None or found.neutral:
        return
    traded = facts.after.candidate.accumulation != facts.job.accumulation
    so = "It was traded, and the run is repaired" if traded and found.fixable else "So the accumulation stays as it is"
    grows = f"the gradient of n micro-batches is {found.ratio:.2f} times that of one batch: " if found.ratio != 1 else ""
    repaired = "; where it is traded, `hfopt run` divides by it, as the Trainer does for other models" if found.fixable else ""
    where = f"the gradients of {found.model_class} in transformers {found.transformers_version}"
    title = f"another accumulation would change {where}, so it stays unless you allow it"
    yield Advice(
        title=f"the accumulation was traded, which alone would change {where}" if traded else title,
        detail=f"{grows}{found.reason}. {so}{repaired}",
        flag="--allow accumulation",
    )


ALTERNATIVES = 24
_RISEN = 1.25  # times the memory of the config as it is


@dataclass(frozen=True, kw_only=True, slots=True)
class Planning:
    """What planning found, up to the winner."""

    subject: Subject
    request: Request
    device: TargetDevice
    space: Space
    allowed: Precisions
    pricing: Pricing
    current: Candidate
    feeding: Feeding
    before: tuple[MemoryPeak, bool]  # predicted before any correction, and whether it fits
    result: Confirmed
    neutrality: Neutrality | None
    evaluation: FirstEvaluation | None = None  # None: nothing is evaluated, or not on a card


def conclude(planning: Planning) -> Plan:
    subject, device, pricing, result = planning.subject, planning.device, planning.pricing, planning.result
    (winner, winner_time), after = result.winner, _after(planning)
    alternatives = _alternatives(planning, after.loader)
    before = _before(planning)  # last: its evaluation may still be traced elsewhere
    changes = _changes(planning, before, after)
    of_the_file = tuple(dict.fromkeys(_about_the_file(planning)))
    facts = PlanFacts(
        job=subject.job,
        hardware=subject.hardware,
        effective_batch=planning.space.effective_batch,
        budget_bytes=device.budget_bytes,
        before=before,
        after=after,
        changes=changes,
        as_written=_as_written(subject, changes),
        alternatives=alternatives,
        rejected=result.found.rejected,
        trial=result.verdict.trial,
        correction=result.correction,
        neutrality=planning.neutrality,
        assumed=_assumed(planning),
        warnings=(*_warnings(planning), *_risen_on_a_guess(planning, before.memory, after.memory)),
        notes=tuple(dict.fromkeys((*planning.device.notes, *of_the_file, *_notes(planning), *_failures(planning)))),
        about_the_file=of_the_file,
        weights_dtype=subject.workload.weights_dtype,
        phases=() if device.vllm is None else phases(device.vllm, subject, after.memory),
        repairs=subject.repairs,
        launches=device.launches,
        calibrated=device.calibrated,
    )
    return Plan(
        facts=replace(facts, advice=advice(facts, pricing, winner_time)),
        loaded=subject.loaded,
        charts=charts(pricing, _searched(planning), winner, device.gpu) if planning.request.charts else PlanCharts(),
        trial_runs=result.verdict.runs,
        curve=partial(memory_of_pieces, pricing, winner),
    )


def _searched(planning: Planning) -> Space:
    """The space as it was searched in the end: where accumulation would change the gradients, the config's own stays."""
    known, own = planning.neutrality, planning.subject.job.accumulation
    stays = known is not None and not known.neutral and "accumulation" not in planning.request.allow
    return replace(planning.space, accumulation=own) if stays and planning.result.winner[0].accumulation == own else planning.space


def memory_of_pieces(pricing: Pricing, winner: Candidate) -> PlannedMemory:
    """Of every divisor of the winner's batch at the same effective batch, with checkpointing too: what is traced already, no new trace."""
    pair = winner.per_device_batch * winner.accumulation
    sizes = [size for size in range(1, winner.per_device_batch + 1) if winner.per_device_batch % size == 0]
    ways = dict.fromkeys((winner.checkpointing, Checkpointing(every_n_layers=1)))
    pieces = [replace(winner, per_device_batch=size, accumulation=pair // size, checkpointing=way) for way in ways for size in sizes]
    known = [candidate for candidate in pieces if pricing.known(candidate)]
    peaks = (replace(peak, breakdown=None, moment=None) for peak in pricing.nearest_memories(known))
    return PlannedMemory(peaks=tuple(zip(known, peaks, strict=True)))


def _before(planning: Planning) -> Chosen:
    current, evaluation, (memory, fits) = planning.current, planning.evaluation, planning.before
    own = evaluation.as_configured(current) if evaluation is not None and fits else None
    fits = fits and (own is None or own.fits)
    priced = planning.feeding.chosen(current, planning.pricing.time(current), memory, fits=fits, loader=planning.feeding.current())
    return replace(priced, fault=planning.allowed.fault, evaluation=own)


def _after(planning: Planning) -> Chosen:
    """As predicted; the loader is sized for the step as it was measured, where it was."""
    winner, winner_time = planning.result.winner
    found = planning.result.correction
    measured_s = None if found is None else found.measured_step_s
    loader = planning.feeding.planned(winner, winner_time if measured_s is None else replace(winner_time, step_s=measured_s))
    priced = planning.feeding.chosen(winner, winner_time, planning.pricing.memory(winner), fits=True, loader=loader)
    return replace(priced, evaluation=None if planning.evaluation is None else planning.evaluation.planned(winner)[0])


def _changes(planning: Planning, before: Chosen, after: Chosen) -> tuple[Change, ...]:
    job, winner = planning.subject.job, planning.result.winner[0]
    evaluation = () if planning.evaluation is None else planning.evaluation.planned(winner)[1]
    outcome = Outcome(
        before=before,
        after=after,
        effective_batch=planning.space.effective_batch,
        budget_bytes=planning.device.budget_bytes,
        device=planning.device.name,
        further=(*(steps_change(job, winner.per_device_batch) if job.generates else ()), *evaluation),
        learning_rate=_learning_rate(planning),
        compiling=_compiling(planning),
        ruled_out=dict(planning.allowed.ruled_out).get(planning.current.precision),
    )
    kept = job.fixed | ({CHECKPOINTING_KWARGS} if tool_checkpoints(planning.subject) else set())
    return changes(Setting(args={**_attention(planning), **job.raw}, defaults=defaults(), kept=kept), outcome)


def _compiling(planning: Planning) -> str | None:
    """Why the winner is compiled, where the config is not."""
    (winner, time), pricing = planning.result.winner, planning.pricing
    if not winner.torch_compile or planning.current.torch_compile:
        return None
    return compile_reason(pricing.compiled(winner), pricing.time(replace(winner, torch_compile=False)), time, pricing.run_steps)


def _as_written(subject: Subject, made: tuple[Change, ...]) -> dict[str, Change]:
    """Changes of keys that the file spells otherwise (LLaMA-Factory's disable_gradient_checkpointing, names of transformers 5.23)."""
    homes = {} if subject.loaded is None else subject.loaded.homes
    spelled = ((change, homes[change.key]) for change in made if change.key in homes)
    return {
        change.key: replace(change, key=home.key)
        if home.word is None
        else replace(change, key=home.key, before=home.word.say(change.before), after=home.word.say(change.after))
        for change, home in spelled
        if home.word is not None or home.key == NEW_SPELLINGS.get(change.key)
    }


def _assumed(planning: Planning) -> tuple[Assumption, ...]:
    """The picture of the job, of vLLM beside it, of its evaluation and of its compiled step."""
    vllm, evaluation, winner = planning.device.vllm, planning.evaluation, planning.result.winner[0]
    beside = () if vllm is None else vllm.assumed
    compiled = (compile_assumed(planning.pricing.compiled(winner)),) if winner.torch_compile else ()
    return (*planning.device.assumed, *beside, *(() if evaluation is None else evaluation.reading.assumed), *compiled)


def _warnings(planning: Planning) -> tuple[str, ...]:
    wrong = () if (fault := planning.allowed.fault) is None else (f"{fault}; {_instead(planning.result.winner[0])}",)
    overflow = planning.allowed.warnings if planning.result.winner[0].precision == "fp16" else ()
    return (*wrong, *planning.device.warnings, *_growing(planning), *planning.subject.warnings, *overflow, *_compiling_differs(planning))


def _compiling_differs(planning: Planning) -> tuple[str, ...]:
    """What was asked of the compiler and is not in the figures, or is in them and need not be in a run."""
    subject, gpu, pricing, winner = planning.subject, planning.device.gpu, planning.pricing, planning.result.winner[0]
    refused = compile_choices(subject, planning.request.allow, gpu).note
    maybe = uncollected_note(pricing.compiled(winner), winner.per_device_batch, pricing.memory(winner)) if winner.torch_compile else ()
    own = compile_note(subject, gpu) if subject.job.settings.torch_compile else ()
    return (*(() if refused is None else (refused,)), *own, *pricing.uncompiled, *maybe)


_GUESSED_SIZES = ("length", "prompt length", "audio", "image")


def _risen_on_a_guess(planning: Planning, before: MemoryPeak, after: MemoryPeak) -> tuple[str, ...]:
    """What a sample is like is not stated, and more memory is taken because of what was put in its place."""
    guesses = [one for one in planning.device.assumed if one.what in _GUESSED_SIZES and one.guessed]
    if not guesses or after.device_bytes < _RISEN * before.device_bytes:
        return ()
    words = " and ".join(f"{one.what} {one.value} ({one.settle})" for one in guesses)
    return (f"{words}: not stated, so assumed, and the plan takes more memory than the config did: larger samples may not fit",)


def _instead(winner: Candidate) -> str:
    if winner.precision == "bf16":
        return "bf16 replaces it"
    return "planned without it; for fp16 load the model in float32 (dtype: float32)"


def _growing(planning: Planning) -> tuple[str, ...]:
    """A head whose gradients grow with the accumulation, in what the config has or in what was traded by the user's leave."""
    subject, winner = planning.subject, planning.result.winner[0]
    known, live = planning.neutrality, subject.trainer is not None
    traded = winner.accumulation != subject.job.accumulation
    if winner.accumulation < 2 or (live and traded):  # a live run that is traded is repaired
        return ()
    faulty = known.fixable and not known.neutral if known is not None else not live and grows_by_rule(subject)
    if not faulty:
        return ()
    so = "; traded as --allow accumulation asks: start it with `hfopt run`, which divides" if traded else ""
    return (f"{words(subject.workload.model_class, winner.accumulation)}{so}",)


def grows_by_rule(subject: Subject) -> bool:
    """By the rule: the plain Trainer with the model's own loss."""
    model_type = subject.workload.facts.model_type
    plain = subject.job.trainer in ("Trainer", "Seq2SeqTrainer") and not subject.job.settings.label_smoothing
    return plain and model_type is not None and grows_with_accumulation(model_type, subject.workload.model_class) is True


def _attention(planning: Planning) -> dict[str, str]:
    """Not one of the Trainer's arguments, but it may be a key of the file."""
    stated = planning.subject.job.model.attn_implementation
    return {} if stated is None else {"attn_implementation": stated}


def _about_the_file(planning: Planning) -> Iterator[str]:
    """What the config sets and the figures do not show, or show by something close: nobody should have to ask for it."""
    subject = planning.subject
    yield from subject.notes
    yield from not_modelled(subject.job.raw, subject.job.trainer, ranks=subject.job.world_size)
    yield from liger_note(subject)
    yield from attention_note(subject, planning.device.gpu)
    yield from subject.job.model.notes


def _notes(planning: Planning) -> Iterator[str]:
    subject, request = planning.subject, planning.request
    if (dependent := subject.workload.batch_dependent_loss) is not None:
        yield f"the loss depends on the batch, so batch and accumulation stay ({dependent}); --allow accumulation frees them"
    yield from _shapes(planning)
    yield from subject.workload.notes
    if subject.job.generates:
        yield from _generation(planning)
    yield from planning.evaluation.notes if planning.evaluation is not None else ()
    yield from (note for note in planning.pricing.estimate(planning.result.winner[0]).notes if not note.startswith(UNCOMPILED))
    gpu, allowed = planning.device.gpu, request.allow
    for offer in (attention_choices(subject, allowed, gpu), liger_choices(subject, allowed)):
        if offer.note is not None:
            yield offer.note


def _shapes(planning: Planning) -> Iterator[str]:
    compiled = planning.result.winner[0].torch_compile or planning.subject.job.settings.torch_compile
    if compiled and planning.subject.workload.lengths is not None:
        yield (
            "torch_compile compiles a second time when a batch of another length comes, then for lengths of any size, whose kernels are "
            "slower than the figures say: pad all samples to one length, and drop the last batch"
        )


def _generation(planning: Planning) -> Iterator[str]:
    device, workload = planning.device, planning.subject.workload
    winner, dtype = planning.result.winner[0], workload.weights_dtype
    peak = planning.pricing.memory(winner)
    yield from batch_rule(planning.subject.job).notes
    yield from evaluation_notes(planning.subject, winner.per_device_batch)
    yield from check_generation(planning.subject, peak, budget_bytes=device.budget_bytes, precision=winner.precision, dtype=dtype)
    if device.vllm is not None and device.gpu is not None:
        card = device.gpu.available_bytes
        yield from check_vllm(device.vllm, planning.subject, peak, card_bytes=card, precision=winner.precision, dtype=dtype)


def _failures(planning: Planning) -> Iterator[str]:
    stored = planning.subject.workload.weights_dtype

    def words(c: Candidate) -> str:
        return f"{c.per_device_batch} × {c.accumulation} {c.precision_words(stored)}"

    for trial in planning.result.verdict.failed:
        yield f"{words(trial.candidate)} was predicted to fit and ran out of memory in the dry run: left out"
    for trial in planning.result.verdict.timed_out:
        yield f"{words(trial.candidate)} was not measured: its dry run reached the time limit, and no other was started after it"


def _alternatives(planning: Planning, loader: LoaderPlan) -> tuple[Priced, ...]:
    """The runners-up that fit at their own batch, fastest first, fed by the winner's loader so that their rates compare with its own."""
    winner = planning.result.winner[0]
    others = [pair for pair in planning.result.found.ranked if pair[0] != winner][:ALTERNATIVES]
    memories = planning.pricing.nearest_memories([candidate for candidate, _ in others])
    priced = [
        Priced(candidate=candidate, memory=memory, time=planning.feeding.limited(candidate, time, loader))
        for (candidate, time), memory in zip(others, memories, strict=True)
        if memory.device_bytes <= planning.device.budget_bytes
    ]
    return tuple(sorted(priced, key=lambda one: -one.time.samples_per_s))


def _learning_rate(planning: Planning) -> tuple[float, str] | None:
    job, scaling, effective = planning.subject.job, planning.request.lr_scaling, planning.space.effective_batch
    before = job.effective_batch
    if scaling == "none" or effective == before:
        return None
    rate = job.settings.learning_rate
    factor = effective / before if scaling == "linear" else (effective / before) ** 0.5
    scaled = float(f"{rate * factor:.6g}")
    return scaled, f"--lr-scaling {scaling}: the effective batch goes from {before} to {effective}"
