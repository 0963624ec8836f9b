"""What it costs to rent a card: public prices by provider (`prices.toml`, each with its source and date), or the user's own.

A machine is rented whole: eight cards that are sold together cost what eight cost, also when one is used. Where several can be had in one
machine each at the price of one (`up_to`), only those that are used are paid for.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from hfopt.errors import ConfigError, HardwareError
from hfopt.hardware.catalog import lookup

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HF_JOBS = "hf"
_FORM = "a mapping of card names to US dollars of an hour (t4: 0.35), or `providers` as in hfopt/hardware/prices.toml"
_UNLIMITED = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class RentalOffer:
    """A machine with cards in it, and what its hour costs."""

    key: str
    provider: str
    product: str
    card: str
    also: tuple[str, ...] = ()  # other cards it may turn out to be
    cards: int = 1
    up_to: int = 1  # so many can be had in one machine, each at this price
    usd_per_hour: float
    source: str
    date: date | None = None
    vcpus: int | None = None  # of the machine; with `up_to`, for each card

    def vcpus_of(self, count: int) -> int | None:
        """Of the machine that has so many."""
        return self.vcpus if self.vcpus is None or count <= self.cards else self.vcpus * count

    def hour_of(self, count: int) -> float | None:
        """An hour of a machine with at least so many; None: this one has fewer."""
        if count <= self.cards:
            return self.usd_per_hour
        return self.usd_per_hour * count if self.cards == 1 and count <= self.up_to else None

    @property
    def words(self) -> str:
        """'HF Jobs l4x1'."""
        return f"{self.provider} {self.product}".strip()


@cache
def public_offers() -> tuple[RentalOffer, ...]:
    """The table that hfopt brings."""
    path = Path(__file__).with_name("prices.toml")
    return _offers(tomllib.loads(path.read_text(encoding="utf-8")), path)


def read_offers(path: Path) -> tuple[RentalOffer, ...]:
    """The user's own prices: YAML, JSON or TOML, in one of the two forms."""
    try:
        text = path.read_text(encoding="utf-8")
        data = _parsed(text, path.suffix.lower())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"{path}: the prices cannot be read: {error}") from error
    if isinstance(data, Mapping) and isinstance(data.get("providers"), Sequence):
        return _offers(data, path)
    if not isinstance(data, Mapping) or not data or not all(_is_price(price) for price in data.values()):
        raise ConfigError(f"{path}: prices are {_FORM}")
    return tuple(_own(str(name), float(price), path) for name, price in data.items())


def of_providers(offers: Iterable[RentalOffer], keys: Sequence[str]) -> tuple[RentalOffer, ...]:
    """Those of the providers named, by key or by name; all where none is named."""
    offers = tuple(offers)
    wanted = {key.strip().lower() for key in keys if key.strip()}
    known = {key for offer in offers for key in (offer.key.lower(), offer.provider.lower())}
    if unknown := sorted(wanted - known):
        keys_there = ", ".join(dict.fromkeys(offer.key for offer in offers))
        raise ConfigError(f"--provider {unknown[0]} has no price in the table", hint=f"one of: {keys_there}")
    return tuple(offer for offer in offers if not wanted or offer.key.lower() in wanted or offer.provider.lower() in wanted)


def cheapest(offers: Iterable[RentalOffer], card: str, count: int) -> RentalOffer | None:
    """The cheapest machine with so many of this card; one that is surely it comes before one that may be."""
    able = [offer for offer in offers if card in (offer.card, *offer.also) and offer.hour_of(count) is not None]
    return min(able, key=lambda offer: (offer.hour_of(count) or 0.0, offer.card != card), default=None)


def of_card(offers: Iterable[RentalOffer], card: str) -> tuple[RentalOffer, ...]:
    """Every offer of one of these cards or of a machine with several, the cheapest for each card first."""
    return tuple(sorted((one for one in offers if card in (one.card, *one.also)), key=lambda one: one.usd_per_hour / one.cards))


def rentable(offers: Iterable[RentalOffer], count: int) -> tuple[str, ...]:
    """The cards somebody rents out so many of, each once."""
    return tuple(dict.fromkeys(offer.card for offer in offers if offer.hour_of(count) is not None))


def _parsed(text: str, suffix: str) -> Any:
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix == ".json":
        return json.loads(text)
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _offers(data: Mapping[str, Any], path: Path) -> tuple[RentalOffer, ...]:
    try:
        return tuple(_offer(provider, one, path) for provider in data["providers"] for one in provider["offers"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: prices are {_FORM}; missing or misplaced: {error}") from error


def _offer(provider: Mapping[str, Any], one: Mapping[str, Any], path: Path) -> RentalOffer:
    price, cards, up_to, vcpus = one["usd"], one.get("cards", 1), one.get("up_to", 1), one.get("vcpus")
    if not _is_price(price) or not all(isinstance(count, int) and count >= 1 for count in (cards, up_to, vcpus or 1)):
        raise ConfigError(f"{path}: {one.get('product', one['card'])}: a price, a number of cards or of vCPUs is not a positive number")
    when = one.get("date", provider.get("date"))
    return RentalOffer(
        key=str(provider.get("key", provider["name"])),
        provider=str(provider["name"]),
        product=str(one.get("product", "")),
        card=_card(str(one["card"]), path),
        also=tuple(_card(str(name), path) for name in one.get("also", ())),
        cards=cards,
        up_to=up_to,
        vcpus=vcpus,
        usd_per_hour=float(price),
        source=str(one.get("source", provider.get("source", path))),
        date=when if isinstance(when, date) else None,
    )


def _own(card: str, price: float, path: Path) -> RentalOffer:
    return RentalOffer(key="own", provider="", product="", card=_card(card, path), up_to=_UNLIMITED, usd_per_hour=price, source=str(path))


def _card(name: str, path: Path) -> str:
    """The catalog's name for it."""
    if name.strip().lower() == "cpu":
        return "CPU"
    try:
        return lookup(name).gpu.name
    except HardwareError as error:
        raise ConfigError(f"{path}: {error}", hint=error.hint) from error


def _is_price(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
