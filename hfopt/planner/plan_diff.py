"""What differs: between two configs on the same cards, and between a plan and the lock that a team keeps of it.

Each config is priced as it is written, nothing is searched; the traces of one config serve all cards. Two rates on one card are told apart
beyond what eight of ten such ratios were met within.

`hfopt plan CONFIG --lock FILE` writes it where there is none; where there is one the plan is made again and every difference is named:
the config's own keys, the card, versions of packages, the planned settings. Predictions count as different beyond a tolerance, since
they follow the installed packages to the last byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hfopt.compat.versions import package_version
from hfopt.errors import ConfigError
from hfopt.hardware.detect import named
from hfopt.job.request import Request
from hfopt.job.subject import Subject, from_file
from hfopt.memory.trace_store import TraceStore
from hfopt.planner.choices import current_candidate
from hfopt.planner.result import Plan
from hfopt.pricing.target_device import device_of
from hfopt.redact import json_words, scrub
from hfopt.schema.outputs import CardDiffOutput, DiffOutput, SettingsOutput, SideOutput
from hfopt.speed.calibration import with_host
from hfopt.speed.device_speed import settings_error
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

    def to_json(self) -> CardDiffOutput:
        def one(side: AsWritten) -> SideOutput:
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

    def to_json(self) -> DiffOutput:
        first, second = self.effective_batches
        return {
            "keys": [{"key": key, "first": before, "second": after} for key, before, after in self.keys],
            "effective_batch": {"first": first, "second": second},
            "cards": [one.to_json() for one in self.cards],
            "notes": self.notes,
        }


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


FORMAT = 1
PACKAGES = ("torch", "transformers", "accelerate", "trl", "peft", "bitsandbytes", "deepspeed", "liger-kernel")
SETTINGS = (*SettingsOutput.__annotations__, "dataloader_num_workers")
"""What is planned, whatever of it the file said before: a file that was planned in place has the same lock."""
MEMORY_TOLERANCE, RATE_TOLERANCE = 0.01, 0.02
"""Below these a prediction is the same: PyTorch's allocator works in blocks of 2 MiB, and a rate is sure to some percent only."""


def lock_of(made: Plan, source: bytes) -> dict[str, Any]:
    """What is kept of a plan made from these bytes. Paths are left out, so that a lock means the same in every clone."""
    from hfopt import __version__

    facts = made.facts
    gpu, after, planned = facts.hardware.smallest, facts.after, made.to_json()["after"]
    arguments = {key: scrub(value, key) for key, value in facts.job.raw.items()}
    return {
        "format": FORMAT,
        "config": {"sha256": hashlib.sha256(source).hexdigest(), "arguments": arguments},
        "model": facts.job.model.name,
        "device": {
            "name": "CPU" if gpu is None else gpu.name,
            "memory_bytes": None if gpu is None else gpu.memory_bytes,
            "count": max(1, len(facts.hardware.gpus)),
        },
        "versions": {"hfopt": __version__} | {name: version for name in PACKAGES if (version := package_version(name)) is not None},
        "effective_batch": facts.effective_batch,
        "settings": {key: planned[key] for key in SETTINGS},
        "predicted": {
            "peak_device_bytes": after.memory.device_bytes,
            "samples_per_s": after.time.samples_per_s,
            "fits": after.fits,
        },
    }


def lock_text(lock: Mapping[str, Any]) -> str:
    return json_words(json.dumps(lock, indent=2, ensure_ascii=False, default=str)) + "\n"


def read_lock(path: Path) -> dict[str, Any]:
    """The lock in this file; what is none is one sentence."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a lock of hfopt: {error}", hint="remove it to lock the plan anew") from error
    sections = ("config", "device", "versions", "settings", "predicted")
    whole = isinstance(data, dict) and data.get("format") == FORMAT and all(isinstance(data.get(name), dict) for name in sections)
    if not whole:
        raise ConfigError(f"{path}: not a lock of this version of hfopt", hint="remove it to lock the plan anew")
    return data  # type: ignore[no-any-return]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """What is other than when it was locked, each in one sentence; () where nothing is."""
    new = json.loads(lock_text(new))  # as a file says it: tuples are lists
    return (
        *_config(old["config"], new["config"]),
        *_pairs("model", {"model": old.get("model")}, {"model": new.get("model")}),
        *_device(old["device"], new["device"]),
        *_pairs("version of", old["versions"], new["versions"]),
        *_pairs("effective batch", {"": old.get("effective_batch")}, {"": new.get("effective_batch")}),
        *_pairs("planned", old["settings"], new["settings"]),
        *_predicted(old["predicted"], new["predicted"]),
    )


def _config(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    if old.get("sha256") == new.get("sha256"):
        return
    found = list(_pairs("config", old.get("arguments") or {}, new.get("arguments") or {}))
    yield from found or ["config: the file was changed, none of its training arguments"]


def _device(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    yield from _pairs("device", {"name": old.get("name"), "count": old.get("count")}, {"name": new["name"], "count": new["count"]})
    if old.get("name") == new["name"] and old.get("memory_bytes") != new["memory_bytes"]:
        yield f"device memory: {_bytes(old.get('memory_bytes'))} → {_bytes(new['memory_bytes'])}"


def _pairs(what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for key in dict.fromkeys((*old, *new)):
        if old.get(key) != new.get(key):
            yield f"{f'{what} {key}'.strip() if key != what else what}: {_value(old, key)} → {_value(new, key)}"


def _value(mapping: Mapping[str, Any], key: str) -> str:
    value = mapping.get(key)
    return "unset" if value is None else json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value


def _predicted(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    memory, rate = (_change(old.get(key), new[key]) for key in ("peak_device_bytes", "samples_per_s"))
    if memory is None or abs(memory) > MEMORY_TOLERANCE:
        yield f"predicted memory: {_bytes(old.get('peak_device_bytes'))} → {_bytes(new['peak_device_bytes'])}{_percent(memory)}"
    if rate is None or abs(rate) > RATE_TOLERANCE:
        before = old.get("samples_per_s")
        words = format_rate(before, "samples") if isinstance(before, int | float) else "unknown"
        yield f"predicted rate: {words} → {format_rate(new['samples_per_s'], 'samples')}{_percent(rate)}"
    if old.get("fits") != new["fits"]:
        yield f"fits: {_value(old, 'fits')} → {_value(new, 'fits')}"


def _change(before: Any, after: float) -> float | None:
    return after / before - 1 if isinstance(before, int | float) and before else None


def _percent(change: float | None) -> str:
    return "" if change is None else f" ({'+' if change >= 0 else ''}{format_percent(change)})"


def _bytes(count: Any) -> str:
    return format_bytes(count) if isinstance(count, int) else "unknown"
