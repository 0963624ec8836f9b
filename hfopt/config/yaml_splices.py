"""How one change of one key becomes splices of text, in the style of the file it stands in.

What can be done to one key of one section: set it, rename it, drop it. A Python value as YAML text that PyYAML's safe loader reads back as
exactly that value, in the style of what stood there. The habits of a file: its newline, indentation, spelling of true, quotes and columns,
so that what is added looks like the rest. The splices of text that one operation needs, wherever the value stands: block or flow, behind an
anchor, an alias or a merge key.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

import yaml

from hfopt.config.training_arguments import kin, same, spelled_float
from hfopt.config.yaml_document import Document, Node, NodePath, Use, YamlEntry
from hfopt.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    path: NodePath  # of the mapping
    key: str  # as the file writes it
    after: Any = None
    remove: bool = False
    rename_to: str | None = None
    keep_value: bool = False  # a rename that leaves the value's characters alone
    inherited: bool = False  # true of the data only: the text is changed where the value is written


def render(value: Any, *, old: str = "", json_style: bool = False) -> str:
    """One line of text for `value`. `old` is the source text it replaces: its quotes, capitals and digits are kept where they can be."""
    if json_style:
        return json.dumps(value, ensure_ascii=False)
    match value:
        case None:
            return "null"
        case bool():
            return _bool(value, old)
        case int():
            return str(value)
        case float():
            return _float(value, old)
        case str():
            return _string(value, old)
        case list() | tuple():
            return "[" + ", ".join(render(item) for item in value) + "]"
        case dict():
            return "{" + ", ".join(f"{render(key)}: {render(item)}" for key, item in value.items()) + "}"
        case _:
            return _string(str(value), old)


def _bool(value: bool, old: str) -> str:
    word = "true" if value else "false"
    text = old.strip()
    if text in ("True", "False"):
        return word.capitalize()
    if text in ("TRUE", "FALSE"):
        return word.upper()
    pairs = {"yes": ("yes", "no"), "no": ("yes", "no"), "on": ("on", "off"), "off": ("on", "off")}
    if text.lower() in pairs:
        chosen = pairs[text.lower()][0 if value else 1]
        return chosen.capitalize() if text[:1].isupper() else chosen
    return word


def _float(value: float, old: str) -> str:
    if not math.isfinite(value):
        return str(value).replace("inf", ".inf").replace("nan", ".nan")
    return spelled_float(old.strip().strip("'\""), value)


def _string(value: str, old: str) -> str:
    quote = old.strip()[:1]
    if quote == "'" and _fits_single_quotes(value):
        return "'" + value.replace("'", "''") + "'"
    if quote == '"' or not _fits_plain(value):
        return yaml.safe_dump(value, default_style='"', allow_unicode=True, width=math.inf).rstrip("\n")
    return value


def _fits_single_quotes(value: str) -> bool:
    return value.isprintable()


def _fits_plain(value: str) -> bool:
    """Plain text that is one word to YAML, within brackets too, and stays a string; anything doubtful is quoted."""
    if not re.fullmatch(r"[A-Za-z0-9_./~][A-Za-z0-9_./~+\-@]*(?: [A-Za-z0-9_./+\-@]+)*", value):
        return False
    try:
        return bool(yaml.safe_load(value) == value)
    except (yaml.YAMLError, ValueError):
        return False


_BOOL, _STRING = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:str"


class Style:
    def __init__(self, document: Document) -> None:
        self.text, self.document = document.text, document
        newline = re.search(r"\r\n|\r|\n", self.text)
        self.newline = newline[0] if newline is not None else "\n"
        bools = (self.text[node.start : node.end] for node in document.nodes() if node.tag == _BOOL and node.anchor is None)
        self.bool_like = next(bools, "")
        self.step = next(self._steps(document.root), 2)

    def _steps(self, node: Node) -> Any:
        """By how much nested block mappings are indented."""
        for entry in node.entries:
            inner = entry.value.node
            if entry.value.alias is None and inner.kind == "mapping" and not inner.flow and inner.entries:
                yield self._column(inner.entries[0].key_start) - self._column(entry.key_start)
                yield from self._steps(inner)

    def _column(self, offset: int) -> int:
        return self.document.place(offset).column

    def value(self, value: Any, mapping: Node, *, json_style: bool = False) -> str:
        """A new value of a mapping, spelled as its neighbours are."""
        if isinstance(value, bool):
            return render(value, old=self.bool_like, json_style=json_style)
        return render(value, old=self._quote(mapping) if isinstance(value, str) else "", json_style=json_style)

    def _quote(self, mapping: Node) -> str:
        styles = [entry.value.node.style for entry in mapping.entries if entry.value.node.tag == _STRING]
        shared = set(styles)
        return (shared.pop() or "") if len(styles) > 1 and len(shared) == 1 else ""

    def gap(self, mapping: Node, entry_column: int, key: str) -> str:
        """What stands between a key and its value: `: `, or more where the values of a mapping are aligned."""
        columns = [self._column(entry.value.start) for entry in mapping.entries if self._on_one_line(entry)]
        if len(columns) > 2 and len(set(columns)) == 1:
            return ":" + " " * max(1, columns.pop() - entry_column - len(key) - 1)
        return ": "

    def _on_one_line(self, entry: YamlEntry) -> bool:
        between = self.text[entry.key_end : entry.value.start]
        return bool(between) and "\n" not in between and "\r" not in between

    def key_like(self, entry: YamlEntry, name: str) -> str:
        """A key, in the quotes of another."""
        quote = self.text[entry.key_start : entry.key_start + 1]
        return f"{quote}{name}{quote}" if quote in ("'", '"') else name


_NEWLINE = re.compile(r"\r\n|\r|\n")


class Splicer:
    """Collects replacements of text spans and new lines; `result()` makes them all at once."""

    def __init__(self, document: Document) -> None:
        self.document, self.text = document, document.text
        self.style = Style(document)
        self.newline = self.style.newline
        self.replacements: list[tuple[int, int, int, int, str]] = []  # start, end, minus the depth, order, text
        self.removed: set[int] = set()  # key offsets of entries that go
        self.commas: set[int] = set()  # after which last entries of flow mappings a comma was written
        self.own_keys: dict[NodePath, list[tuple[str, Any]]] = {}  # for sections that are an alias as a whole

    def result(self) -> str:
        for path, pairs in self.own_keys.items():
            self._open_alias(path, pairs)
        parts, done = [], 0
        for start, end, _, _, new in sorted(self.replacements):
            if start < done and new:
                raise ConfigError(f"{self.document.path}: two changes touch the same place; nothing was changed")
            parts += [self.text[done:start], new]
            done = max(done, end)
        return "".join([*parts, self.text[done:]])

    def perform(self, operation: Operation) -> None:
        if operation.inherited:
            return
        use = self.document.use(operation.path)
        if use is not None and use.alias is not None and not operation.remove and operation.rename_to is None:
            self.own_keys.setdefault(operation.path, []).append((operation.key, operation.after))
            return
        node = self.document.node(operation.path)
        assert node is not None and node.kind == "mapping"
        entry, before = node.find(operation.key), self.document.value(operation.path).get(operation.key)
        if operation.remove:
            self._remove(node, operation.key)
        elif operation.rename_to is not None and entry is not None:
            self._replace(entry.key_start, entry.key_end, self.style.key_like(entry, operation.rename_to))
            if not operation.keep_value:
                self._set(node, entry, operation.after, before)
        elif entry is not None:
            self._set(node, entry, operation.after, before)
        else:
            self._add(node, operation.rename_to or operation.key, operation.after)

    def _replace(self, start: int, end: int, new: str, *, depth: int = 0) -> None:
        """Of several new lines at one place the deeper come first: they belong to the mapping that ends there."""
        self.replacements.append((start, end, -depth, len(self.replacements), new))

    # ------------------------------------------------------------------ where

    def _aliases_of(self, anchor: str, node: Node) -> list[Use]:
        uses = [use for other in self.document.nodes() for use in (*(entry.value for entry in other.entries), *other.items)]
        return sorted((use for use in uses if use.alias == anchor and use.node is node), key=lambda use: use.start)

    def _open_alias(self, path: NodePath, pairs: list[tuple[str, Any]]) -> None:
        """`training: *base` becomes a mapping that merges *base and has keys of its own."""
        use, parent = self.document.use(path), self.document.node(path[:-1])
        assert use is not None and parent is not None
        alias = self.text[use.start : use.end]
        if parent.flow or parent.kind == "sequence":
            inner = "".join(f", {render(key)}: {render(value)}" for key, value in pairs)
            self._replace(use.start, use.end, f"{{<<: {alias}{inner}}}")
            return
        entry = next(entry for entry in parent.entries if entry.value is use)
        indent = " " * (self.document.place(entry.key_start).column - 1 + self.style.step)
        lines = [f"{indent}<<: {alias}", *(line for key, value in pairs for line in self._block_lines(use.node, key, value, indent))]
        self._replace(self._after_colon(entry), use.end, "".join(self.newline + line for line in lines))

    def _after_colon(self, entry: YamlEntry) -> int:
        return self.text.index(":", entry.key_end) + 1

    # ------------------------------------------------------------------ set

    def _set(self, node: Node, entry: YamlEntry, value: Any, before: Any) -> None:
        use = entry.value
        old = use.node
        if (
            use.alias is None
            and isinstance(before, dict)
            and isinstance(value, dict)
            and old.anchor is None
            and before.keys() & value.keys()
        ):
            self._set_inside(old, value, before)
            return
        source = self.text[use.start : use.end]
        json_style = node.flow and self._is_json(node)
        if use.alias is None and old.anchor is not None:
            self._hand_over_anchor(old)
            source = source.removeprefix(f"&{old.anchor}")
        new = render(value, old=source, json_style=json_style)
        if use.start == use.end:  # nothing stood there
            new = (" " if ":" in self.text[entry.key_end : use.start] else ": ") + new
        elif old.kind != "scalar" and not old.flow and use.alias is None:  # a block collection starts on a line of its own
            self._replace(self._after_colon(entry), use.end, " " + new)
            return
        self._replace(use.start, use.end, new)

    def _set_inside(self, mapping: Node, wanted: dict[Any, Any], before: dict[Any, Any]) -> None:
        """A mapping becomes another key by key, so that what is the same stays as it is written; the two share a key."""
        for entry in mapping.entries:
            if entry.key not in wanted:
                self._remove(mapping, entry.key)
        for key, value in wanted.items():
            there = mapping.find(key)
            if there is None:
                self._add(mapping, key, value)
            elif not same(before[key], value):
                self._set(mapping, there, value, before[key])

    def _hand_over_anchor(self, node: Node) -> None:
        """Whoever reads the old value by its alias keeps it: the first reader becomes the anchor."""
        assert node.anchor is not None
        readers = self._aliases_of(node.anchor, node)
        if readers:
            self._replace(readers[0].start, readers[0].end, self.text[node.start : node.end])

    # ------------------------------------------------------------------ add

    def _add(self, node: Node, key: str, value: Any) -> None:
        own = [entry for entry in node.entries if entry.key_start not in self.removed]
        if not own:
            self._replace(node.start, node.end, "{" + render(key) + ": " + render(value) + "}")
            return
        neighbour = next((entry for name in kin(key) for entry in reversed(own) if entry.key == name), own[-1])
        if node.flow:
            self._add_in_flow(node, neighbour, key, value)
            return
        indent = " " * (self.document.place(self._entry_start(neighbour)).column - 1)
        lines = self._block_lines(node, self.style.key_like(neighbour, key), value, indent)
        end = self._line_end(neighbour.value.end)
        following = _NEWLINE.match(self.text, end)
        if following is None:  # the last line, without a newline: it stays so
            self._replace(end, end, "".join(self.newline + line for line in lines), depth=len(indent))
        else:
            self._replace(following.end(), following.end(), "".join(line + following[0] for line in lines), depth=len(indent))

    def _entry_start(self, entry: YamlEntry) -> int:
        """Where the entry begins: at its key, or at the question mark before it."""
        before = self.text[: entry.key_start].rstrip(" \t")
        return len(before.removesuffix("?")) if before.endswith("?") else entry.key_start

    def _block_lines(self, mapping: Node, key: str, value: Any, indent: str) -> list[str]:
        if isinstance(value, dict) and value:
            inner = [f"{indent}{' ' * self.style.step}{render(name)}: {self.style.value(item, mapping)}" for name, item in value.items()]
            return [f"{indent}{key}:", *inner]
        return [f"{indent}{key}{self.style.gap(mapping, len(indent) + 1, key)}{self.style.value(value, mapping)}"]

    def _line_end(self, offset: int) -> int:
        match = _NEWLINE.search(self.text, offset)
        return match.start() if match is not None else len(self.text)

    def _add_in_flow(self, node: Node, neighbour: YamlEntry, key: str, value: Any) -> None:
        json_style = self._is_json(node)
        new = f"{self.style.key_like(neighbour, key)}: {self.style.value(value, node, json_style=json_style)}"
        indent = re.search(r"(?:\r\n|\r|\n)[ \t]*\Z", self.text[: neighbour.key_start])
        following = next((entry for entry in node.entries if entry.key_start > neighbour.value.end), None)
        end = neighbour.value.end
        if indent is None:  # on one line
            self._replace(end, end, ", " + new)
        elif following is not None:  # each entry on a line of its own
            self._replace(following.key_start, following.key_start, new + "," + indent[0])
        else:
            self._add_last_in_flow(node, end, indent[0], new)

    def _add_last_in_flow(self, node: Node, end: int, indent: str, new: str) -> None:
        """After the last entry, a comma may or may not follow it; a comment on its line stays on its line."""
        comma = re.compile(r"[ \t]*,").match(self.text, end)
        after = comma.end() if comma else end
        place = self._line_end(after) if self._line_end(after) < node.end else after
        if comma:
            self._replace(place, place, f"{indent}{new},")
        elif end in self.commas:
            self._replace(place, place, f",{indent}{new}")
        else:
            self.commas.add(end)
            self._replace(end, end, ",")
            self._replace(place, place, indent + new)

    def _is_json(self, node: Node) -> bool:
        return bool(node.entries) and all(self.text[entry.key_start] == '"' for entry in node.entries)

    # ------------------------------------------------------------------ remove

    def _remove(self, node: Node, key: str) -> None:
        entries = list(node.entries)
        for position, entry in enumerate(entries):
            if entry.key != key or entry.merge:
                continue
            self.removed.add(entry.key_start)
            if entry.value.alias is None and entry.value.node.anchor is not None:
                self._hand_over_anchor(entry.value.node)
            if len({other.key for other in entries}) == 1:
                self._replace(node.start, node.end, "{}")
                return
            if node.flow:
                self._remove_in_flow(entries, position)
            else:
                self._remove_lines(entries, position)

    def _remove_in_flow(self, entries: list[YamlEntry], position: int) -> None:
        if position + 1 < len(entries):
            self._replace(entries[position].key_start, entries[position + 1].key_start, "")
        else:
            self._replace(entries[position - 1].value.end, entries[position].value.end, "")

    def _remove_lines(self, entries: list[YamlEntry], position: int) -> None:
        entry = entries[position]
        begin = self._entry_start(entry)
        line_start = self.document.line_starts[self.document.place(begin).line - 1]
        if self.text[line_start:begin].strip(" \ufeff"):  # `- key: value`: the next entry takes its place
            self._replace(begin, self._entry_start(entries[position + 1]), "")
            return
        start, end = begin - len(self.text[line_start:begin].lstrip("\ufeff")), self._line_end(entry.value.end)
        after = _NEWLINE.match(self.text, end)
        if after is not None:
            end = after.end()
        else:  # the last line, without a newline: take the one before
            start -= 2 if self.text[start - 2 : start] == "\r\n" else 1
        self._replace(start, end, "")
