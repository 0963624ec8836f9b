"""The plan on one screen: the verdict first, repairs counted, nothing wider than a terminal, and the command that uses the result."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hfopt.report.one_screen import batch_words, plan_lines, plan_text, use_words, verdict
from hfopt.schema import Advice, Assumption, Change, Correction, EngineChoice, EvaluationPeak, MemoryPeak, PlanFacts, Trial
from hfopt.units import GIB

REPAIR = (
    Change(key="evaluation_strategy", before="epoch", after=None, reason="renamed in 4.46"),
    Change(key="eval_strategy", before=None, after="epoch", reason="renamed in 4.46"),
)


def unchanged(facts: PlanFacts) -> PlanFacts:
    return replace(facts, after=facts.before, changes=())


def test_the_verdict_says_how_much_faster_and_what_stays(facts: PlanFacts) -> None:
    assert verdict(facts) == "1.50 times as fast (predicted), with 1 change"
    assert batch_words(facts) == "Effective batch 96 as before: 32 × 3 → 48 × 2" == plan_text(facts).splitlines()[2]
    asked = replace(facts, job=replace(facts.job, accumulation=6))
    assert "Effective batch 96, requested instead of 192: " in plan_text(asked)


def test_a_calibrated_device_is_named_where_the_rate_stands(facts: PlanFacts) -> None:
    assert "calibrate" not in plan_text(facts)
    assert "`hfopt calibrate` measured on 2026-01-02" in " ".join(plan_text(replace(facts, calibrated="2026-01-02")).split())


def test_repairs_are_changes_and_never_stand_under_nothing_to_change(facts: PlanFacts) -> None:
    same = unchanged(facts)
    assert verdict(same) == "Nothing to change: the config is already the fastest that fits"
    assert "Changes" not in plan_text(same)
    repaired = plan_text(replace(same, repairs=REPAIR))
    assert "Nothing to change" not in repaired and "2 repairs" in repaired and "Changes (2)" in repaired
    assert repaired.count("renamed in 4.46") == 1, "a reason that two lines share stands once"
    assert "with 1 change and 2 repairs" in verdict(replace(facts, repairs=REPAIR))


@pytest.mark.parametrize(
    ("fits", "fault", "evaluated", "words"),
    [
        (False, None, False, "The config as it is does not fit; with 1 change it runs"),
        (True, "no fp16 here", False, "The config as it is cannot run; with 1 change it runs"),
        (False, None, True, "The config as it is trains, but its first evaluation does not fit; with 1 change it runs"),
    ],
)
def test_what_did_not_run_before_is_not_a_gain(facts: PlanFacts, fits: bool, fault: str | None, evaluated: bool, words: str) -> None:
    peak = MemoryPeak(batch=8, allocated_bytes=9 * GIB, reserved_bytes=9 * GIB, context_bytes=0)
    first = EvaluationPeak(batch=8, memory=peak, keeps_predictions=False, accumulation_steps=None, kept_bytes_per_sample=0, fits=False)
    before = replace(facts.before, fits=fits, fault=fault, evaluation=first if evaluated else None)
    after = replace(facts.after, evaluation=replace(first, fits=True) if evaluated else None)
    told = replace(facts, before=before, after=after)
    assert verdict(told).startswith(words)
    text = " ".join(plan_text(told).split())
    assert ("3.00 GiB (DOES NOT FIT)" in text) is (not fits and not evaluated)
    assert ("first evaluation 9.00 GiB (DOES NOT FIT) → 9.00 GiB" in text) is evaluated


def test_no_line_is_wider_than_a_terminal_and_details_wait_for_verbose(facts: PlanFacts) -> None:
    long = "a sentence that goes on for longer than any terminal is wide " * 4
    told = replace(
        facts,
        job=replace(facts.job, model=replace(facts.job.model, name="org/model")),
        assumed=tuple(Assumption(what=f"part {number}", value="known", guessed=True, settle="--flag") for number in range(12)),
        warnings=(long,),
        changes=(Change(key="bf16", before=False, after=True, reason=long),),
        advice=(Advice(title=long, detail="detail", flag="--flag"),),
        notes=("a note", "use_adam_mini: its states are not modelled"),
        about_the_file=("use_adam_mini: its states are not modelled",),
    )
    lines = [text for _, text in plan_lines(told)]
    assert max(map(len, lines)) <= 100
    assert "Note     use_adam_mini: its states are not modelled" in lines, "what the config sets is never for --verbose alone"
    assert "More     1 runner-up, 1 rejected, 1 note: --verbose, or --html FILE for a page with charts" in lines
    text, whole = plan_text(told), plan_text(told, verbose=True)
    for hidden in ("Runners-up", "Rejected", "a note", "detail"):
        assert hidden not in text and hidden in whole
    assert "More  " not in whole and max(map(len, whole.splitlines())) <= 100


def test_speed_and_memory_have_one_line_each_with_what_was_measured(facts: PlanFacts) -> None:
    lines = plan_text(facts).splitlines()
    assert "Speed    100 → 150 samples/s predicted" in lines
    assert "Memory   3.00 GiB → 4.25 GiB predicted, 7.00 GiB usable; not tried on a device" in lines
    assert "Speed    100 samples/s as before, predicted" in plan_text(unchanged(facts)).splitlines()
    trial = Trial(device="virtual", candidate=facts.after.candidate, outcome="ok", peak_reserved_bytes=4 * GIB, peak_device_bytes=5 * GIB)
    rehearsed = plan_text(replace(facts, trial=trial))
    assert "rehearsed on the virtual GPU: 5.00 GiB" in " ".join(rehearsed.split()) and "measured" not in rehearsed
    found = Correction(candidate=facts.after.candidate, device="cpu", measured_step_s=2.0, predicted_step_s=1.0)
    measured = plan_text(replace(facts, trial=replace(trial, device="cpu"), correction=found))
    assert "measured on this CPU: 48.0 samples/s, 2.0 s a step" in " ".join(measured.split())


def test_a_dry_run_out_of_time_ends_in_a_plan_that_says_so(facts: PlanFacts) -> None:
    trial = Trial(device="cpu", candidate=facts.after.candidate, outcome="timeout", message="its time limit is 5 min")
    text = " ".join(plan_text(replace(facts, trial=trial)).split())
    assert "not confirmed: the dry run on this CPU ran out of time, so nothing was measured (its time limit is 5 min)" in text
    assert "times as fast" not in text


def test_the_command_is_that_of_the_tool_that_reads_the_file(facts: PlanFacts) -> None:
    job = facts.job
    assert use_words(facts, "new.yaml") == "python train.py new.yaml, instead of c.yaml"
    assert use_words(facts, "c.yaml") == "python train.py c.yaml"
    assert use_words(facts, "a $(id).yaml").startswith("python train.py 'a $(id).yaml'")
    assert use_words(facts, None).endswith("(save it with -o planned.yaml)")
    trl = replace(facts, job=replace(job, uses_trl=True, trainer="SFT"))
    assert use_words(trl, "new.yaml") == "trl sft --config new.yaml"
    assert use_words(replace(trl, job=replace(trl.job, own_script=True)), "new.yaml").startswith("python train.py new.yaml")
    assert use_words(replace(facts, job=replace(job, tool="LLaMA-Factory")), "new.yaml") == "llamafactory-cli train new.yaml"
    assert use_words(replace(facts, job=replace(job, path=None)), None) == "args = plan.apply(args), or plan.to_yaml()"
    shared = EngineChoice(name="DDP", reason="it fits", commands=("accelerate launch x.py new.yaml", "torchrun x.py new.yaml"))
    assert use_words(replace(facts, engine=shared), "new.yaml") == "accelerate launch x.py new.yaml"
