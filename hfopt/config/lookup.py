"""Everything a config says, by name: look a fact up under any of its names, wherever in the file it stands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hfopt.config.yaml_document import NodePath, shared_depth


class Facts:
    """All values of a document but those in `left_out` (the profiles not meant). Of one name's values the one nearest to `near` counts."""

    def __init__(self, data: dict[str, Any], *, near: NodePath = (), left_out: Sequence[NodePath] = ()) -> None:
        found = [item for item in _flatten(data, ()) if not any(item[0][: len(path)] == path for path in left_out)]
        found.sort(key=lambda item: (-shared_depth(item[0], near), len(item[0])))
        self._by_name: dict[str, list[tuple[NodePath, Any]]] = {}
        self.asked: set[str] = set()  # the names that somebody looked up
        for path, value in found:
            self._by_name.setdefault(path[-1].lower(), []).append((path, value))

    def get(self, *names: str, under: Iterable[str] = (), not_under: Iterable[str] = ()) -> Any:
        """The first value that is not null under one of the names."""
        return next((value for _, value in self.all(*names, under=under, not_under=not_under) if value is not None), None)

    def all(self, *names: str, under: Iterable[str] = (), not_under: Iterable[str] = ()) -> Iterator[tuple[NodePath, Any]]:
        inside, outside = set(under), set(not_under)
        self.asked.update(names)
        for name in names:
            for path, value in self._by_name.get(name, ()):
                parents = {part.lower() for part in path[:-1]}
                if (not inside or parents & inside) and not parents & outside:
                    yield path, value

    def has(self, *names: str) -> bool:
        self.asked.update(names)
        return any(name in self._by_name for name in names)

    def leaves(self) -> Iterator[tuple[NodePath, Any]]:
        """Every value that is no mapping, with its path."""
        return (item for found in self._by_name.values() for item in found if not isinstance(item[1], dict))

    def text(self, *names: str, under: Iterable[str] = (), not_under: Iterable[str] = ()) -> str | None:
        values = (value for _, value in self.all(*names, under=under, not_under=not_under))
        return next((value.strip() for value in values if isinstance(value, str) and value.strip() and value != "None"), None)

    def whole(self, *names: str, under: Iterable[str] = (), not_under: Iterable[str] = ()) -> int | None:
        """A positive whole number, also where it was written as text."""
        for _, value in self.all(*names, under=under, not_under=not_under):
            if (number := whole_number(value)) is not None and number > 0:
                return number
        return None

    def number(self, *names: str) -> float | None:
        for _, value in self.all(*names):
            if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < 64):
                return float(value)
        return None

    def true(self, *names: str) -> bool:
        return any(value is True for _, value in self.all(*names))

    def false(self, *names: str) -> bool:
        return any(value is False for _, value in self.all(*names))


def whole_number(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if value.bit_length() < 64 else None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        try:
            return int(value.replace("_", ""))
        except ValueError:
            return None
    return None


def _flatten(value: Any, path: NodePath) -> Iterator[tuple[NodePath, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(key, str):
                yield (*path, key), inner
                yield from _flatten(inner, (*path, key))
    elif isinstance(value, list):
        for position, inner in enumerate(value[:50]):
            if isinstance(inner, dict):
                yield from _flatten(inner, (*path, str(position)))
