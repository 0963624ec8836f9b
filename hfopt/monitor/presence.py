"""Is train() still going on? Its frame is looked for on the training thread's stack, where an error or Ctrl-C leaves none.

A callback is not told when train() is left by an exception. Only code objects are compared: a frame that is kept, or whose locals are
read, would hold the user's tensors.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

_ENTRY = "train"


class Presence:
    """Made inside train(), asked from another thread."""

    def __init__(self, trainer: Any) -> None:
        self._thread = threading.get_ident()
        on_stack = set(_codes(sys._getframe(1)))
        self._entries = {number: code for number, code in _entries(trainer).items() if number in on_stack}

    def here(self) -> bool:
        """True also where it cannot be told."""
        if not self._entries:
            return True
        return any(number in self._entries for number in _codes(sys._current_frames().get(self._thread)))


def _codes(frame: FrameType | None) -> Iterator[int]:
    """By identity: code that torch.compile made may hold what cannot be hashed."""
    while frame is not None:
        yield id(frame.f_code)
        frame = frame.f_back


def _entries(trainer: Any) -> dict[int, CodeType]:
    """By identity, the code of every `train` that the class or one of its bases has, without what was wrapped around it."""
    found = (inspect.unwrap(vars(kind)[_ENTRY]) for kind in type(trainer).__mro__ if _ENTRY in vars(kind))
    return {id(function.__code__): function.__code__ for function in found if hasattr(function, "__code__")}
