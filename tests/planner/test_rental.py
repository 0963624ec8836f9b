"""Which card to rent: winners as far as cards can be told apart, limits with the range of the prediction, the front, the job's command."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_plan import CANDIDATE, CHOSEN, FACTS

from hfopt.cli.compare import _aim, _as_data, _assumed, _cells, _seconds, _show, _show_job
from hfopt.errors import ConfigError
from hfopt.hardware.prices import RentalOffer, public_offers
from hfopt.planner.comparison import Limits, Row, _host_of, front, job_command, ordered, winners
from hfopt.planner.result import Plan
from hfopt.schema import Assumption, Checkpointing, EngineChoice
from hfopt.speed.calibration import NamedHost

NO_LIMITS = Limits()


def row(
    card: str, rate: float, usd: float | None = None, *, power_w: float | None = 100.0, run_s: float | None = None, cards: int = 1
) -> Row:
    time = replace(CHOSEN.time, samples_per_s=rate, power_w=power_w, rate_error=0.22)
    offer = None if usd is None else RentalOffer(key="x", provider="X", product="y", card=card, usd_per_hour=usd, source="t", up_to=8)
    return Row(card=card, plan=Plan(facts=replace(FACTS, after=replace(CHOSEN, time=time))), offer=offer, run_s=run_s, cards=cards)


NO_FIT = Row(card="P4", plan=None, why_not="too small")
T4, L4, A10 = row("T4", 50.0, 0.1), row("L4", 100.0, 0.8, power_w=70.0), row("A10", 95.0, 0.75)


def test_the_winners_and_who_cannot_be_told_from_them() -> None:
    speed, cost, energy = winners((T4, L4, A10, NO_FIT), NO_LIMITS)
    assert speed.row is L4 and speed.equal == (A10,)
    assert cost.row is T4 and cost.equal == (), "2.22 against 0.56 USD a million"
    assert energy.row is L4 and energy.error > speed.error
    assert speed.words.startswith("fastest: L4, 100 samples/s; A10 cannot be told apart (8 of 10 ")
    assert cost.words == "cheapest: T4, 0.56 USD a million samples (X y)"
    assert energy.words == "least energy: L4, 0.19 kWh a million samples"
    for best, other, equal in (("A10", "RTX A6000", False), ("L4", "Tesla T4", True)):  # cards with published training rows, and without
        assert bool(winners((row(best, 100.0), row(other, 86.0)), NO_LIMITS)[0].equal) is equal
    many = winners((L4, *(row(f"card {number}", 99.0) for number in range(8))), NO_LIMITS)[0].words
    assert "card 4 and 3 more cannot be told apart" in many and "card 5" not in many
    assert winners((L4, NO_FIT), NO_LIMITS) == (), "one card is no comparison"
    assert [one.aim for one in winners((row("a", 1.0, power_w=None), row("b", 2.0, power_w=None)), NO_LIMITS)] == ["speed"]


def test_the_costs_of_a_run_and_of_several_cards() -> None:
    one, two = row("L4", 100.0, 0.8, run_s=7200.0), row("L4", 100.0, 0.8, run_s=7200.0, cards=2)
    assert one.cost == pytest.approx(1.6) and two.cost == pytest.approx(3.2)
    assert one.kwh == pytest.approx(0.2) and two.kwh == pytest.approx(0.4)
    assert one.usd_per_million == pytest.approx(0.8 * 1e6 / 100 / 3600) and L4.cost is None
    assert row("L4", 100.0).usd_per_million is None and NO_FIT.usd_per_million is None and NO_FIT.kwh is None


def test_rows_are_sorted_by_what_is_asked_for_and_what_does_not_fit_is_last() -> None:
    free = row("none", 500.0, power_w=None)
    rows = (NO_FIT, T4, free, A10, L4)
    assert ordered(rows, "speed") == (free, L4, A10, T4, NO_FIT)
    assert ordered(rows, "cost") == (T4, A10, L4, free, NO_FIT)
    assert ordered(rows, "energy") == (L4, A10, T4, free, NO_FIT)


def test_the_front_has_no_card_that_another_beats_in_speed_and_cost() -> None:
    worse, same = row("K80", 40.0, 0.2), row("twin", 100.0, 0.8)
    assert front((T4, L4, A10, worse, NO_FIT, row("unpriced", 999.0))) == (T4, L4, A10)
    assert front((L4, same)) == (L4, same), "equal ones do not beat each other"


def test_limits_take_the_range_of_the_prediction_into_account() -> None:
    hour = row("L4", 100.0, 1.0, run_s=3600.0)  # 0.82 to 1.22 hours, 0.82 to 1.22 USD
    assert Limits(deadline_s=5000).verdict(hour) == "yes" and Limits(deadline_s=5000).why_not(hour) is None
    assert Limits(deadline_s=3700).verdict(hour) == "close" == Limits(deadline_s=3500).verdict(hour)
    assert Limits(deadline_s=2900).verdict(hour) == "no" and Limits(deadline_s=2900).why_not(hour) == "too late"
    assert Limits(budget_usd=0.5).why_not(hour) == "over the budget"
    assert Limits(budget_usd=1.0).why_not(hour) == "too close to call"
    assert Limits(budget_usd=2.0, deadline_s=60).why_not(hour) == "too late"
    assert Limits(budget_usd=2.0).why_not(row("L4", 100.0, run_s=3600.0)) == "no price"
    assert Limits(budget_usd=2.0).verdict(NO_FIT) == "no" and Limits(budget_usd=2.0).why_not(NO_FIT) is None


def test_winners_keep_the_limits() -> None:
    slow, fast = row("T4", 50.0, 0.1, run_s=7200.0), row("L4", 100.0, 0.8, run_s=3600.0)
    other = row("A10", 90.0, 0.9, run_s=4000.0)
    assert next(one.row for one in winners((slow, fast, other), Limits(deadline_s=5000)) if one.aim == "cost") is fast
    only = winners((slow, fast), Limits(deadline_s=5000))
    assert {one.row.card for one in only} == {"L4"} and all(one.equal == () for one in only), "the one that keeps the limits is the answer"
    assert Limits(deadline_s=60).verdict(fast) == "no" and winners((slow, fast), Limits(deadline_s=60)) == ()
    assert "1 h 0 min" in winners((slow, fast), NO_LIMITS)[0].words and "0.20 USD (X y)" in winners((slow, fast), NO_LIMITS)[1].words


def test_a_limit_needs_the_length_of_the_run() -> None:
    for limits, option in ((Limits(budget_usd=1.0), "--budget"), (Limits(deadline_s=1.0), "--deadline")):
        with pytest.raises(ConfigError, match=option) as caught:
            limits.check((L4, NO_FIT))
        assert "--samples" in (caught.value.hint or "")
        limits.check((NO_FIT,))
        limits.check((row("L4", 1.0, run_s=5.0),))
    NO_LIMITS.check((L4,))


def on_hf(flavor: str, **more: float) -> Row:
    offer = next(one for one in public_offers() if one.product == flavor)
    return replace(row(offer.card, 100.0, **more), offer=offer, cards=offer.cards)  # type: ignore[arg-type]


def test_the_command_that_starts_the_job_is_quoted_for_the_shell() -> None:
    lines = job_command(on_hf("l4x1", run_s=3 * 3600.0), Path("my runs/it's.yaml"))
    plan, job = map(shlex.split, lines)
    assert plan == ["hfopt", "plan", "my runs/it's.yaml", "--gpu", "L4", "--host", "8cores", "-o", "my runs/it's.l4x1.yaml"]
    assert job[:5] == ["hf", "jobs", "run", "--flavor", "l4x1"]
    assert job[5:7] == ["--timeout", "6h"], "3 h, 22 % slower, and half as much again"
    assert job[job.index("-v") + 1] == "my runs:/work:rw"
    assert job[-3:-1] == ["bash", "-c"] and shlex.split(job[-1]) == ["cd", "/work", "&&", "python", "train.py", "it's.l4x1.yaml"]
    assert job_command(L4, Path("a.yaml")) == () and job_command(replace(on_hf("l4x1"), plan=None), Path("a.yaml")) == ()


def test_several_cards_start_with_the_plans_launcher_and_an_own_command_is_kept() -> None:
    several = on_hf("l4x4")
    assert several.plan is not None
    choice = EngineChoice(name="DDP", reason="", commands=("torchrun --n 4 train.py a.yaml",))
    several = replace(several, plan=Plan(facts=replace(several.plan.facts, engine=choice)))
    plan, job = map(shlex.split, job_command(several, Path("a.yaml")))
    assert plan[-6:] == ["--num-gpus", "4", "--host", "48cores", "-o", "a.l4x4.yaml"] and "--timeout" not in job
    assert job[-1] == "cd /work && torchrun --n 4 train.py a.l4x4.yaml"
    assert shlex.split(job_command(several, Path("a.yaml"), "make 'it so'")[1])[-1] == "cd /work && make 'it so'"


def test_the_cells_of_a_card() -> None:
    cells = _cells(row("T4", 32.0, 0.354, run_s=3600.0), known=True)
    assert cells[:6] == ("T4", "yes", "8 × 2 bf16 checkpointing", "32.0 ± 22 %", "50.0 %", "1.00 GiB")
    assert cells[6:] == ("0.35", "X y", "1 h 0 min", "0.35", "0.10")
    graded = replace(CANDIDATE, checkpointing=Checkpointing(every_n_layers=2))
    plan = Plan(facts=replace(FACTS, after=replace(CHOSEN, candidate=graded)))
    other = _cells(Row(card="T4", plan=plan), known=False)
    assert other[2:4] == ("8 × 2 bf16 checkpointing/2", "32.0") and other[7:] == ("no public price", "needs --samples", "", "")
    assert _cells(NO_FIT, known=True)[:3] == ("P4", "no", "too small")


def test_the_table_shows_the_front_and_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    worse = row("K80", 40.0, 9.0)
    _show((L4, A10, T4, worse, NO_FIT), NO_LIMITS, front_only=True)
    shown = capsys.readouterr()
    assert "K80" not in shown.out and "P4" not in shown.out and "fastest: L4" in shown.out and "needs --samples" in shown.out
    assert "2 cards are not shown" in shown.err and "need --samples N" in shown.err
    timed = tuple(replace(one, run_s=3600.0) for one in (L4, worse))
    _show(timed, Limits(budget_usd=0.01), front_only=False)
    shown = capsys.readouterr()
    assert shown.out.count("over the budget") == 2 and "no card keeps the limits" in shown.out and "K80" in shown.out
    assert "need --samples" not in shown.err


def test_the_job_of_the_cheapest_flavour_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    _show_job((replace(L4, run_s=3600.0), replace(A10, run_s=3600.0), NO_FIT), NO_LIMITS, Path("a.yaml"), None, public_offers())
    shown = capsys.readouterr().err
    assert "is l4x1 (L4): 0.80 USD/h, about 0.80 USD" in shown and "hf jobs run --flavor l4x1 --timeout 2h" in shown
    _show_job((L4,), NO_LIMITS, Path("a.yaml"), None, public_offers())
    assert "30 minutes" in capsys.readouterr().err
    _show_job((A10, NO_FIT), NO_LIMITS, Path("a.yaml"), None, public_offers())
    assert capsys.readouterr().err == "", "HF Jobs has no A10"


def test_the_json_of_a_row_says_what_it_is_best_for() -> None:
    first, second, third = _as_data((L4, A10, NO_FIT), NO_LIMITS, Path("a.yaml"), None)
    assert first["best_for"] == ["speed", "energy"] and second["as_good_for"] == ["speed"] and second["best_for"] == ["cost"]
    assert first["offer"] == {"provider": "X", "product": "y", "usd_per_hour": 0.8, "vcpus": None, "source": "t", "date": None}
    assert third["fits"] is False and third["within_limits"] == "no" and first["job_commands"] == [] and first["on_pareto_front"]


def test_the_host_is_the_rented_machines_unless_another_is_named() -> None:
    here = SimpleNamespace(named_host=NamedHost())
    pod = RentalOffer(key="x", provider="X", product="y", card="L4", usd_per_hour=1.0, source="t", up_to=8, vcpus=6)
    assert _host_of(here, pod, 1).cores == 6 and _host_of(here, pod, 4).cores == 24  # type: ignore[arg-type]
    assert _host_of(here, replace(pod, vcpus=None), 1).cores is None and _host_of(here, None, 1).cores is None  # type: ignore[arg-type]
    assert _host_of(SimpleNamespace(named_host=NamedHost(cores=2.0)), pod, 1).cores == 2  # type: ignore[arg-type]
    hosts = [replace(one, assumed=(Assumption(what="host", value=f"of {cores} cores"),)) for one, cores in ((L4, 8), (T4, 4))]
    assert _assumed((hosts[0], hosts[0]))[0].value == "of 8 cores"
    assert _assumed(tuple(hosts))[0].value == "as rented (vCPU in the table)"
    assert _cells(replace(L4, offer=pod), known=False)[7] == "X y, 6 vCPU"


def test_words_of_the_options() -> None:
    assert _seconds("1h30m") == 5400 and _seconds("2 d") == 172800 and _seconds("90m") == 5400 and _seconds(None) is None
    for bad in ("soon", "8", "-3h", "0h", "3hours"):
        with pytest.raises(ConfigError, match="is not a duration"):
            _seconds(bad)
    assert _aim(None, NO_LIMITS) == "speed" and _aim(None, Limits(deadline_s=1.0)) == "cost" and _aim("energy", NO_LIMITS) == "energy"
    assert _aim(None, Limits(deadline_s=1.0, budget_usd=1.0)) == "speed"
    with pytest.raises(ConfigError, match="--sort colour"):
        _aim("colour", NO_LIMITS)
