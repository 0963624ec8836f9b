"""Comments that a change would make false: on a changed line, or in the comment right above it, stating the old value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hfopt.config.document import Document, Entry
from hfopt.config.keys import ACCUMULATION, ALIASES, BATCH
from hfopt.config.operations import Operation
from hfopt.schema import Place


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
    old = str(document.value(operation.path)[operation.key])
    for offset, comment in _comments_about(document, entry):
        if re.search(rf"(?<![\w.]){re.escape(old)}(?!\w|\.\d)", comment):
            yield StaleComment(key=operation.key, place=document.place(offset), comment=comment, old_value=old)


def _comments_about(document: Document, entry: Entry) -> Iterator[tuple[int, str]]:
    """The comment on the entry's line, those above that name its key, and sums about the batch wherever they stand."""
    text = document.text
    comment = comment_after(text, entry.value.end)
    if comment is not None:
        yield text.index(comment, entry.value.end), comment
    above = document.place(entry.key_start).line
    for number, offset, words in reversed(list(line_comments(document))):
        above = number if number == above - 1 else above
        if (number == above and _names(words, entry.key)) or (_is_about_batch(entry.key) and _is_batch_sum(words)):
            yield offset, words


def line_comments(document: Document) -> Iterator[tuple[int, int, str]]:
    """Comments on lines of their own: line, offset of the #, words. Text inside a scalar that looks like one is none."""
    inside = [(node.start, node.end) for node in document.nodes() if node.kind == "scalar"]
    for number, start in enumerate(document.line_starts, start=1):
        match = re.compile(r"[ \t\ufeff]*(#[^\r\n]*)").match(document.text, start)
        if match is not None and not any(first < match.start(1) < last for first, last in inside):
            yield number, match.start(1), match[1].rstrip()


def _is_about_batch(key: str) -> bool:
    return ALIASES.get(key, key) in (BATCH, ACCUMULATION)


def _is_batch_sum(comment: str) -> bool:
    """`effective batch = 8 * 4 = 32`, `global batchsize = (8 // 2) * 8`, `32 = 8 x 4 accumulation`."""
    return re.search(r"batch|accum", comment, re.IGNORECASE) is not None and re.search(r"\d\s*[*×x=/]|[*×=]\s*\d", comment) is not None


def _names(comment: str, key: str) -> bool:
    """A comment above belongs to the key only when it names it: whole, or by two of its words."""
    words = [word for word in key.split("_") if len(word) > 2]
    said = set(re.findall(r"[a-z]+", comment.lower()))
    return key in comment or sum(word in said for word in words) >= 2
