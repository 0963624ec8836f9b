"""Public prices of rented cards: every entry with its source and day, and the user's own instead."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from hfopt.errors import ConfigError
from hfopt.hardware import catalog
from hfopt.hardware.prices import HF_JOBS, RentalOffer, cheapest, of_card, of_providers, public_offers, read_offers, rentable

OFFERS = public_offers()


def offer(product: str, card: str = "L4", usd: float = 1.0, **more: int) -> RentalOffer:
    return RentalOffer(key="x", provider="X", product=product, card=card, usd_per_hour=usd, source="test", **more)  # type: ignore[arg-type]


def test_every_public_price_has_a_source_a_day_and_a_card_of_the_catalog() -> None:
    names = {gpu.name for gpu in catalog.cards()}
    assert len(OFFERS) > 80 and {one.key for one in OFFERS} == {"hf", "lambda", "runpod", "aws", "gcp", "nebius"}
    for one in OFFERS:
        assert one.source and one.date is not None and date(2026, 1, 1) <= one.date, one
        assert {one.card, *one.also} <= names and 0.1 < one.usd_per_hour / one.cards < 20, one
        assert one.key == "nebius" or (one.vcpus is not None and 2 < one.vcpus / one.cards <= 64), one
    assert len({(one.key, one.product, one.card) for one in OFFERS}) == len(OFFERS)


def test_the_flavours_are_those_of_the_installed_hub_client() -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub", minversion="2.0", reason="older clients list fewer flavours")
    known = {flavour.value for flavour in huggingface_hub.JobHardware if not flavour.value.startswith("cpu")}
    assert {one.product for one in OFFERS if one.key == HF_JOBS} == known


def test_a_machine_is_rented_whole() -> None:
    eight, one, several = offer("8x", usd=8.0, cards=8), offer("1x", usd=2.0), offer("pod", usd=3.0, up_to=4)
    assert (eight.hour_of(1), eight.hour_of(8), eight.hour_of(9)) == (8.0, 8.0, None)
    assert (one.hour_of(1), one.hour_of(2)) == (2.0, None)
    assert (several.hour_of(4), several.hour_of(5)) == (12.0, None)
    assert cheapest([eight, one, several], "L4", 1) is one
    assert cheapest([eight, one, several], "L4", 2) is several
    assert cheapest([eight, one, several], "L4", 4) is eight
    assert cheapest([eight, one, several], "L4", 9) is None and cheapest([eight], "A10", 1) is None


def test_a_card_that_is_surely_it_comes_before_one_that_may_be() -> None:
    unsure = RentalOffer(key="y", provider="Y", product="a", card="A10", also=("L4",), usd_per_hour=1.0, source="t")
    sure = offer("b")
    assert cheapest([unsure, sure], "L4", 1) is sure and cheapest([unsure], "L4", 1) is unsure
    assert rentable([unsure, sure, offer("8x", card="A40", cards=1)], 2) == ()
    assert rentable([unsure, sure, sure], 1) == ("A10", "L4")


def test_the_offers_of_a_card_the_cheapest_for_each_card_first() -> None:
    eight, one = offer("8x", usd=8.0, cards=8), offer("1x", usd=2.0)
    assert of_card([one, eight, offer("other", card="A10")], "L4") == (eight, one)


def test_providers_are_chosen_by_key_or_name() -> None:
    assert {one.key for one in of_providers(OFFERS, ["hf", " AWS"])} == {"hf", "aws"}
    assert {one.key for one in of_providers(OFFERS, ["google cloud"])} == {"gcp"}
    assert of_providers(OFFERS, [""]) == OFFERS
    with pytest.raises(ConfigError, match="--provider azure") as caught:
        of_providers(OFFERS, ["azure"])
    assert "hf, lambda, runpod" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.yaml", "t4: 0.4\nrtx 4090: 1\n"),
        ("p.json", '{"t4": 0.4, "rtx 4090": 1}'),
        ("p.toml", 't4 = 0.4\n"rtx 4090" = 1\n'),
        ("q.yaml", "providers:\n- name: Ours\n  offers:\n  - {card: t4, usd: 0.4, product: a}\n  - {card: rtx 4090, usd: 1}\n"),
    ],
)
def test_own_prices_in_two_forms(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    t4, big = read_offers(tmp_path / name)
    assert (t4.card, t4.hour_of(1), big.card, big.hour_of(1)) == ("Tesla T4", 0.4, "GeForce RTX 4090", 1.0)
    assert t4.date is None and str(tmp_path / name) in t4.source
    if name.startswith("p"):
        assert big.hour_of(8) == 8.0, "a price of one card holds for each of several"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- 1\n", "prices are a mapping of card names"),
        ("{}", "prices are a mapping"),
        ("t4: cheap\n", "prices are a mapping"),
        ("t4: -1\n", "prices are a mapping"),
        ("t4: true\n", "prices are a mapping"),
        ("nosuch: 1\n", "nosuch"),
        ("providers: [{name: x}]", "'offers'"),
        ("providers: [{name: x, offers: [{card: t4, usd: much}]}]", "not a positive number"),
        ("providers: [3]", "prices are"),
        ("a: [1\n", "cannot be read"),
    ],
)
def test_bad_prices_are_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"prices\.yaml") as caught:
        read_offers(path)
    assert words in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_offers(tmp_path / "missing.yaml")
