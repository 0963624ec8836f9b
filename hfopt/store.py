"""Answers that cost a trace, kept on disk as plain JSON: what is in them is checked before it is believed, and nothing in them is ever run.

An entry is found by its parts (model config, settings, …: anything JSON can say) together with the environment: the versions of the
packages a trace rests on, and a digest of hfopt's own source, so that neither an upgrade nor an edit of hfopt meets an old answer.
Frozen values become JSON and come back: dataclasses of a given list, tuples, lists, mappings and numpy arrays; nothing else is ever made.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib.resources import files as resources
from numbers import Integral
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


_LIST, _DICT, _SHARED, _ARRAY, _ROWS, _SET = "$list", "$dict", "$shared", "$array", "$rows", "$set"
_MANY = 16  # entries of a mapping from which on equal values are written once
_DTYPES = ("int64", "float64", "bool")
_PLAIN = (str, int, float, bool, type(None))


def plain(value: Any) -> Any:
    """As JSON for others, who know none of our types: an object for a dataclass, a list for what has an order or is a set, null for a
    number that is none; nothing of it is read back."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value)


class NotPlainError(ValueError):
    """A value that this JSON does not know, or a JSON that is not ours."""


def to_json(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple:
        return _rows(value) if len(value) > 1 and is_dataclass(value[0]) else [to_json(item) for item in value]
    if kind is list:
        return {_LIST: to_json(tuple(value))}
    if kind is frozenset:
        return {_SET: [to_json(item) for item in sorted(value)]}
    if is_dataclass(value):
        return {kind.__name__: _values(value)}
    if isinstance(value, Mapping):
        if len(value) >= _MANY and (shared := _shared(value)) is not None:
            return {_SHARED: shared}
        return {_DICT: [[to_json(key), to_json(item)] for key, item in value.items()]}
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        if not getattr(value, "shape", ()):  # one number of numpy's
            return value.item()
        if value.ndim == 1 and str(value.dtype) in _DTYPES:
            return {_ARRAY: [str(value.dtype), value.tolist()]}
    raise NotPlainError(f"{kind.__name__} has no place in this JSON")


def from_json(data: Any, classes: Iterable[type]) -> Any:
    """Raises NotPlainError where it is not what `to_json` makes of these classes."""
    return _Reading(classes).value(data)


class _Reading:
    def __init__(self, classes: Iterable[type]) -> None:
        self._classes = {one.__name__: one for one in classes}

    def value(self, data: Any) -> Any:
        if isinstance(data, list):
            return tuple(self.value(item) for item in data)
        if not isinstance(data, dict):
            return data
        if len(data) != 1:
            raise NotPlainError("an object with one key says what it is")
        ((kind, inside),) = data.items()
        try:
            return self._made(kind, inside)
        except (TypeError, ValueError, OverflowError) as error:
            raise NotPlainError(f"{kind}: {error}") from error

    def _made(self, kind: str, inside: Any) -> Any:
        if kind == _LIST:
            return list(self.value(inside))
        if kind == _SET:
            return frozenset(self.value(inside))
        if kind == _DICT:
            return {self.value(key): self.value(item) for key, item in inside}
        if kind == _SHARED:
            keys, values, which = inside
            made = self.value(values)
            return {key: made[place] for key, place in zip(self.value(keys), which, strict=True)}
        if kind == _ARRAY:
            return _array(*inside)
        if kind == _ROWS:
            name, rows = inside
            return tuple(self._object(name, row) for row in rows)
        return self._object(kind, inside)

    def _object(self, name: str, row: Any) -> Any:
        if name not in self._classes or not isinstance(row, list):
            raise NotPlainError(f"{name} is not expected here")
        made = self._classes[name]
        return made(**{field: self.value(item) for field, item in zip(_fields(made), row, strict=True)})


def _shared(value: Mapping[Any, Any]) -> list[Any] | None:
    """Keys, different values, and which of these each key has; None where values cannot be compared."""
    places: dict[Any, int] = {}
    try:
        which = [places.setdefault((type(item), item), len(places)) for item in value.values()]
    except TypeError:
        return None
    return [[to_json(key) for key in value], [to_json(item) for _, item in places], which]


def _rows(value: tuple[Any, ...]) -> Any:
    kind = type(value[0])
    if any(type(item) is not kind for item in value):
        return [to_json(item) for item in value]
    return {_ROWS: [kind.__name__, [_values(item) for item in value]]}


def _values(value: Any) -> list[Any]:
    kind: Any = type(value)
    return [to_json(getattr(value, name)) for name in _fields(kind)]


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if not field.name.startswith("_") and field.init)


def _array(dtype: str, numbers: Any) -> Any:
    import numpy as np

    if dtype not in _DTYPES or not isinstance(numbers, list):
        raise NotPlainError(f"no array of {dtype} is expected")
    made = np.array(numbers, dtype=dtype)
    if made.ndim != 1:
        raise NotPlainError("arrays have one dimension")
    return made
