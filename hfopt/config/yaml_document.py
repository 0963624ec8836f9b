"""A YAML document with the place of every key and value, read as PyYAML's safe loader reads it.

The tree of entries is as written, before merge keys are flattened: an entry knows where it stands, whether its value is an alias, and which
mappings it merges. The data beside it is what PyYAML's safe loader makes of the same text.

From bytes to a document, by PyYAML's safe loader: what `HfArgumentParser.parse_yaml_file` sees is what is read here. Limits: one document,
at most MAX_BYTES, MAX_DEPTH levels and MAX_VALUES values after aliases are expanded.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from hfopt.config.interpolation import interpolated
from hfopt.errors import ConfigError
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
    entries: tuple[YamlEntry, ...] = ()  # of a mapping
    items: tuple[Use, ...] = ()  # of a sequence

    def find(self, key: str) -> YamlEntry | None:
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
class YamlEntry:
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
    resolved: dict[str, Any]  # the data with the file's own interpolations replaced by what they name

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
        return _at(self.data, path)

    def resolved_value(self, path: NodePath) -> Any:
        return _at(self.resolved, path)

    def nodes(self) -> Iterator[Node]:
        """Every node once, in file order."""
        yield from _walk(self.root)


def _at(value: Any, path: NodePath) -> Any:
    for part in path:
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


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


MAX_BYTES = 1 << 20  # the pure Python loader reads some 300 kB/s; no config is larger
MAX_DEPTH = 60
MAX_VALUES = 200_000
MERGE_TAG, STRING_TAG = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:str"


def read_bytes(path: Path) -> bytes:
    """The file's bytes, or a clear refusal."""
    try:
        with path.open("rb") as stream:
            source = stream.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file", hint="give the path of a TrainingArguments YAML") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path}: is a directory", hint="name one YAML file in it") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(source) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES >> 20} MiB: not a training config")
    return source


def decode(source: bytes, path: str) -> str:
    if source[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ConfigError(f"{path}: UTF-16, but HfArgumentParser reads UTF-8", hint=f"convert it: iconv -f UTF-16 -t UTF-8 {path}")
    if b"\0" in source:
        raise ConfigError(f"{path}: a binary file, not YAML")
    try:
        return source.decode("utf-8")
    except UnicodeDecodeError as error:
        line = source.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 (byte 0x{source[error.start]:02x})", hint="save the file as UTF-8") from error


def parse(source: bytes, path: str) -> Document:
    """The document, or a ConfigError that names the place."""
    text = decode(source, path)
    tree, data = _compose_and_construct(text, path)
    if tree is None or data is None:
        raise ConfigError(f"{path}: empty", hint="a TrainingArguments YAML maps keys to values, such as `learning_rate: 5.0e-5`")
    if not isinstance(data, dict):
        kind = "list" if isinstance(data, list) else "single value"
        raise ConfigError(f"{path}: a {kind} at the root; TrainingArguments are a mapping of keys to values")
    return Document(
        path,
        text,
        tree,
        data,
        (0, *(match.end() for match in re.finditer(r"\r\n|\r|\n", text))),
        interpolated(data) if "${" in text else data,
    )


class _Loader(yaml.SafeLoader):
    """The safe loader, with a limit on depth and number of values, that remembers where aliases are used."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0
        self.aliases: dict[tuple[int, int, bool], Any] = {}  # (parent, position, is a mapping's key)
        self.anchor_names: dict[int, str] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) and parent is not None:
            self.aliases[id(parent), len(parent.value), isinstance(parent, yaml.MappingNode) and index is None] = event
        anchor = None if isinstance(event, yaml.AliasEvent) else getattr(event, "anchor", None)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {MAX_DEPTH} levels", problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        if anchor is not None:
            self.anchor_names[id(node)] = anchor
        return node


def _compose_and_construct(text: str, path: str) -> tuple[Node | None, Any]:
    loader: _Loader | None = None
    root: Any = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None, None
        _refuse_bombs(root, path)
        tree = _Tree(loader, text).node(root)
        return tree, loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, path) from error
    except yaml.YAMLError as error:  # a character YAML does not allow
        position = getattr(error, "position", None)
        line = f":{text.count(chr(10), 0, position) + 1}" if isinstance(position, int) else ""
        raise ConfigError(f"{path}{line}: not YAML: {str(error).splitlines()[0]}") from error
    except (ValueError, KeyError, AttributeError, TypeError, OverflowError) as error:
        # what PyYAML's constructors raise for `!!int x`, `!!bool x`, `!!timestamp x`, 2024-99-99
        where = _unreadable_scalar(loader, root) if loader is not None and root is not None else None
        why = f": {str(error).split(';')[0]}" if isinstance(error, ValueError) else ""
        raise ConfigError(f"{path}{where or ''}: a value PyYAML cannot read{why}") from error
    finally:
        if loader is not None:
            loader.dispose()


def _syntax_error(error: yaml.MarkedYAMLError, path: str) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
    words = ", ".join(word for word in (error.context, error.problem) if word)
    if "expected a single document" in words:
        return ConfigError(f"{path}{where}: several YAML documents in one file", hint="split it at the `---` and name one of the files")
    hint = "indent with spaces" if "'\\t'" in words else None
    if mark is not None and mark.buffer is not None and re.search(r"\{\{|\{%", mark.buffer):
        hint = hint or "a template ({{ ... }} or {% ... %}) has to be rendered first"
    return ConfigError(f"{path}{where}: not valid YAML: {words}", hint=hint or "mend the line that it names, or the one before it")


def _unreadable_scalar(loader: _Loader, root: Any) -> str | None:
    stack = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, yaml.ScalarNode):
            try:
                yaml.constructor.SafeConstructor().construct_object(node)
            except (ValueError, KeyError, AttributeError, TypeError, OverflowError, yaml.YAMLError):
                return f":{node.start_mark.line + 1}:{node.start_mark.column + 1}"
        else:
            stack.extend(child for pair in reversed(node.value) for child in (pair if isinstance(pair, tuple) else (pair,)))
    return None


def _refuse_bombs(root: Any, path: str) -> None:
    """Counts the values with aliases expanded (each node's count once), so a billion laughs is seen and never walked."""
    counts: dict[int, int | None] = {}

    def count(node: Any) -> int:
        known = counts.get(id(node), 0)
        if known is None:
            raise ConfigError(f"{path}:{node.start_mark.line + 1}: an anchor that contains itself")
        if known:
            return known
        counts[id(node)] = None
        children = () if isinstance(node, yaml.ScalarNode) else node.value
        total = 1 + sum(count(child) for pair in children for child in (pair if isinstance(pair, tuple) else (pair,)))
        if total > MAX_VALUES:
            raise ConfigError(f"{path}: its aliases expand to more than {MAX_VALUES:,} values: not a training config")
        counts[id(node)] = total
        return total

    count(root)


class _Tree:
    """Turns PyYAML's nodes, aliases and marks into ours."""

    def __init__(self, loader: _Loader, text: str) -> None:
        self.loader, self.text = loader, text
        self.known: dict[int, Node] = {}

    def node(self, raw: Any) -> Node:
        if id(raw) not in self.known:
            self.known[id(raw)] = self._build(raw)
        return self.known[id(raw)]

    def _build(self, raw: Any) -> Node:
        start, end, anchor = raw.start_mark.index, raw.end_mark.index, self.loader.anchor_names.get(id(raw))
        if isinstance(raw, yaml.ScalarNode):
            if raw.style in ("|", ">"):
                end = start + len(self.text[start:end].rstrip())
            return Node("scalar", start, end, style=raw.style, tag=raw.tag, anchor=anchor)
        flow = bool(raw.flow_style)
        if isinstance(raw, yaml.SequenceNode):
            items = tuple(self._use(raw, position, item) for position, item in enumerate(raw.value))
            return Node("sequence", start, end if flow else _last_end(items, start), flow=flow, tag=raw.tag, anchor=anchor, items=items)
        entries = tuple(self._entry(raw, position, key, value) for position, (key, value) in enumerate(raw.value))
        end = end if flow else _last_end([entry.value for entry in entries], start)
        return Node("mapping", start, end, flow=flow, tag=raw.tag, anchor=anchor, entries=entries)

    def _use(self, parent: Any, position: int, raw: Any) -> Use:
        node, alias = self.node(raw), self.loader.aliases.get((id(parent), position, False))
        if alias is not None:
            return Use(node, alias.start_mark.index, alias.end_mark.index, alias.anchor)
        return Use(node, node.start, node.end)

    def _entry(self, parent: Any, position: int, key: Any, value: Any) -> YamlEntry:
        alias = self.loader.aliases.get((id(parent), position, True))
        marks = (alias.start_mark, alias.end_mark) if alias is not None else (key.start_mark, key.end_mark)
        name = key.value if isinstance(key, yaml.ScalarNode) and key.tag == STRING_TAG else ""  # other keys are never ours
        return YamlEntry(name, marks[0].index, marks[1].index, self._use(parent, position, value), merge=key.tag == MERGE_TAG)


def _last_end(uses: Any, start: int) -> int:
    return max((use.end for use in uses), default=start)
