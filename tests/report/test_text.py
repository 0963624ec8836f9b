"""The plan in words, with its details: what candidates are called, and what a rehearsal ran."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from hfopt.report import one_screen
from hfopt.report.one_screen import plan_html, plan_markdown
from hfopt.report.plan_page import plan_page
from hfopt.report.text import device_words
from hfopt.schema import Assumption, Candidate, Checkpointing, Correction, EngineChoice, PlanCharts, PlanFacts, Priced, Rejection, Trial
from hfopt.units import GIB

plan_text = partial(one_screen.plan_text, verbose=True)


@pytest.mark.parametrize(
    ("precision", "stored", "words"),
    [
        ("fp32", None, "4 × 4 fp32"),
        ("fp32", "float32", "4 × 4 fp32"),
        ("fp32", "bfloat16", "4 × 4 bf16 weights"),
        ("tf32", "float16", "4 × 4 fp16 weights"),
        ("bf16", "bfloat16", "4 × 4 bf16"),
    ],
)
def test_weights_in_half_precision_need_no_autocast_and_are_not_called_fp32(
    facts: PlanFacts, precision: str, stored: str | None, words: str
) -> None:
    refused = Candidate(per_device_batch=4, accumulation=4, precision=precision)  # type: ignore[arg-type]
    told = replace(facts, weights_dtype=stored, alternatives=(), rejected=(Rejection(candidate=refused, reason="too large"),))
    assert f"  {words}  too large" in plan_text(told)
    assert f">{words}<" in plan_page(told, PlanCharts()).decode()


def test_a_rehearsal_of_some_micro_batches_says_so(facts: PlanFacts) -> None:
    def told(accumulation: int, device: str) -> str:
        candidate = replace(facts.after.candidate, accumulation=accumulation)
        trial = Trial(device=device, candidate=candidate, outcome="ok", peak_reserved_bytes=1)  # type: ignore[arg-type]
        return plan_text(replace(facts, trial=trial))

    assert "with 3 of a step's 16 micro-batches" in told(16, "virtual")
    assert "micro-batches" not in told(3, "virtual") and "micro-batches" not in told(16, "cuda")


def test_what_was_assumed_stands_under_the_verdict_with_its_guesses_marked(facts: PlanFacts) -> None:
    picture = (
        Assumption(what="head", value="BertForMaskedLM", guessed=True, settle="--task"),
        Assumption(what="length", value="128 tokens", settle="--seq-len"),
        Assumption(what="adapter", value="none", settle="use_peft"),
        Assumption(what="data size", value=None, settle="--samples"),
        Assumption(what="host", value="of 8 cores as here", guessed=True),
    )
    told = replace(facts, assumed=picture)
    words = (
        "assumed: head BertForMaskedLM (guess: --task), length 128 tokens, no adapter, data size unknown (--samples), "
        "host of 8 cores as here (guess)"
    )
    first, second = plan_text(told).splitlines()[3:5]
    assert f"{first} {second.strip()}" == words
    assert all(words in text for text in (plan_page(told, PlanCharts()).decode(), plan_html(told), plan_markdown(told)))
    assert "assumed" not in plan_text(facts)


@pytest.mark.parametrize(("outcome", "claims"), [("ok", True), ("error", False), ("timeout", False)])
def test_no_speed_is_claimed_after_a_dry_run_that_failed(facts: PlanFacts, outcome: str, claims: bool) -> None:
    trial = Trial(device="virtual", candidate=facts.after.candidate, outcome=outcome, message="NotImplementedError")  # type: ignore[arg-type]
    told = replace(facts, before=replace(facts.before, fits=True), trial=trial)
    for shown in (plan_text(told), plan_page(told, PlanCharts()).decode()):
        assert ("times as fast" in shown) is claims
        assert ("not confirmed: the dry run on the virtual GPU" in shown) is not claims


def test_no_speed_is_claimed_against_settings_that_cannot_run(facts: PlanFacts) -> None:
    told = replace(facts, before=replace(facts.before, fits=True, fault="fp16 cannot train this"), warnings=("fp16 cannot train this",))
    text = plan_text(told)
    assert "times as fast" not in text and "before  cannot run as it is" in text
    assert text.splitlines()[1].startswith("The config as it is cannot run; with 1 change it runs")
    assert "WARNING: fp16 cannot train this" in text.splitlines()[3:4]
    assert "the config as it was cannot run" in plan_page(told, PlanCharts()).decode()


def test_the_machine_is_named_as_it_is(facts: PlanFacts) -> None:
    card = facts.hardware.gpus[0]
    assert device_words(facts) == "RTX 3070, 8.00 GiB (on this machine)"
    several = replace(facts.hardware, gpus=(replace(card, capability=(8, 6)),) * 2, hypothetical=True)
    assert device_words(replace(facts, hardware=several)) == "2 × RTX 3070, 8.00 GiB, capability 8.6 (not on this machine)"
    cpu = replace(facts.hardware, gpus=(), host=replace(facts.hardware.host, cpu_name="Xeon"))
    assert device_words(replace(facts, hardware=cpu)) == "Xeon, 2 cores, 1.00 GiB of RAM free"


def test_how_devices_share_the_work_is_told_with_its_command(facts: PlanFacts) -> None:
    engine = EngineChoice(name="FSDP2", reason="DDP does not fit", rejected=(("DDP", "too large"),), commands=("torchrun x.py",))
    lines = plan_text(replace(facts, engine=engine, job=replace(facts.job, world_size=2))).splitlines()
    assert "FSDP2 over 2 devices: DDP does not fit" in lines and "Use it   torchrun x.py" in lines
    begin = lines.index("FSDP2 over 2 devices")
    assert lines[begin + 1 : begin + 3] == ["  not DDP: too large", "  torchrun x.py"]
    assert "→ 48 × 2 × 2" in lines[2]


@pytest.mark.parametrize(("predicted", "off"), [(1.5, "50.0 % too much"), (0.5, "50.0 % too little"), (1.0, "met")])
def test_what_was_measured_stands_beside_what_was_predicted(facts: PlanFacts, predicted: float, off: str) -> None:
    after = facts.after.candidate
    trial = Trial(device="cuda", candidate=after, outcome="ok", peak_reserved_bytes=GIB, peak_allocated_bytes=GIB // 2)
    found = Correction(
        candidate=after,
        device="cuda",
        predicted_step_s=predicted,
        measured_step_s=1.0,
        predicted_reserved_bytes=round(predicted * GIB),
        measured_reserved_bytes=GIB,
    )
    text = plan_text(replace(facts, trial=trial, correction=found))
    assert "measured on this card: 1.0 s a step, 96.0 samples/s" in text
    assert "measured on this card: 1.00 GiB reserved, 512 MiB allocated" in text
    assert text.count(f": {off}") == 2


def test_a_dry_run_that_failed_says_how(facts: PlanFacts) -> None:
    trial = Trial(device="cpu", candidate=facts.after.candidate, outcome="timeout")
    assert "the dry run on this CPU ran out of time, so nothing was measured" in plan_text(replace(facts, trial=trial))
    assert "not tried on a device" in plan_text(facts)


def test_a_tie_is_told_with_what_decided_it(facts: PlanFacts) -> None:
    winner = facts.after.candidate
    others = {
        "more accumulation steps": replace(winner, accumulation=winner.accumulation + 1),
        "a larger batch, which takes more memory": replace(winner, accumulation=winner.accumulation - 1),
        "recomputes what fits without": replace(winner, checkpointing=Checkpointing(every_n_layers=1)),
        "changes more of the config": replace(
            winner, optim="adafactor", torch_compile=True, use_liger_kernel=True, attn_implementation="sdpa"
        ),
    }
    for reason, candidate in others.items():
        equal = Priced(candidate=candidate, memory=facts.after.memory, time=facts.after.time)
        text = plan_text(replace(facts, alternatives=(equal,)))
        assert f"within 2.0 %, which the prediction cannot separate; {reason}" in " ".join(text.split())
    assert "48 × 2 bf16 adafactor torch.compile liger sdpa" in text


def test_an_epoch_and_tokens_are_told_where_they_are_known(facts: PlanFacts) -> None:
    timed = replace(facts.after, time=replace(facts.after.time, tokens_per_s=2e6, mfu=0.4))
    text = plan_text(replace(facts, after=timed, job=replace(facts.job, data=replace(facts.job.data, samples=15_000))))
    assert "MFU 40.0 %, 1 min 40 s an epoch" in " ".join(text.split()) and "tokens/s" in text
    assert "epoch" not in plan_text(facts) and "MFU" not in plan_text(facts)
    limited = replace(facts, job=replace(facts.job, data=replace(facts.job.data, samples=15_000, samples_at_most=True)))
    assert "at most 1 min 40 s an epoch" in " ".join(plan_text(limited).split())


def test_a_rate_is_told_with_its_range_and_the_power_it_takes(facts: PlanFacts) -> None:
    card = replace(facts.hardware.gpus[0], power_limit_w=220.0)
    held = replace(facts.after.time, samples_per_s=100.0, rate_error=0.25, clock_share=0.62, power_w=220.0)
    told = replace(facts, hardware=replace(facts.hardware, gpus=(card,)), after=replace(facts.after, time=held), launches="a server's CPU")
    text = " ".join(plan_text(told).split())
    assert "8 of 10 such predictions are within 25 %: 80.0 to 125 samples/s" in text
    assert "about 220 of 220 W, which holds its clock at 62 % of the boost clock" in text and "server's CPU" in text
    free = plan_text(replace(told, after=replace(told.after, time=replace(held, power_w=120.0))))
    assert "about 120 of 220 W, launches" in free
    epoch = plan_text(replace(told, job=replace(told.job, data=replace(told.job.data, samples=360_000))))
    assert "0.22 kWh an epoch" in epoch
    assert "8 of 10" not in plan_text(facts) and " W:" not in plan_text(facts)


def test_runners_up_within_the_known_error_cannot_be_told_apart(facts: PlanFacts) -> None:
    def told(slower: float) -> str:
        time = replace(facts.after.time, samples_per_s=facts.after.time.samples_per_s * (1 - slower))
        return plan_text(replace(facts, alternatives=(Priced(candidate=facts.after.candidate, memory=facts.after.memory, time=time),)))

    assert "5.0 % slower, too close to call" in told(0.05)
    assert "20.0 % slower, compute-bound" in told(0.20)
