"""The habits of a file: its newline, indentation, spelling of true, quotes and columns, so that what is added looks like the rest."""

from __future__ import annotations

import re
from typing import Any

from hfopt.config.document import Document, Entry, Node
from hfopt.config.render import render

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

    def _on_one_line(self, entry: Entry) -> bool:
        between = self.text[entry.key_end : entry.value.start]
        return bool(between) and "\n" not in between and "\r" not in between

    def key_like(self, entry: Entry, name: str) -> str:
        """A key, in the quotes of another."""
        quote = self.text[entry.key_start : entry.key_start + 1]
        return f"{quote}{name}{quote}" if quote in ("'", '"') else name
