"""Two configs on the same cards: what of their keys differs, and what that does to memory, speed and whether they fit.

Each config is priced as it is written, nothing is searched; the traces of one config serve all cards. Two rates on one card are told apart
beyond what eight of ten such ratios were met within.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hfopt.hardware.detect import named
from hfopt.memory.trace_store import TraceStore
from hfopt.planner.choices import current_candidate
from hfopt.planner.device_figures import with_host
from hfopt.planner.request import Request, Subject, from_file
from hfopt.planner.target import device_of
from hfopt.redact import scrub
from hfopt.speed.efficiency import settings_error
from hfopt.store import default_store
from hfopt.units import format_bytes, format_percent, format_rate


@dataclass(frozen=True, kw_only=True, slots=True)
class AsWritten:
    """One config on one card, as it is written."""

    device_bytes: int
    budget_bytes: int
    fits: bool
    samples_per_s: float
    effective_batch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CardDiff:
    """Both configs on one card."""

    card: str
    first: AsWritten
    second: AsWritten

    @property
    def words(self) -> str:
        """'L4: +3.10 GiB (17.20 → 20.30 GiB), no longer fits, 8.0 % slower'."""
        grown = self.second.device_bytes - self.first.device_bytes
        sign = "+" if grown >= 0 else "-"
        both = f"{format_bytes(self.first.device_bytes)} → {format_bytes(self.second.device_bytes)}"
        memory = f"{sign}{format_bytes(abs(grown))} ({both})" if grown else f"the same memory ({format_bytes(self.first.device_bytes)})"
        return f"{self.card}: {memory}, {self._fits}, {self._speed}"

    @property
    def _fits(self) -> str:
        pair = self.first.fits, self.second.fits
        return {(True, True): "fits", (False, False): "fits neither way", (True, False): "no longer fits", (False, True): "fits now"}[pair]

    @property
    def _speed(self) -> str:
        ratio = self.second.samples_per_s / self.first.samples_per_s
        before, after = (format_rate(side.samples_per_s, "samples") for side in (self.first, self.second))
        if abs(ratio - 1) < 0.005:
            return f"as fast ({after})"
        apart = "" if max(ratio, 1 / ratio) > 1 + settings_error() else ", cannot be told apart"
        return (
            f"{format_percent(abs(1 - ratio))} {'faster' if ratio > 1 else 'slower'} ({before.removesuffix(' samples/s')} → {after}{apart})"
        )

    def to_json(self) -> dict[str, Any]:
        def one(side: AsWritten) -> dict[str, Any]:
            return {
                "peak_device_bytes": side.device_bytes,
                "budget_bytes": side.budget_bytes,
                "fits": side.fits,
                "samples_per_s": side.samples_per_s,
                "effective_batch": side.effective_batch,
            }

        return {"card": self.card, "first": one(self.first), "second": one(self.second), "words": self.words}


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigDiff:
    keys: tuple[tuple[str, Any, Any], ...]  # what the files say, None where one says nothing
    effective_batches: tuple[int, int]
    cards: tuple[CardDiff, ...]
    notes: tuple[str, ...] = ()


def diff_configs(first: Path, second: Path, names: Sequence[str], request: Request) -> ConfigDiff:
    """Both configs, priced for each card."""
    subjects = [from_file(path, replace(request, gpu=names[0])) for path in (first, second)]
    sides = [_on_cards(subject, names, request) for subject in subjects]
    cards = tuple(CardDiff(card=card, first=sides[0][card], second=sides[1][card]) for card in sides[0])
    left, right = subjects
    return ConfigDiff(
        keys=tuple(_keys(left.job.raw, right.job.raw)),
        effective_batches=(left.job.effective_batch, right.job.effective_batch),
        cards=cards,
        notes=tuple(dict.fromkeys((*left.notes, *right.notes))),
    )


def _on_cards(subject: Subject, names: Sequence[str], request: Request) -> Mapping[str, AsWritten]:
    traces = TraceStore(default_store())
    return dict(_on_card(subject, name, request, traces) for name in names)


def _on_card(subject: Subject, name: str, request: Request, traces: TraceStore) -> tuple[str, AsWritten]:
    hardware = with_host(named(name, count=request.num_gpus or 1), subject.named_host)
    subject = replace(subject, hardware=hardware)
    device = device_of(subject, request)
    pricing, candidate = device.pricing(subject, traces, lambda text: None), current_candidate(subject)
    time, memory = pricing.time(candidate), pricing.memory(candidate)
    written = AsWritten(
        device_bytes=memory.device_bytes,
        budget_bytes=device.budget_bytes,
        fits=pricing.fits(candidate),
        samples_per_s=time.samples_per_s,
        effective_batch=subject.job.effective_batch,
    )
    return device.name if device.gpu is not None else "CPU", written


def _keys(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in dict.fromkeys((*first, *second)):
        if first.get(key) != second.get(key):
            yield key, scrub(first.get(key), key), scrub(second.get(key), key)
