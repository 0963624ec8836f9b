"""Comments that a change would make false: on a changed line, or in the comment right above it, stating the old value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hfopt.config.document import Document, Entry
from hfopt.config.operations import Operation
from hfopt.schema import Place

_COMMENT = re.compile(r"[ \t]*,?[ \t]+(#[^\r\n]*)|^[ \t]*(#[^\r\n]*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class StaleComment:
    """A comment that states the value as it was. It stays in the file; the user is told."""

    key: str
    place: Place
    comment: str
    old_value: str


def comment_after(text: str, offset: int) -> str | None:
    """The comment on the rest of the line after a value, without what comes before its #."""
    end = re.search(r"[\r\n]|\Z", text[offset:])
    rest = text[offset : offset + end.start()] if end else text[offset:]
    match = re.match(r"[ \t]*[,}\]]*[ \t]*(?:(?<=[ \t])|^)(#.*)", rest)
    return match[1].rstrip() if match else None


def stale_comments(document: Document, operations: Sequence[Operation]) -> tuple[StaleComment, ...]:
    return tuple(found for operation in operations for found in _stale(document, operation))


def _stale(document: Document, operation: Operation) -> Iterator[StaleComment]:
    node = document.node(operation.path)
    entry = node.find(operation.key) if node is not None else None
    if entry is None or operation.keep_value or entry.value.node.kind != "scalar":
        return
    old = document.text[entry.value.start : entry.value.end].strip("'\"")
    for offset, comment in _comments_of(document.text, entry):
        if old and re.search(rf"(?<![\w.]){re.escape(old)}(?!\w|\.\d)", comment):
            yield StaleComment(key=operation.key, place=document.place(offset), comment=comment, old_value=old)


def _comments_of(text: str, entry: Entry) -> Iterator[tuple[int, str]]:
    comment = comment_after(text, entry.value.end)
    if comment is not None:
        yield text.index(comment, entry.value.end), comment
    line_start = max(text.rfind("\n", 0, entry.key_start), text.rfind("\r", 0, entry.key_start)) + 1
    above = text[:line_start].splitlines(keepends=True)
    offset = line_start
    for line in reversed(above):
        offset -= len(line)
        if not line.lstrip().startswith("#"):
            break
        if _names(line, entry.key):
            yield offset + line.index("#"), line.strip()


def _names(comment: str, key: str) -> bool:
    """A comment above belongs to the key only when it names it: whole, or by two of its words."""
    words = [word for word in key.split("_") if len(word) > 2]
    said = set(re.findall(r"[a-z]+", comment.lower()))
    return key in comment or sum(word in said for word in words) >= 2
