"""typer without pydantic, where a command line does not need it.

From 0.20 on typer has pydantic convert every option of a command, given or not. Importing pydantic and making an adapter for each of forty
options takes longer than all else that a command does before it reads its config. Here an option that is not given, a default, a text and
a path stay what they are; numbers, lists and whatever else is to be checked go typer's own way. Other versions are left alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def spare_pydantic() -> None:
    """Once for a process; a second call changes nothing."""
    from typer import core

    parameter: Any = getattr(core, "_TyperParameter", None)
    whole = getattr(parameter, "get_runtime_param", None)
    if whole is None or hasattr(whole, "whole"):
        return

    def get_runtime_param(self: Any) -> _AsGiven:
        return _AsGiven(lambda: whole(self))

    get_runtime_param.whole = whole  # type: ignore[attr-defined]
    parameter.get_runtime_param = get_runtime_param


class _AsGiven:
    def __init__(self, whole: Callable[[], Any]) -> None:
        self._whole = whole

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        kind, stated = param.type_descriptor.annotation, param.type_descriptor.parameter_info
        if kind in (str, int, float) and type(value) is kind:
            return value
        if kind is Path and type(value) is str and not _has_conditions(stated) and not _unreadable(value):
            return Path(value)
        return self._whole().coerce(value, param=param, ctx=ctx)


def _has_conditions(stated: Any) -> bool:
    """What is asked of a path besides being one."""
    named = ("exists", "writable", "resolve_path", "allow_dash", "path_type", "parser", "click_type")
    return any(getattr(stated, name, None) for name in named) or not (stated.file_okay and stated.dir_okay)


def _unreadable(path: str) -> bool:
    return os.path.lexists(path) and not os.access(path, os.R_OK)
