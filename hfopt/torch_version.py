"""Which PyTorch the run will use: the installed one. Its allocator and its workspaces have changed over the versions."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version


@cache
def installed_torch() -> tuple[int, int]:
    major, minor = version("torch").split(".")[:2]
    return int(major), int(minor)
