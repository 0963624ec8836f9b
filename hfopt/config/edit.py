"""Config out: the same bytes, with only the changed values' own characters replaced and new keys beside their kin.

Every change becomes a few splices of the text. The result is read again and must equal the old document with exactly the changes made;
if it does not, nothing is returned: an edit is right or refused. What stands behind an alias is changed at its use; what another
alias reads is kept for it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hfopt.config.comments import StaleComment, stale_comments
from hfopt.config.document import Document, parse
from hfopt.config.load import Loaded
from hfopt.config.operations import Operation
from hfopt.config.splices import Splicer
from hfopt.config.values import same
from hfopt.errors import ConfigError
from hfopt.schema import Change


@dataclass(frozen=True, kw_only=True, slots=True)
class Edited:
    data: bytes
    stale_comments: tuple[StaleComment, ...] = ()


def edit(loaded: Loaded, changes: Sequence[Change]) -> Edited:
    """The file with the changes in it. A key that the file writes under another name is changed there."""
    if loaded.layout.main is None:
        raise ConfigError(f"{loaded.document.path}: several sections hold TrainingArguments", hint="name one with --section")
    operations = []
    for change in changes:
        home = loaded.homes.get(change.key)
        path, key = (home.path, home.key) if home is not None else (loaded.layout.main.path, change.key)
        if home is not None or change.after is not None:
            operations.append(Operation(path=path, key=key, after=change.after, remove=change.after is None))
    return apply(loaded.document, operations)


def upgrade(loaded: Loaded) -> Edited:
    """The file with everything repaired that can be repaired with certainty."""
    return apply(loaded.document, loaded.repairs)


def apply(document: Document, operations: Sequence[Operation]) -> Edited:
    wanted = copy.deepcopy(document.data)
    todo = [operation for operation in operations if _changes_something(document, operation)]
    for operation in todo:
        _perform(wanted, operation)
    if not todo:
        return Edited(data=document.text.encode("utf-8"))
    splicer = Splicer(document)
    for operation in todo:
        splicer.perform(operation)
    data = splicer.result().encode("utf-8")
    _verify(data, wanted, document)
    return Edited(data=data, stale_comments=stale_comments(document, todo))


def _changes_something(document: Document, operation: Operation) -> bool:
    mapping = document.value(operation.path)
    if operation.remove:
        return mapping is not None and operation.key in mapping
    if operation.rename_to is not None:
        return True
    return not (mapping is not None and operation.key in mapping and same(mapping[operation.key], operation.after))


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


def _verify(data: bytes, wanted: dict[str, Any], document: Document) -> None:
    try:
        got: Any = parse(data, document.path).data
    except ConfigError as error:
        raise ConfigError(f"{document.path}: cannot be edited safely ({error}); nothing was changed") from error
    if not same(got, wanted):
        raise ConfigError(
            f"{document.path}: cannot be edited without changing something else; nothing was changed",
            hint="anchors or merge keys tie these values together; set the key by hand in its own section",
        )
