"""Why a run ran out of memory, in sentences, and the smallest changes that would have fitted.

From the log alone the sentences say what the figures say, and the changes are those that help in that phase. With the config the step is
traced and replayed on a card of that size: where it runs out is the tensor that was most likely asked for, and each change is priced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from hfopt.facts.oom_advice import general_changes, reasons_of
from hfopt.schema import Candidate, Explanation, FittingChange, MemoryPeak, OomPhase, OomReport, ReplayedOom
from hfopt.units import GIB, MIB

if TYPE_CHECKING:
    from hfopt.job.request import Progress, Request
    from hfopt.job.subject import Subject
    from hfopt.memory.curve import MemoryCurve
    from hfopt.pricing.candidate_prices import Pricing

_IN_A_STEP = ("forward", "loss", "backward", "optimizer", "unknown")
_ORDER = ("forward", "loss", "backward", "optimizer")
_ON_THE_CARD = (
    "device_full",
    "fragmentation",
    "other_processes",
    "one_request",
    "refused_though_free",
    "library",
    "communication",
    "spill",
    "limit",
)
_SEGMENT, _LARGE = 20 * MIB, 10 * MIB  # PyTorch's allocator: a request of 1 to 10 MiB takes a segment of 20, larger ones multiples of 2
_MOST_MATCHES = 3


def explain(report: OomReport) -> Explanation:
    """By the log alone."""
    return Explanation(report=report, reasons=reasons_of(report), changes=general_changes(report))


def explain_with_config(report: OomReport, config: str, request: Request, *, progress: Progress = lambda text: None) -> Explanation:
    """By the log and by the replay of the config's own step."""
    plain = explain(report)
    if report.cause not in _ON_THE_CARD:
        return replace(plain, notes=("the config was not needed: it was not the card's memory that ran out",))
    subject, notes = _subject(report, config, request)
    replayed = _Replay(report, subject, request, progress)
    replay = replayed.result()
    changes = tuple(replayed.changes())
    general = () if report.phase in _IN_A_STEP else plain.changes
    notes = (*notes, *otherwise(report.phase, replay), *subject.notes)
    return replace(plain, replay=replay, changes=(*general, *changes) or plain.changes, notes=notes)


def otherwise(said: OomPhase, replay: ReplayedOom) -> Iterator[str]:
    """The log and the replay run out in different parts of a step: the run was not quite this config's."""
    replayed = (replay.moment or "").split(",")[0]
    if replay.fits or said not in _ORDER or replayed not in _ORDER or _agrees(replayed, said):
        return
    earlier = _ORDER.index(said) < _ORDER.index(replayed)
    yield (
        f"the log says {said}, the replay {replayed}: the run took {'more' if earlier else 'less'} than this config says; "
        "look for another model or batch, other lengths, or settings given on the command line"
    )


def _subject(report: OomReport, config: str, request: Request) -> tuple[Subject, tuple[str, ...]]:
    """The job on a card as large as the message says, with the batch that the log states."""
    from hfopt.planner.memory_table import read_subject, with_engine

    total = report.figures.total_bytes
    if request.gpu is None and request.vram_gib is None and total is not None:
        request = replace(request, vram_gib=total / GIB)
    subject = with_engine(read_subject(config, request), request)
    job, notes = subject.job, []
    if report.batch is not None and report.batch != job.per_device_batch:
        notes.append(f"the log states a batch of {report.batch} per device, the config {job.per_device_batch}: the log's is replayed")
        job = replace(job, per_device_batch=report.batch, accumulation=report.accumulation or job.accumulation)
    return replace(subject, job=job), tuple(notes)


class _Replay:
    """One job's step, replayed on the card of the message."""

    def __init__(self, report: OomReport, subject: Subject, request: Request, progress: Progress) -> None:
        from hfopt.planner.choices import current_candidate
        from hfopt.pricing.target_device import device_of, memory_pricing

        self.report, self.subject, self.request = report, subject, request
        self.pricing: Pricing = memory_pricing(subject, request, progress)
        self.device = device_of(subject, request)
        self.own: Candidate = current_candidate(subject)
        self.available = self._available()

    def _available(self) -> int:
        """What this process could have had: the card less what others held."""
        gpu, figures = self.subject.hardware.smallest, self.report.figures
        total = figures.total_bytes or (gpu.available_bytes if gpu is not None else self.device.budget_bytes)
        return max(0, total - (figures.others_bytes or 0))

    @property
    def curve(self) -> MemoryCurve:
        return self.pricing.curve(self.own)

    def _room(self, candidate: Candidate) -> int:
        return self.available - self.pricing.added_bytes(candidate)

    # ------------------------------------------------------------------------------------------ the step as it was

    def result(self) -> ReplayedOom:
        batch, curve, peak = self.own.per_device_batch, self.curve, self.pricing.memory(self.own)
        capacity = self._room(self.own) - curve.context_bytes
        replay = curve.replay(batch, capacity_bytes=max(1, capacity))
        moment, failed = peak.moment, None
        if not replay.fits:
            timeline = curve.timeline.at(batch)
            if 0 <= replay.peak_event < len(timeline):
                place = timeline.places[int(timeline.place_of[replay.peak_event])]
                moment = ", ".join(part for part in (place.phase, place.module or "the whole model", place.op) if part)
                failed = timeline.sizes(batch)[replay.peak_event]
        return ReplayedOom(
            device=self.device.name,
            available_bytes=self.available,
            needed_bytes=peak.device_bytes,
            fits=replay.fits,
            batch=batch,
            moment=moment,
            failed_bytes=failed if failed is not None and failed > 0 else None,
            breakdown=_parts(peak),
            matches=tuple(self._matches()),
        )

    def _matches(self) -> Iterator[str]:
        """Where in the step something of the size is asked for that the message names."""
        wanted = self.report.figures.requested_bytes
        if wanted is None:
            return
        batch = self.own.per_device_batch
        timeline = self.curve.timeline.at(batch)
        seen: set[str] = set()
        for event, size in enumerate(timeline.sizes(batch)):
            if size <= 0 or not _same_request(size, wanted):
                continue
            place = timeline.places[int(timeline.place_of[event])]
            if self.report.phase in ("forward", "loss", "backward", "optimizer") and not _agrees(place.phase, self.report.phase):
                continue
            words = ", ".join(part for part in (place.phase, place.module or "the whole model", place.op) if part)
            if words not in seen:
                seen.add(words)
                yield words
            if len(seen) == _MOST_MATCHES:
                return

    # ------------------------------------------------------------------------------------------ what would have fitted

    def changes(self) -> Iterator[FittingChange]:
        """Smallest first: the batch against the accumulation, checkpointing, both, then what `plan` names when nothing fits; last a batch
        that the model's gradients depend on."""
        if self.report.cause == "other_processes" or self.report.cause == "fragmentation":
            yield from general_changes(self.report)[:1]
        smaller, own = self._smaller_batch(self.own), []
        if smaller is not None:
            own.append(self._change(smaller))
        if not self.own.checkpointing.on and self.subject.workload.checkpointable:
            checkpointed = replace(self.own, checkpointing=self.subject.job.settings.checkpointing_when_on)
            found = checkpointed if self._fits(checkpointed) else self._smaller_batch(checkpointed)
            if found is not None and (smaller is None or found.per_device_batch > smaller.per_device_batch):
                own.append(self._change(found))
        yield from (one for one in own if one.effect == "same")
        yield from self._remedies()
        yield from (one for one in own if one.effect != "same")

    def _smaller_batch(self, candidate: Candidate) -> Candidate | None:
        """The largest that fits with the same effective batch."""
        from hfopt.units import divisors

        largest = self.pricing.curve(candidate).largest_batch(self._room(candidate), giving_back=True)
        samples = candidate.per_device_batch * candidate.accumulation
        fitting = [size for size in divisors(samples) if size < candidate.per_device_batch and largest is not None and size <= largest]
        if not fitting:
            return None
        size = max(fitting)
        return replace(candidate, per_device_batch=size, accumulation=samples // size)

    def _fits(self, candidate: Candidate) -> bool:
        return self.pricing.curve(candidate).fits(candidate.per_device_batch, self._room(candidate), giving_back=True)

    def _change(self, candidate: Candidate) -> FittingChange:
        from hfopt.planner.conclusion import grows_by_rule

        keys: dict[str, object] = {}
        if candidate.per_device_batch != self.own.per_device_batch:
            keys |= {"per_device_train_batch_size": candidate.per_device_batch, "gradient_accumulation_steps": candidate.accumulation}
        if candidate.checkpointing != self.own.checkpointing:
            keys["gradient_checkpointing"] = True
        how = ", ".join(f"{self._spelled(key, value)}" for key, value in keys.items())
        what = " and ".join(
            words
            for words, is_meant in (
                ("a smaller batch with more accumulation", "per_device_train_batch_size" in keys),
                ("gradient checkpointing", "gradient_checkpointing" in keys),
            )
            if is_meant
        )
        curve, room = self.pricing.curve(candidate), self._room(candidate)
        peak = self.pricing.memory(candidate).device_bytes
        within = curve.replay(candidate.per_device_batch, capacity_bytes=room - curve.context_bytes).reserved_bytes + curve.context_bytes
        grows = "per_device_train_batch_size" in keys and grows_by_rule(self.subject)
        depends = "per_device_train_batch_size" in keys and self.subject.workload.batch_dependent_loss is not None
        return FittingChange(
            what=f"{what}, under `hfopt run`: with the plain Trainer the gradients grow with it" if grows else what,
            how=how,
            device_bytes=min(peak, within + self.pricing.added_bytes(candidate)),
            effect="training" if grows or depends else "same",
        )

    def _spelled(self, key: str, value: object) -> str:
        home = self.subject.loaded.homes.get(key) if self.subject.loaded is not None else None
        if home is None:
            return f"{key}: {_yaml(value)}"
        return f"{home.key}: {_yaml(value if home.word is None else home.word.say(value))}"

    def _remedies(self) -> Iterator[FittingChange]:
        from hfopt.planner.nothing_fits import Rescue

        device = replace(self.device, budget_bytes=self.available)
        rescue = Rescue(subject=self.subject, device=device, pricing=replace(self.pricing, budget_bytes=self.available), pool=(self.own,))
        for one in rescue.ranked():
            yield FittingChange(what=one.remedy.words, how=one.remedy.how, device_bytes=one.device_bytes, effect=one.remedy.effect)


def _parts(peak: MemoryPeak) -> dict[str, int]:
    return {} if peak.breakdown is None else {name.removesuffix("_bytes"): size for name, size in asdict(peak.breakdown).items() if size}


def _agrees(traced: str, said: str) -> bool:
    return traced == said or (said == "loss" and traced == "forward") or (said == "optimizer" and traced in ("optimizer", "clip", "step"))


def _same_request(size: int, message: int) -> bool:
    """PyTorch reports what it asked the driver for: the block rounded up to a segment; printed with two digits after the point."""
    if size <= MIB:
        asked = 2 * MIB
    elif size < _LARGE:
        asked = _SEGMENT
    else:
        asked = -(-size // (2 * MIB)) * 2 * MIB
    digits = 0.006 * (GIB if message >= GIB else MIB)
    return abs(asked - message) <= digits


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
