"""OmegaConf's `${a.b}` inside one file, replaced by what it names; what needs a resolver, another file or the environment stays.

Source: OmegaConf 2.3, "Variable interpolation": absolute (`${a.b}`), relative to the key's own mapping (`${.b}`, each further dot one
mapping up), in brackets (`${a[b]}`, `${a.list[0]}`) and within text (`runs/${name}`). A backslash before it makes it plain text, and
`${name:…}` calls a resolver.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_REFERENCE = re.compile(r"(?<!\\)\$\{([^${}]*)\}")
_PATH = re.compile(r"\.*[\w\- @/]+(?:\.[\w\- @/]+|\[[\w\- ]+\])*")
_MOST_VALUES, _LONGEST_TEXT, _DEEPEST = 20_000, 10_000, 40
_ABSENT = object()
Keys = tuple[str, ...]


def interpolated(data: dict[Any, Any]) -> dict[Any, Any]:
    """The same data with every reference resolved that can be; the argument is not changed."""
    if not any("${" in text for text in _texts(data)):
        return data
    made: dict[Any, Any] = _Resolver(data).value(data, (), ())
    return made


def left_over(data: Any) -> tuple[str, ...]:
    """The references that are still there, each once: what another program fills in."""
    return tuple(dict.fromkeys(match[0] for text in _texts(data) for match in _REFERENCE.finditer(text)))


class _Resolver:
    """References may lead to references; a circle, or more than a config ever needs, stays text."""

    def __init__(self, root: dict[Any, Any]) -> None:
        self.root, self.budget = root, _MOST_VALUES

    def value(self, value: Any, at: Keys, trail: tuple[Keys, ...]) -> Any:
        self.budget -= 1
        if self.budget < 0 or len(trail) > _DEEPEST:
            return value
        if isinstance(value, dict):
            return {key: self.value(inner, (*at, str(key)), trail) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.value(inner, (*at, str(position)), trail) for position, inner in enumerate(value)]
        return self._text(value, at, trail) if isinstance(value, str) and "${" in value else value

    def _text(self, text: str, at: Keys, trail: tuple[Keys, ...]) -> Any:
        whole = _REFERENCE.fullmatch(text)
        if whole is not None:
            found = self._named(whole[1], at, trail)
            return text if found is _ABSENT else found
        for _ in range(_DEEPEST):  # an inner reference may give the name of an outer one
            changed = _REFERENCE.sub(lambda match: self._as_text(match, at, trail), text)
            if changed == text or len(changed) > _LONGEST_TEXT:
                break
            text = changed
            if (whole := _REFERENCE.fullmatch(text)) is not None:
                return self._text(text, at, trail)
        return text

    def _as_text(self, match: re.Match[str], at: Keys, trail: tuple[Keys, ...]) -> str:
        found = self._named(match[1], at, trail)
        if found is _ABSENT or found is None or isinstance(found, dict | list):
            return match[0]
        return str(found).lower() if isinstance(found, bool) else str(found)

    def _named(self, name: str, at: Keys, trail: tuple[Keys, ...]) -> Any:
        """_ABSENT: not in this file, a resolver's call, or a circle."""
        path = _path(name.strip(), at)
        if path is None or path in trail:
            return _ABSENT
        target: Any = self.root
        for part in path:
            target = _child(target, part)
            if target is _ABSENT:
                return _ABSENT
        found = self.value(target, path, (*trail, path))
        still = isinstance(found, str) and _REFERENCE.search(found) is not None
        return _ABSENT if still or found == "???" else found


def _path(name: str, at: Keys) -> Keys | None:
    if _PATH.fullmatch(name) is None:
        return None
    dots = len(name) - len(name.lstrip("."))
    base = at[: max(0, len(at) - dots)] if dots else ()
    parts = re.findall(r"[^.\[\]]+", name[dots:])
    return (*base, *(part.strip() for part in parts))


def _child(target: Any, part: str) -> Any:
    if isinstance(target, dict):
        return next((value for key, value in target.items() if str(key) == part), _ABSENT)
    if isinstance(target, list) and part.isdecimal() and int(part) < len(target):
        return target[int(part)]
    return _ABSENT


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)
