"""Answers that cost a trace, kept on disk: what is in them is checked before it is believed, and nothing in them is ever run.

An entry is found by its parts (model config, settings, …: anything JSON can say) together with the environment: the versions of the
packages a trace rests on, and a digest of hfopt's own source, so that neither an upgrade nor an edit of hfopt meets an old answer. Where
one answer serves many cards, its `condition` says which; several entries with the same parts and different conditions stand side by side.

The file: a SHA-256 of all that follows, a line of JSON that says what it is, then JSON compressed by zlib. A file that is cut short or
changed, that belongs to somebody else or that others may write is no answer: it is removed where it can be, and the question is asked
anew. Files are written whole and renamed into place, so several processes may share the folder; when it grows beyond its bound, what
was not used for longest goes. A store that cannot be read or written is as good as none: no fault here stops a plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from hfopt import files
from hfopt.compat.versions import package_version

Parts = Mapping[str, Any]
Condition = Any  # as JSON can say it

OFF = "HFOPT_NO_CACHE"  # set to anything but 0: nothing is read from the store and nothing written
MOST_BYTES = 256 << 20
_KEPT_SHARE = 0.9  # of the bound, after old entries went: not one by one at every write
_MOST_ENTRY_BYTES = 512 << 20  # unpacked: more is no trace of ours
_FORMAT = 1
_SUFFIX = ".entry"
_PACKAGES = (
    *("torch", "transformers", "peft", "trl", "accelerate", "tokenizers", "torchvision"),
    *("bitsandbytes", "deepspeed", "liger_kernel", "flash_attn", "triton", "causal_conv1d", "mamba_ssm"),
)
"""What a traced step is made of, or chooses its code by the presence of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredEntry:
    """One file, as its header describes it."""

    path: Path
    label: str
    size_bytes: int
    used_s: float  # when it was last written or asked for, as time.time counts


class Store:
    def __init__(self, folder: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self.folder = folder
        self.most_bytes = most_bytes

    def get(self, parts: Parts, accepts: Callable[[Condition], bool] = lambda condition: True) -> Any | None:
        """What was put under these parts in this environment, on a condition that is accepted; None where there is none to be believed."""
        name = _digest(parts)
        for path in sorted(self.folder.glob(f"{name}-*{_SUFFIX}")):
            found = _read(path)
            if found is None:
                with suppress(OSError):
                    path.unlink()
                continue
            header, packed = found
            if header["parts"] != name or not accepts(header["condition"]):
                continue
            value = _unpacked(packed)
            if value is not None:
                with suppress(OSError):
                    os.utime(path)
                return value
        return None

    def put(self, parts: Parts, value: Any, *, label: str, condition: Condition = None) -> None:
        """`label` is for people; `value` and `condition` are what JSON can say (tuples become lists)."""
        name = _digest(parts)
        header = {"format": _FORMAT, "parts": name, "label": label, "condition": condition}
        rest = _line(header) + zlib.compress(_line(value), 6)
        path = self.folder / f"{name}-{hashlib.sha256(_line(condition)).hexdigest()[:8]}{_SUFFIX}"
        with suppress(OSError):
            files.make_private(self.folder)
            files.write_whole(path, hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest, mode=0o600)
            self._evict()

    def entries(self) -> Iterator[StoredEntry]:
        """The most recently used first; what cannot be believed has no label."""
        for path, info in sorted(self._files(), key=lambda item: -item[1].st_mtime):
            found = _read(path)
            label = str(found[0]["label"]) if found is not None else ""
            yield StoredEntry(path=path, label=label, size_bytes=info.st_size, used_s=info.st_mtime)

    def clear(self) -> int:
        """Removes all entries; how many there were."""
        count = 0
        for path, _ in self._files():
            with suppress(OSError):
                path.unlink()
                count += 1
        return count

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        found = []
        for path in self.folder.glob(f"*{_SUFFIX}"):
            with suppress(OSError):  # another process removed it
                found.append((path, path.stat()))
        return found

    def _evict(self) -> None:
        found = sorted(self._files(), key=lambda item: item[1].st_mtime)
        total = sum(info.st_size for _, info in found)
        if total <= self.most_bytes:
            return
        for path, info in found[:-1]:  # the newest is the one that was just written
            if total <= _KEPT_SHARE * self.most_bytes:
                break
            with suppress(OSError):
                path.unlink()
            total -= info.st_size


def default_store() -> Store | None:
    """The user's own, below hfopt's cache folder; None where it is switched off."""
    return None if os.environ.get(OFF, "0") not in ("", "0") else Store(files.location("traces"))


@cache
def environment() -> dict[str, str | None]:
    """What must be the same for an answer to hold: read from metadata and files, nothing is imported."""
    return {**{name: package_version(name) for name in _PACKAGES}, "hfopt": source_digest()}


@cache
def source_digest() -> str:
    """Of hfopt as it is installed or checked out: code and tables."""
    digest = hashlib.sha256()
    root = Path(str(resources("hfopt")))
    for path in sorted(path for kind in ("*.py", "*.toml", "*.jsonl") for path in root.rglob(kind)):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def age_words(used_s: float) -> str:
    """How long ago that was: '5 min ago', '3 days ago'."""
    minutes = max(0, int(time.time() - used_s)) // 60
    if minutes < 60:
        return f"{minutes} min ago"
    return f"{minutes // 60} h ago" if minutes < 48 * 60 else f"{minutes // (24 * 60)} days ago"


def _digest(parts: Parts) -> str:
    return hashlib.sha256(_line({"format": _FORMAT, "environment": environment(), "parts": parts})).hexdigest()


def _line(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _read(path: Path) -> tuple[dict[str, Any], bytes] | None:
    """Header and packed value of a file that is whole and ours; None where it is neither."""
    try:
        with path.open("rb") as stream:
            info = os.fstat(stream.fileno())
            if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o022:
                return None
            digest, _, rest = stream.read().partition(b"\n")
    except OSError:
        return None
    if hashlib.sha256(rest).hexdigest().encode() != digest:
        return None
    line, _, packed = rest.partition(b"\n")
    header = _json(line)
    if not isinstance(header, dict) or header.get("format") != _FORMAT or not {"parts", "label", "condition"} <= header.keys():
        return None
    return header, packed


def _unpacked(packed: bytes) -> Any | None:
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(packed, _MOST_ENTRY_BYTES)
    except zlib.error:
        return None
    return _json(data) if unpacking.eof else None


def _json(data: bytes) -> Any | None:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
