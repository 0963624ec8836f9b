"""The catalog of cards (gpus.toml), and finding one in it by any reasonable name.

What a card is called, forgivingly: a name becomes a set of words in which spelling, order and vendor prefixes do not matter. 'NVIDIA
GeForce RTX 4060 Laptop GPU', 'rtx 4060 laptop' and '4060-Mobile' are all {4060, laptop}; 'A100-SXM4-80GB' is {a100, sxm, 80gb}.

gpus.toml, read: one entry per card, with peaks computed from SMs, clocks and the architecture's rates. peak = SMs × operations per SM and
clock × clock. A MIG instance is an entry of its own: SMs for its peaks, memory slices for its bandwidth.

A name that fits several cards of different memory is refused with the list; if they differ only in form factor (A100-80GB: SXM or PCIe)
the slowest is taken and that is said, so that no speed is promised in vain.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfopt.errors import HardwareError
from hfopt.units import MIB, format_bytes

if TYPE_CHECKING:
    from hfopt.schema import Gpu


_NOISE = frozenset(
    {"nvidia", "geforce", "rtx", "gtx", "tesla", "gpu", "graphics", "card", "generation", "gen", "edition", "design", "with"}
    | {"hbm2", "hbm2e", "hbm3e"}  # but not hbm3: it tells the H100 SXM from the H100 PCIe
)
_SYNONYMS = {"mobile": "laptop", "notebook": "laptop", "ws": "workstation"}
_REWRITES = (
    (r"(\d[a-z]*(?:[\s_-]+[a-z]+)?)[\s_-]+(\d{1,3})$", r"\1 \2gb"),  # 'A100-80', but not 'GTX 980'
    (r"titan[\s_-]*(rtx|xp|x|v)\b", r"titan\1"),  # here 'rtx' is the name
    (r"max[\s_-]*q", "maxq"),
    (r"(?<![.\d])(\d+)\s*gi?b\b", r" \1gb "),  # but not in the MIG profile 1g.5gb
    (r"\bsxm\d?\b", "sxm"),
    (r"\bpci-?e\b", "pcie"),
    (r"\b(rtx|gtx)(?=[a\d])", r"\1 "),
    (r"\b(\d{4})(ti|super|tisuper|m|d|s)\b", r"\1 \2"),
    (r"\b(\d{4})\s*(ti)?\s*m\b", r"\1 \2 laptop"),
    (r"\b(\d{4}(?:\s*ti)?)\s*s\b", r"\1 super"),
    (r"\btisuper\b", "ti super"),
)
_SIZE = r"(\d+)gb"


@lru_cache(maxsize=1024)
def words(name: str) -> frozenset[str]:
    """The words of a name that tell cards apart."""
    return frozenset(_in_order(name))


def shorthand(name: str) -> str:
    """The same as one word, to be typed: 'GeForce RTX 3070 Laptop' -> '3070-laptop'."""
    return "-".join(_in_order(name))


def _in_order(name: str) -> list[str]:
    text = name.lower()
    for pattern, replacement in _REWRITES:
        text = re.sub(pattern, replacement, text)
    found = re.findall(r"\d+g\.\d+gb|[a-z]*\d+[a-z]*|[a-z]+", text)
    return [_SYNONYMS.get(word, word) for word in found if word not in _NOISE]


def is_mig(found: frozenset[str]) -> bool:
    """Whether the words name a MIG instance ('mig', '1g.5gb') and not a whole card."""
    return "mig" in found or any(re.fullmatch(r"\d+g\.\d+gb", word) for word in found)


def size_gb(found: frozenset[str]) -> int | None:
    """The memory size among the words ('80gb' -> 80), if there is one."""
    return next((int(match[1]) for word in found if (match := re.fullmatch(_SIZE, word))), None)


def without_size(found: frozenset[str]) -> frozenset[str]:
    return frozenset(word for word in found if not re.fullmatch(_SIZE, word))


def plain(name: str) -> str:
    """A product name as a key: lower case, one space, no vendor prefix (drivers before 465 left 'NVIDIA' out) and no trailing 'GPU'."""
    text = " ".join(name.lower().replace("(tm)", "").split())
    return text.removeprefix("nvidia ").removesuffix(" gpu")


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PCIE_BYTES_PER_S_PER_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""One direction, after 8b/10b (1, 2), 128b/130b (3 to 5) or FLIT (6) coding: PCI Express Base Specification 6.0."""


class CatalogEntry:
    """A card and every name it goes by. `figures` are the arguments of schema.Gpu, so that listing cards need not load the schema."""

    def __init__(self, figures: Mapping[str, Any], nvml_names: Iterable[str]) -> None:
        self.figures = figures
        self.names: tuple[str, ...] = (figures["name"], *nvml_names)

    @cached_property
    def gpu(self) -> Gpu:
        from hfopt.schema import Gpu

        return Gpu(**self.figures)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def spellings(self) -> tuple[frozenset[str], ...]:
        return tuple(words(name) for name in self.names)


@cache
def table() -> Mapping[str, Any]:
    """The file as it is, read once."""
    read: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
    return read


@cache
def entries() -> tuple[CatalogEntry, ...]:
    """Every card, in the file's order."""
    architectures = table()["architectures"]
    return tuple(_entry(card, architectures[card["architecture"]]) for card in table()["cards"])


@cache
def mig_entries() -> tuple[CatalogEntry, ...]:
    """The MIG instances of the cards that can be split, as cards of their own."""
    whole = {entry.name: entry for entry in entries()}
    return tuple(
        _instance(whole[name], profile, share, group)
        for group in table()["mig"]
        for name in group["cards"]
        for profile, share in group["profiles"].items()
    )


def fp32_per_sm_clock(capability: tuple[int, int] | None) -> int | None:
    """Float32 operations of an SM in a clock, which all architectures of a capability share; None: not known."""
    rates = (one["flops_per_sm_clock"]["fp32"] for one in table()["architectures"].values() if tuple(one["capability"]) == capability)
    return next(rates, None)


def driver_reserve_mib(memory_mib: int) -> float:
    """What the driver is taken to keep of a card's memory where no report says; gpus.toml says what it rests on."""
    reserve = table()["driver_reserve"]
    return float(min(reserve["fixed_mib"] + reserve["share"] * memory_mib, reserve["most_mib"]))


def _instance(card: CatalogEntry, profile: str, share: tuple[int, int, int], group: Mapping[str, Any]) -> CatalogEntry:
    """An instance's share of the card: SMs for the peaks, memory slices for the bandwidth."""
    mib, sms, slices = share
    of_card = card.figures
    figures = {
        **of_card,
        "name": f"{card.name} MIG {profile}",
        "memory_bytes": mib * MIB,
        "usable_bytes": mib * MIB,
        "sms": sms,
        "bandwidth_bytes_per_s": of_card["bandwidth_bytes_per_s"] * slices / group["slices"],
        "peak_flops": {precision: peak * sms / of_card["sms"] for precision, peak in of_card["peak_flops"].items()},
        "power_limit_w": of_card["power_limit_w"] * sms / of_card["sms"],
        "nvlink_bytes_per_s": None,
        "mig": True,
        "source": group["source"],
    }
    return CatalogEntry(figures, [f"{name} MIG {profile}" for name in card.names[1:]])


def _entry(card: Mapping[str, Any], architecture: Mapping[str, Any]) -> CatalogEntry:
    boost_hz, tensor_hz = card["boost_mhz"] * 1e6, card.get("tensor_mhz", card["boost_mhz"]) * 1e6
    figures = {
        "name": card["name"],
        "memory_bytes": card["memory_mib"] * MIB,
        "usable_bytes": int(card.get("usable_mib", card["memory_mib"] - driver_reserve_mib(card["memory_mib"])) * MIB),
        "capability": (architecture["capability"][0], architecture["capability"][1]),
        "sms": card["sms"],
        "bandwidth_bytes_per_s": card["bandwidth_gb_s"] * 1e9,
        "peak_flops": {
            precision: card["sms"] * rate * (boost_hz if precision == "fp32" else tensor_hz)
            for precision, rate in architecture["flops_per_sm_clock"].items()
        },
        "power_limit_w": card["power_w"],
        "pcie_bytes_per_s": PCIE_BYTES_PER_S_PER_LANE[card["pcie_generation"]] * card["pcie_lanes"],
        "nvlink_bytes_per_s": card["nvlink_gb_s"] * 1e9 if "nvlink_gb_s" in card else None,
        "nvlink_by_bridge": card.get("nvlink_bridge", False),
        "catalog_name": card["name"],
        "source": card["source"],
    }
    return CatalogEntry(figures, card.get("nvml", ()))


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


def matching(name: str) -> tuple[CatalogEntry, ...]:
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


def estimated(gpu: Gpu, *, cores: int | None, clock_mhz: float | None) -> Gpu:
    """A card that is not in the catalog, its SMs and peaks estimated from its cores and clock at its architecture's lowest known rates."""
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

    def likeness(entry: CatalogEntry) -> float:
        """How well each word asked for is met by the card's best one, less a little for words that were not asked for."""
        has = without_size(words(entry.name))
        met = sum(max(SequenceMatcher(None, word, other).ratio() for other in has) for word in wanted) / len(wanted)
        return met - 0.02 * len(has - wanted)

    return tuple(entry.name for entry in sorted(entries(), key=likeness, reverse=True)[:count])


def _candidates(name: str) -> list[CatalogEntry]:
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
    kinds: tuple[Callable[[CatalogEntry], bool], ...] = (
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
    for vendor, named in OTHER_VENDORS.items():
        if re.search(named, name.lower()):
            return UnknownCardError(f"'{name}' is {vendor}: only NVIDIA's cards are known here", hint=OTHERS_HINT)
    hint = f"nearest: {', '.join(nearest(name))}; `hfopt gpus` lists all cards"
    return UnknownCardError(f"no card called '{name}' in the catalog", hint=hint)


OTHER_VENDORS = {
    "an accelerator of AMD": r"radeon|instinct|\bmi ?\d{2,3}[a-z]?\b|\brx ?\d{4}",
    "an accelerator of Intel": r"gaudi|habana|\barc\b|ponte vecchio|\bgpu max\b",
    "a chip of Google": r"\btpu",
    "a chip of Amazon": r"trainium|inferentia|\btrn\d|\binf\d",
    "a chip of Apple": r"apple|macbook|\bm[1-9]( (pro|max|ultra))?$",
    "a chip of Huawei": r"ascend",
}
OTHERS_HINT = "by its memory alone: --vram 192; where it is installed, leave --gpu out"


def _listed(gpus: Iterable[Gpu], limit: int = 10) -> str:
    parts = [f"{gpu.name} ({format_bytes(gpu.memory_bytes)})" for gpu in gpus]
    return ", ".join(parts[:limit]) + (f" and {len(parts) - limit} more" if len(parts) > limit else "")
