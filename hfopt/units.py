"""Bytes, seconds and rates: reading them from people and printing them for people.

MiB and GiB are 2**20 and 2**30 bytes and are printed as such; a vendor's GB (1e9) is converted where it is read.
"""

from __future__ import annotations

import re

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_SIZE = re.compile(r"^\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]i?b?|b)?\s*$", re.IGNORECASE)
_FACTORS = {"": 1, "b": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1 << 40}


def parse_bytes(text: str, *, default_unit: str = "") -> int:
    """'8', '8GiB', '512 MiB' -> bytes. GB is read as GiB: cards are sold as '24 GB' and have 24 GiB."""
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write for example 24GiB or 512MiB")
    unit = (match["unit"] or default_unit).lower()[:1]
    return int(float(match["number"]) * _FACTORS[unit])


_RATE = re.compile(r"^\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?)(?P<what>bit|b|byte)(?:/s|ps)?\s*$", re.IGNORECASE)


def parse_rate(text: str) -> float:
    """'400Gbit/s', '25GB/s' -> bytes/s, by powers of ten as links are sold; a lone small b, as in 100Gb/s, is a bit."""
    match = _RATE.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a rate; write for example 400Gbit/s or 25GB/s")
    factor = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}[match["unit"].lower()]
    bits = match["what"].lower() == "bit" or match["what"] == "b"
    return float(match["number"]) * factor / (8 if bits else 1)


_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(d|h|min|m|s)(?![a-z])\s*", re.IGNORECASE)
_SECONDS = {"d": 86400, "h": 3600, "min": 60, "m": 60, "s": 1}


def parse_duration(text: str) -> float:
    """'8h', '90m', '1h30m', '2 d' -> seconds."""
    parts = _DURATION.findall(text.strip())
    seconds = sum(float(number) * _SECONDS[unit.lower()] for number, unit in parts)
    if seconds <= 0 or _DURATION.sub("", text.strip()):
        raise ValueError(f"{text!r} is not a duration; write for example 8h, 90m or 1h30m")
    return seconds


def format_bytes(count: int) -> str:
    """1536 MiB -> '1.50 GiB'."""
    size = abs(count)
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= factor:
            return f"{count / factor:.2f} {unit}" if unit == "GiB" else f"{count / factor:.0f} {unit}"
    return f"{count} B"


def format_seconds(seconds: float) -> str:
    """0.0123 -> '12.3 ms', 95 -> '1 min 35 s', 7300 -> '2 h 2 min'."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def format_rate(per_second: float, what: str) -> str:
    """(1234.5, 'samples') -> '1,234 samples/s'; a rate that two decimals would make zero keeps two digits: 0.0031."""
    digits = 0 if per_second >= 100 else 1 if per_second >= 10 else 2
    return f"{per_second:.2g} {what}/s" if 0 < per_second < 0.095 else f"{per_second:,.{digits}f} {what}/s"


def format_energy(kwh: float) -> str:
    """0.19 -> '0.19 kWh', 0.0049 -> '4.9 Wh'; 0.1 kWh and more in kWh."""
    return f"{kwh:,.2f} kWh" if kwh >= 0.095 else f"{1000 * kwh:.2g} Wh"


def format_percent(share: float) -> str:
    """0.512 -> '51.2 %'."""
    return f"{100 * share:.1f} %"


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    if number < 1:
        raise ValueError(f"{number} has no divisors here")
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(small + [number // d for d in reversed(small) if d * d != number])
