"""Config out: the same bytes, with only the changed values' own characters replaced.

Comments that a change would make false: on a changed line, or in the comment right above it, stating the old value. Every change becomes a
few splices of the text. The result is read again and must equal the old document with exactly the changes made; if it does not, nothing is
returned: an edit is right or refused. What stands behind an alias is changed at its use; what another alias reads is kept for it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hfopt.config.read_job import Loaded
from hfopt.config.training_arguments import ACCUMULATION, ALIASES, BATCH, same
from hfopt.config.yaml_document import Document, NodePath, YamlEntry, parse
from hfopt.config.yaml_splices import Operation, Splicer
from hfopt.errors import ConfigError
from hfopt.redact import HIDDEN, is_secret
from hfopt.schema import Change, Place


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


def _comments_about(document: Document, entry: YamlEntry) -> Iterator[tuple[int, str]]:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Edited:
    data: bytes
    document: Document  # the same, read again
    stale_comments: tuple[StaleComment, ...] = ()


def edit(loaded: Loaded, changes: Sequence[Change]) -> Edited:
    """The file with the changes in it. A key that the file writes under another name is changed there."""
    if loaded.layout.main is None:
        raise ConfigError(f"{loaded.document.path}: several sections hold TrainingArguments", hint="name one with --section")
    operations = []
    for change in changes:
        home = loaded.homes.get(change.key)
        path, key = (home.path, home.key) if home is not None else (loaded.layout.main.path, change.key)
        after = change.after if home is None or home.word is None else home.word.say(change.after)
        operations.append(Operation(path=path, key=key, after=after, remove=after is None))
    return apply(loaded.document, operations)


def upgrade(loaded: Loaded) -> Edited:
    """The file with everything repaired that can be repaired with certainty. A repair that the file's anchors forbid is left out."""
    document = loaded.document
    repairs = [item.repair for item in loaded.found if item.repair]
    try:
        return apply(document, _where_defined(document, [operation for repair in repairs for operation in repair]))
    except ConfigError:
        possible: list[Operation] = []
        for repair in repairs:
            try:
                apply(document, _where_defined(document, [*possible, *repair]))
            except ConfigError:
                continue
            possible.extend(repair)
        return apply(document, _where_defined(document, possible))


def repairs_of(loaded: Loaded, repaired: Document) -> tuple[Change, ...]:
    """What `upgrade` changed, key by key: a renamed key is one that goes and one that comes."""
    found: dict[tuple[NodePath, str], Change] = {}
    for item in loaded.found:
        for operation in item.repair:
            before, after = loaded.document.value(operation.path) or {}, repaired.value(operation.path) or {}
            for key in (operation.key, operation.rename_to):
                if (
                    key is not None
                    and not (key in before and key in after and same(before[key], after[key]))
                    and (key in before or key in after)
                ):
                    reason = item.problem.message
                    found[operation.path, key] = Change(key=key, before=before.get(key), after=after.get(key), reason=reason)
    return tuple(replace(one, before=shown_value(one.key, one.before), after=shown_value(one.key, one.after)) for one in found.values())


def shown_value(key: str, value: Any) -> Any:
    return HIDDEN if is_secret(key, value) else value


def apply(document: Document, operations: Sequence[Operation]) -> Edited:
    """The operations done and checked; the document itself is not touched."""
    last_said = {(operation.path, operation.key): operation for operation in operations}
    todo = [operation for operation in last_said.values() if _changes_something(document, operation)]
    if not todo:
        return Edited(data=document.text.encode("utf-8"), document=document)
    wanted = copy.deepcopy(document.data)
    for operation in todo:
        _perform(wanted, operation)
    splicer = Splicer(document)
    for operation in sorted((*todo, *_pins(document, todo)), key=lambda operation: not operation.remove):
        splicer.perform(operation)
    data = splicer.result().encode("utf-8")
    return Edited(data=data, document=_verified(data, wanted, document), stale_comments=stale_comments(document, todo))


def _where_defined(document: Document, operations: Sequence[Operation]) -> list[Operation]:
    """A repair of a key that comes in by a merge key or an alias is made where the key is written, for all that read it there."""
    spread: list[Operation] = []
    for operation in operations:
        node = document.node(operation.path)
        definer = node.definer(operation.key) if node is not None else None
        if definer is None:
            spread.append(operation)
            continue
        readers = [path for path, other in document.mappings() if other.definer(operation.key) is definer]
        first = next((path for path in readers if document.node(path) is definer and _written_at(document, path)), operation.path)
        spread.append(replace(operation, path=first))
        spread.extend(replace(operation, path=path, inherited=True) for path in readers if path != first)
    return spread


def _written_at(document: Document, path: NodePath) -> bool:
    use = document.use(path)
    return use is None or use.alias is None


def _pins(document: Document, operations: Sequence[Operation]) -> list[Operation]:
    """Other sections that merge a changed one keep the value they had: it is written into them."""
    changed = {(operation.path, operation.key) for operation in operations}
    pins = []
    for operation in operations:
        if not _written_at(document, operation.path):
            continue
        node = document.node(operation.path)
        for path, other in document.mappings():
            if (path, operation.key) not in changed and other.definer(operation.key) is node:
                pins.append(Operation(path=path, key=operation.key, after=document.value(path)[operation.key]))
    return pins


def _changes_something(document: Document, operation: Operation) -> bool:
    mapping = document.value(operation.path) or {}
    if operation.remove or operation.rename_to is not None:
        return operation.key in mapping
    return not (operation.key in mapping and same(mapping[operation.key], operation.after))


def _perform(data: dict[str, Any], operation: Operation) -> None:
    """The change on the data itself. Copies on the way down: another section may share the object by an alias."""
    here: Any = data
    for part in operation.path:
        position: Any = int(part) if isinstance(here, list) else part
        here[position] = dict(here[position]) if isinstance(here[position], dict) else list(here[position])
        here = here[position]
    if operation.remove:
        here.pop(operation.key, None)
    elif operation.rename_to is not None:
        value = here.pop(operation.key)
        here[operation.rename_to] = value if operation.keep_value else operation.after
    else:
        here[operation.key] = operation.after


def _verified(data: bytes, wanted: dict[str, Any], document: Document) -> Document:
    try:
        again = parse(data, document.path)
    except ConfigError as error:
        raise ConfigError(f"{document.path}: cannot be edited safely ({error}); nothing was changed") from error
    if not same(again.data, wanted):
        raise ConfigError(
            f"{document.path}: cannot be edited without changing something else; nothing was changed",
            hint="anchors or merge keys tie these values together; set the key by hand in its own section",
        )
    return again
