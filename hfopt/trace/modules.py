"""Which module an operation belongs to, in forward and in backward, so that the peak can be named.

Forward hooks keep the current module. In backward the running autograd node's sequence number tells in which module's forward it was made.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class ModuleNames:
    """Keeps `recorder.module` current while entered."""

    def __init__(self, model: Any, recorder: Any) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._recorder = recorder
        self._stack: list[str] = []
        self._sequence: list[int] = []
        self._module_at: list[str] = []
        self._handles: list[Any] = []

    def __enter__(self) -> ModuleNames:
        self._handles = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave, always_call=True)]
        self._recorder.module_of_node = self.module_of_node
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._recorder.module_of_node = None

    def _enter(self, module: Any, _: Any) -> None:
        self._stack.append(self._names.get(id(module), type(module).__name__))
        self._note()

    def _leave(self, module: Any, _: Any, __: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._note()

    def _note(self) -> None:
        name = self._recorder.module = self._stack[-1] if self._stack else ""
        self._sequence.append(torch._C._autograd._get_sequence_nr())
        self._module_at.append(name)

    def module_of_node(self, node: Any) -> str:
        at = bisect_right(self._sequence, node._sequence_nr()) - 1
        return self._module_at[at] if at >= 0 else ""
