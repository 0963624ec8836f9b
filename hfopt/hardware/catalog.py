"""Finding a card in the catalog by any reasonable name, the user's or NVML's.

A name that fits several cards of different memory is refused with the list; if they differ only in form factor (A100-80GB: SXM or PCIe)
the slowest is taken and that is said, so that no speed is promised in vain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hfopt.errors import HardwareError
from hfopt.hardware.names import is_mig, plain, size_gb, without_size, words
from hfopt.hardware.table import Entry, entries, mig_entries, table
from hfopt.units import format_bytes

if TYPE_CHECKING:
    from hfopt.schema import Gpu


class UnknownCardError(HardwareError):
    """No card of that name; the hint has the nearest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """The card a name was taken for, and what was assumed."""

    gpu: Gpu
    note: str | None = None


def cards() -> tuple[Gpu, ...]:
    """Every card of the catalog, in the file's order."""
    return tuple(entry.gpu for entry in entries())


def find(name: str) -> Gpu:
    """The card of that name; an ambiguous or unknown one is a HardwareError that lists the nearest."""
    return lookup(name).gpu


def matching(name: str) -> tuple[Entry, ...]:
    """All cards the name fits equally well, at least one."""
    found = _candidates(name)
    if not found:
        raise _unknown(name)
    return tuple(found)


def lookup(name: str, *, memory_bytes: int | None = None) -> Match:
    """As find(), with what was assumed; a memory size helps to tell variants apart."""
    found = _candidates(name)
    if memory_bytes is not None and len(found) > 1:
        found = [entry for entry in found if _about_equal(entry.gpu.memory_bytes, memory_bytes)] or found
    if not found:
        raise _unknown(name)
    if len(found) == 1:
        return Match(gpu=found[0].gpu)
    gpus = [entry.gpu for entry in found]
    if len({(gpu.memory_bytes, gpu.capability) for gpu in gpus}) > 1:
        raise HardwareError(f"'{name}' can mean several cards: {_listed(gpus)}", hint="write one of these names")
    slowest = min(gpus, key=lambda gpu: (gpu.peak_flops["fp16"], gpu.bandwidth_bytes_per_s or 0))
    others = ", ".join(gpu.name for gpu in gpus if gpu is not slowest)
    return Match(gpu=slowest, note=f"'{name}' is taken for the {slowest.name}, the slowest of that name and memory (also: {others})")


def identify(product_name: str, memory_bytes: int) -> Gpu | None:
    """The card NVML names so. Variants under one product name are told apart by their memory; None: not in the catalog."""
    key, known_words = plain(product_name), words(product_name)
    found = [entry.gpu for entry in entries() if key in map(plain, entry.names)]
    found = found or [entry.gpu for entry in entries() if known_words in entry.spellings]
    return min(found, key=lambda gpu: (abs(gpu.memory_bytes - memory_bytes), gpu.peak_flops["fp32"]), default=None)


def reckon(gpu: Gpu, *, cores: int | None, clock_mhz: float | None) -> Gpu:
    """A card that is not in the catalog, with SMs and peaks reckoned from its cores and clock at its architecture's lowest known rates."""
    if gpu.capability is None or not cores or not clock_mhz:
        return gpu
    family = [one for one in table()["architectures"].values() if one["capability"][0] == gpu.capability[0]]
    kin = [one for one in family if tuple(one["capability"]) == gpu.capability] or family
    if not kin:
        return gpu
    rates = {precision: min(one["flops_per_sm_clock"][precision] for one in kin) for precision in kin[0]["flops_per_sm_clock"]}
    sms = cores * 2 // rates["fp32"]
    return replace(gpu, sms=sms, peak_flops={precision: sms * rate * clock_mhz * 1e6 for precision, rate in rates.items()})


def nearest(name: str, count: int = 5) -> tuple[str, ...]:
    """The catalog names most like this one."""
    from difflib import SequenceMatcher

    wanted = without_size(words(name)) or {name.lower()[:64]}

    def likeness(entry: Entry) -> float:
        """How well each word asked for is met by the card's best one, less a little for words that were not asked for."""
        has = without_size(words(entry.name))
        met = sum(max(SequenceMatcher(None, word, other).ratio() for other in has) for word in wanted) / len(wanted)
        return met - 0.02 * len(has - wanted)

    return tuple(entry.name for entry in sorted(entries(), key=likeness, reverse=True)[:count])


def _candidates(name: str) -> list[Entry]:
    """Entries that the name fits, the best kind of fit only: the full name, the same words, the same but for the size, more words.

    A size may stand for a card's memory though its name has none ('3090 24GB'); in the name of a MIG instance it is the whole card's.
    """
    wanted = words(name)
    if not without_size(wanted):
        return []
    if is_mig(wanted):
        fitting, core = list(mig_entries()), wanted
    else:
        size, core = size_gb(wanted), without_size(wanted)
        fitting = [entry for entry in entries() if size is None or is_sold_as(entry.figures["memory_bytes"], size)]
    kinds: tuple[Callable[[Entry], bool], ...] = (
        lambda entry: plain(entry.name) == plain(name),
        lambda entry: plain(name) in map(plain, entry.names),
        lambda entry: wanted == words(entry.name),
        lambda entry: wanted in entry.spellings,
        lambda entry: core == without_size(words(entry.name)),
        lambda entry: any(core <= spelling for spelling in entry.spellings),
    )
    for fits in kinds:
        if found := [entry for entry in fitting if fits(entry)]:
            return found
    return []


def is_sold_as(memory_bytes: int, gigabytes: float) -> bool:
    """15360 MiB is sold as 16 GB: drivers and ECC (1/16) take a part, and vendors round."""
    gib = memory_bytes / (1 << 30)
    return gib - 0.5 <= gigabytes <= gib * 1.075 + 0.6


def _about_equal(left: int, right: int) -> bool:
    return abs(left - right) <= 0.1 * right


def _unknown(name: str) -> UnknownCardError:
    several = re.fullmatch(r"\s*(\d{1,4})\s*[x×*]\s*(\D.*)", name)
    if several and _candidates(several[2]):
        return UnknownCardError(
            f"no card called '{name}' in the catalog", hint=f"several cards: --gpu '{several[2]}' --num-gpus {several[1]}"
        )
    hint = f"nearest: {', '.join(nearest(name))}; `hfopt gpus` lists all cards"
    return UnknownCardError(f"no card called '{name}' in the catalog", hint=hint)


def _listed(gpus: Iterable[Gpu], limit: int = 10) -> str:
    parts = [f"{gpu.name} ({format_bytes(gpu.memory_bytes)})" for gpu in gpus]
    return ", ".join(parts[:limit]) + (f" and {len(parts) - limit} more" if len(parts) > limit else "")
