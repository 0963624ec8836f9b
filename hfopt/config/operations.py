"""What can be done to one key of one section: set it, rename it, drop it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hfopt.config.document import NodePath


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    path: NodePath  # of the mapping
    key: str  # as the file writes it
    after: Any = None
    remove: bool = False
    rename_to: str | None = None
    keep_value: bool = False  # a rename that leaves the value's characters alone
    inherited: bool = False  # true of the data only: the text is changed where the value is written
