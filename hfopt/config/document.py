"""A YAML document with the place of every key and value in its text.

The tree of entries is as written, before merge keys are flattened: an entry knows where it stands, whether its value is an alias, and which
mappings it merges. The data beside it is what PyYAML's safe loader makes of the same text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from hfopt.schema import Place

NodePath = tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One value. `start` and `end` are offsets of its own characters (a tag or an anchor included); `end` is after its last leaf."""

    kind: Literal["scalar", "mapping", "sequence"]
    start: int
    end: int
    style: str | None = None  # scalars: None plain, ' " | >
    flow: bool = False
    tag: str = ""
    anchor: str | None = None
    entries: tuple[Entry, ...] = ()  # of a mapping
    items: tuple[Use, ...] = ()  # of a sequence

    def find(self, key: str) -> Entry | None:
        """The entry that counts: PyYAML lets the last one win."""
        return next((entry for entry in reversed(self.entries) if entry.key == key and not entry.merge), None)

    def definer(self, key: str) -> Node | None:
        """The mapping that writes the key: itself, or the first that it merges."""
        if self.find(key) is not None:
            return self
        return next((found for parent in self.merged() if (found := parent.definer(key)) is not None), None)

    def merged(self) -> Iterator[Node]:
        """The mappings its `<<` entries name."""
        for entry in self.entries:
            if entry.merge:
                yield from [entry.value.node] if entry.value.node.kind == "mapping" else [item.node for item in entry.value.node.items]


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """A value where it is used: the node itself, or an alias that names it."""

    node: Node
    start: int
    end: int
    alias: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    key: str
    key_start: int
    key_end: int
    value: Use
    merge: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    path: str
    text: str
    root: Node
    data: dict[str, Any]
    line_starts: tuple[int, ...]

    def place(self, offset: int) -> Place:
        line = bisect_right(self.line_starts, offset)
        column = len(self.text[self.line_starts[line - 1] : offset].lstrip("\ufeff"))
        return Place(path=self.path, line=line, column=column + 1)

    def node(self, path: NodePath) -> Node | None:
        """The node at a path of keys (and list positions), aliases and merge keys followed."""
        node: Node | None = self.root
        for part in path:
            node = node and _child(node, part)
        return node

    def use(self, path: NodePath) -> Use | None:
        """Where the value at a path is written, None when it comes in by a merge key or is the root."""
        parent = self.node(path[:-1]) if path else None
        if parent is None or parent.kind == "sequence":
            return (
                parent.items[int(path[-1])] if parent is not None and path[-1].isdecimal() and int(path[-1]) < len(parent.items) else None
            )
        entry = parent.find(path[-1])
        return entry.value if entry is not None else None

    def mappings(self) -> Iterator[tuple[NodePath, Node]]:
        """Every mapping the data has, by path: one that aliases share comes once for each place it is used at."""
        stack: list[tuple[NodePath, Any]] = [((), self.data)]
        while stack:
            path, value = stack.pop()
            if isinstance(value, dict) and (node := self.node(path)) is not None and node.kind == "mapping":
                yield path, node
            inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            stack.extend(
                ((*path, str(key)), child) for key, child in inner if isinstance(child, dict | list) and isinstance(key, str | int)
            )

    def value(self, path: NodePath) -> Any:
        value: Any = self.data
        for part in path:
            value = value[int(part)] if isinstance(value, list) else value[part]
        return value

    def nodes(self) -> Iterator[Node]:
        """Every node once, in file order."""
        yield from _walk(self.root)


def shared_depth(one: NodePath, other: NodePath) -> int:
    """How many keys two paths have in common from the root."""
    return next((depth for depth, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), min(len(one), len(other)))


def _child(node: Node, part: str) -> Node | None:
    if node.kind == "sequence":
        return node.items[int(part)].node if part.isdecimal() and int(part) < len(node.items) else None
    entry = node.find(part)
    if entry is not None:
        return entry.value.node
    return next((child for parent in node.merged() if (child := _child(parent, part)) is not None), None)


def _walk(node: Node) -> Iterator[Node]:
    yield node
    uses = [entry.value for entry in node.entries] + list(node.items)
    for use in uses:
        if use.alias is None:
            yield from _walk(use.node)
