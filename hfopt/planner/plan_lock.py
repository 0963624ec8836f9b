"""The lock of a plan: what went into it and what came out, in a file that a team keeps beside the config.

`hfopt plan CONFIG --lock FILE` writes it where there is none; where there is one the plan is made again and every difference is named:
the config's own keys, the card, versions of packages, the planned settings. Predictions count as different beyond a tolerance, since
they follow the installed packages to the last byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hfopt.compat import package_version
from hfopt.errors import ConfigError
from hfopt.planner.result import Plan
from hfopt.redact import scrub
from hfopt.units import format_bytes, format_percent, format_rate

FORMAT = 1
PACKAGES = ("torch", "transformers", "accelerate", "trl", "peft", "bitsandbytes", "deepspeed", "liger-kernel")
SETTINGS = (
    "per_device_batch",
    "accumulation",
    "precision",
    "checkpointing_every_n_layers",
    "optim",
    "torch_compile",
    "use_liger_kernel",
    "attn_implementation",
    "dataloader_num_workers",
)
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
    return json.dumps(lock, indent=2, ensure_ascii=False, default=str) + "\n"


def read_lock(path: Path) -> dict[str, Any]:
    """The lock in this file; what is none is one sentence."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
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
