"""The next step down: same effective batch always, never a larger size, and the order from cheap to dear."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfopt.oom.step_down import Refusal, Situation, fragmented, next_size, next_step
from hfopt.schema import Candidate, Checkpointing, MemoryPeak, OomSeen
from hfopt.units import GIB, MIB

CONTRASTIVE = Refusal(name="contrastive", reason="the loss compares the samples of a batch", batch_bound=True)
PACKED = Refusal(name="packed", reason="samples are packed into one row")


def candidate(batch: int = 16, accumulation: int = 4, **more: object) -> Candidate:
    return Candidate(per_device_batch=batch, accumulation=accumulation, precision="fp32", **more)  # type: ignore[arg-type]


def seen(**more: object) -> OomSeen:
    return OomSeen(**{"phase": "forward", "step": 7, "micro_batch": 16, **more})  # type: ignore[arg-type]


MEASURED = {
    "allocated_bytes": 7 * GIB,
    "reserved_bytes": 7 * GIB,
    "requested_bytes": 2 * GIB,
    "capacity_bytes": 8 * GIB,
    "baseline_bytes": 1 * GIB,
}


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    size = st.one_of(st.none(), st.integers(0, 80 * GIB))
    slope, fixed = draw(st.integers(0, 4 * GIB)), draw(st.integers(0, 40 * GIB))
    return Situation(
        failed=candidate(
            draw(st.integers(1, 96)), draw(st.integers(1, 64)), checkpointing=Checkpointing(every_n_layers=draw(st.integers(0, 1)))
        ),
        seen=seen(
            phase=draw(st.sampled_from(["forward", "backward", "optimizer", "evaluation", "unknown"])),
            length=draw(st.one_of(st.none(), st.integers(1, 8192))),
            allocated_bytes=draw(size),
            reserved_bytes=draw(size),
            requested_bytes=draw(size),
            capacity_bytes=draw(size),
            baseline_bytes=draw(size),
        ),
        memory=draw(
            st.sampled_from(
                [
                    None,
                    lambda c: MemoryPeak(
                        batch=c.per_device_batch, allocated_bytes=0, reserved_bytes=fixed + slope * c.per_device_batch, context_bytes=0
                    ),
                ]
            )
        ),
        cleared=draw(st.booleans()),
        can_checkpoint=draw(st.booleans()),
        refusal=draw(st.sampled_from([None, CONTRASTIVE, PACKED])),
        process_lost=draw(st.sampled_from([None, "the optimizer step had begun"])),
    )


@given(situations())
def test_the_effective_batch_is_a_law_and_sizes_only_go_down(situation: Situation) -> None:
    step = next_step(situation)
    before = situation.failed.per_device_batch * situation.failed.accumulation
    if step.candidate is None:
        assert step.action == "give_up"
        assert step.smallest_change
        return
    assert step.candidate.per_device_batch * step.candidate.accumulation == before
    assert step.candidate.per_device_batch <= situation.failed.per_device_batch
    assert step.reason
    if step.action == "chunk":
        assert step.candidate.per_device_batch < situation.failed.per_device_batch
        assert situation.refusal is None
    if situation.refusal is CONTRASTIVE:
        assert step.candidate.per_device_batch == situation.failed.per_device_batch
    if situation.process_lost:
        assert step.action == "restart"


@given(situations())
def test_following_the_steps_always_ends(situation: Situation) -> None:
    for _ in range(20):
        step = next_step(situation)
        if step.action in ("give_up", "restart"):
            return
        assert step.candidate is not None
        situation = Situation(
            failed=step.candidate,
            seen=situation.seen,
            memory=situation.memory,
            cleared=step.action == "retry_after_clearing",
            can_checkpoint=situation.can_checkpoint,
            refusal=situation.refusal,
        )
    pytest.fail("twenty steps down and no end")


@given(situations())
def test_more_memory_never_means_smaller_pieces(situation: Situation) -> None:
    if situation.failed.per_device_batch == 1 or situation.seen.capacity_bytes is None:
        return
    # what was needed stays, the room grows up to it
    roomy = OomSeen(
        **{f: getattr(situation.seen, f) for f in OomSeen.__dataclass_fields__}
        | {"capacity_bytes": situation.seen.capacity_bytes + 64 * MIB}
    )
    if (situation.seen.allocated_bytes or 0) + (situation.seen.requested_bytes or 0) <= roomy.capacity_bytes:  # type: ignore[operator]
        return
    tight_size, _ = next_size(situation.failed, situation.seen, situation.memory)
    roomy_size, _ = next_size(situation.failed, roomy, situation.memory)
    assert roomy_size >= tight_size


def test_the_order_from_cheap_to_dear() -> None:
    scattered = seen(**{**MEASURED, "allocated_bytes": 5 * GIB, "requested_bytes": 1 * GIB})
    assert fragmented(scattered)
    again = next_step(Situation(failed=candidate(), seen=scattered))
    assert (again.action, again.reason) == ("retry_after_clearing", "2.00 GiB were reserved but scattered: clear and try again")
    unknown = seen(**{**MEASURED, "allocated_bytes": 5 * GIB, "requested_bytes": 1 * GIB, "reserved_bytes": None})
    assert next_step(Situation(failed=candidate(), seen=unknown)).reason == "enough memory was there but scattered: clear and try again"
    assert next_step(Situation(failed=candidate(2), seen=seen(**MEASURED))).action == "chunk"
    assert next_step(Situation(failed=candidate(), seen=scattered, cleared=True)).action == "chunk"
    one = candidate(1, 64)
    assert next_step(Situation(failed=one, seen=seen(**MEASURED), can_checkpoint=True)).action == "checkpointing"
    last = next_step(Situation(failed=one, seen=seen(**MEASURED, length=512)))
    assert (last.action, last.reason) == ("give_up", "1 sample at a time does not fit and nothing is left to try")
    # 7 of the 8 GiB that are needed above what stays fit: 512 × 7 / 8 tokens
    assert last.smallest_change is not None
    assert "448 tokens" in last.smallest_change
    assert "1.00 GiB" in last.smallest_change


def test_the_largest_divisor_that_fits_is_taken_and_not_half() -> None:
    # 1 GiB stays and 8 GiB go with the 12 samples: 0.67 GiB each, so 10 would fit in 8 GiB; 6 is the largest divisor below
    assert next_size(candidate(12), seen(**MEASURED)) == (6, "12 did not fit in 8.00 GiB; 6 should need 5.00 GiB")
    tight = {**MEASURED, "allocated_bytes": 20 * GIB, "requested_bytes": 4 * GIB}
    assert next_size(candidate(12), seen(**tight))[0] == 3  # 23 GiB for 12: 7 GiB hold 3.65 samples
    exact = {**MEASURED, "allocated_bytes": 14 * GIB, "requested_bytes": 2 * GIB, "baseline_bytes": 0}
    assert next_size(candidate(4), seen(**exact))[0] == 2  # 16 GiB for 4: 2 fill the 8 GiB to the byte
    thirds = {**exact, "allocated_bytes": 22 * GIB, "baseline_bytes": None}
    assert next_size(candidate(6), seen(**thirds))[0] == 2  # what stays is not known: nothing
    assert next_size(candidate(12), seen())[0] == 6  # nothing known: half
    assert next_size(candidate(7), seen())[0] == 1
    full = {**MEASURED, "requested_bytes": 1 * GIB, "baseline_bytes": 9 * GIB}
    assert next_size(candidate(4), seen(**full))[0] == 1  # what stays takes more than there is: no size can be promised


def test_the_models_curve_is_corrected_by_what_was_seen() -> None:
    def memory(c: Candidate) -> MemoryPeak:
        return MemoryPeak(
            batch=c.per_device_batch, allocated_bytes=0, reserved_bytes=1 * GIB + c.per_device_batch * 300 * MIB, context_bytes=0
        )

    # the model thinks 16 samples need 5.7 GiB, yet 9 were needed: its slope is short by 8 / 4.69, so 8 samples need 5 GiB, not 3.3
    size, reason = next_size(candidate(16), seen(**MEASURED), memory)
    assert size == 8
    assert "5.00 GiB" in reason


def test_what_depends_on_the_batch_keeps_it() -> None:
    kept = next_step(Situation(failed=candidate(), seen=seen(**MEASURED), refusal=CONTRASTIVE, can_checkpoint=True))
    assert kept.action == "checkpointing"
    assert kept.candidate is not None
    assert kept.candidate.per_device_batch == 16
    assert kept.candidate.checkpointing == Checkpointing(every_n_layers=1)  # as much as there is
    end = next_step(Situation(failed=candidate(2), seen=seen(**MEASURED), refusal=CONTRASTIVE))
    assert end.action == "give_up" and end.reason.startswith("2 samples at a time does not fit")
    ragged = Refusal(name="ragged", reason="samples of several shapes")  # not bound to the batch unless it says so
    packed = next_step(Situation(failed=candidate(), seen=seen(**MEASURED), refusal=ragged))
    assert packed.action == "restart"
    assert packed.candidate is not None
    assert packed.candidate.per_device_batch == 8


def test_a_lost_process_is_restarted_smaller() -> None:
    step = next_step(Situation(failed=candidate(), seen=seen(phase="optimizer", **MEASURED), process_lost="the optimizer step had begun"))
    assert step.action == "restart"
    assert step.candidate is not None
    assert (step.candidate.per_device_batch, step.candidate.accumulation) == (8, 8)
    pair = next_step(Situation(failed=candidate(2), seen=seen(phase="optimizer", **MEASURED), process_lost="the optimizer step had begun"))
    assert pair.candidate is not None and pair.candidate.per_device_batch == 1


LOST = "the optimizer step had begun"


def test_a_restart_that_cannot_be_smaller_takes_checkpointing_once() -> None:
    one = candidate(1, 64)
    step = next_step(Situation(failed=one, seen=seen(**MEASURED), process_lost=LOST, can_checkpoint=True))
    assert step.action == "restart" and step.candidate is not None and step.candidate.checkpointing.on
    assert step.reason == f"{LOST}; with gradient checkpointing"
    with_it = candidate(1, 64, checkpointing=Checkpointing(every_n_layers=1))
    assert next_step(Situation(failed=with_it, seen=seen(**MEASURED), process_lost=LOST, can_checkpoint=True)).action == "give_up"
    assert next_step(Situation(failed=one, seen=seen(**MEASURED), process_lost=LOST)).action == "give_up"


def test_what_just_fits_was_only_scattered() -> None:
    assert fragmented(seen(**{**MEASURED, "requested_bytes": 1 * GIB}))  # 7 + 1 of 8
    assert not fragmented(seen(**{**MEASURED, "requested_bytes": 1 * GIB + 1}))


def test_what_stays_may_leave_no_room_at_all() -> None:
    one = candidate(1, 64)
    full = {**MEASURED, "baseline_bytes": 8 * GIB}
    said = next_step(Situation(failed=one, seen=seen(**full, length=512))).smallest_change
    assert said is not None and said.startswith("adapters (LoRA) or a smaller optimizer state") and "1.00 GiB" in said
    assert next_step(Situation(failed=one, seen=seen(**MEASURED))).smallest_change == "at least 1.00 GiB more memory"
    unknown = {**MEASURED, "allocated_bytes": 14 * GIB, "baseline_bytes": None}
    shorter = next_step(Situation(failed=one, seen=seen(**unknown, length=512))).smallest_change
    assert shorter is not None and "at most about 256 tokens (this one has 512)" in shorter  # half, for 16 GiB were needed of 8
    scattered = {**MEASURED, "allocated_bytes": 2 * GIB}
    assert next_step(Situation(failed=one, seen=seen(**scattered), cleared=True)).smallest_change == "at least 1 B more memory"
