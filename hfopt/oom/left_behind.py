"""What an attempt that was cut off leaves behind: weights changed for an inner pass, a hook, a switch that was turned for a while.

A script may change its model within a step and change it back afterwards: adversarial training moves the embeddings, a teacher's weights
are swapped in, an adapter or a dropout is switched off for a reference. Without `finally` the second half is not reached when memory runs
out in between, and the repetition would train on what was left. So the model is noted where a window begins, and only where code of the
script's own runs in its step: the norms of the weights that are trained (one read of them, nothing is fetched), hooks and switches.

Limits: weights that are not trained, and a change that leaves a weight's norm as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hfopt.oom.kept_state import HOOKS, is_own

_HALVES = (torch.float16, torch.bfloat16)
_SWITCHES = ("_disable_adapters", "_active_adapter", "p")  # of PEFT's layers, and of dropouts


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A model as a window found it."""

    switches: dict[str, Any]
    norms: tuple[torch.Tensor, ...]


class AsFound:
    """Of one Trainer's model."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._applies: bool | None = None

    def note(self) -> Found | None:
        """None: only code of known libraries runs in the step, which cleans up behind itself."""
        if self._applies is None:
            kinds = (*type(self._trainer).__mro__, *map(type, self._trainer.model.modules()))
            self._applies = self._trainer.compute_loss_func is not None or any(map(is_own, kinds))
        if not self._applies:
            return None
        return Found(switches=dict(_switches(self._trainer.model)), norms=_norms(self._trainer.model))

    def left(self, since: Found | None) -> str | None:
        """In a sentence, the first thing that is not as it was."""
        if since is None:
            return None
        model = self._trainer.model
        now = dict(_switches(model))
        what = next((name for name in dict.fromkeys((*since.switches, *now)) if since.switches.get(name) != now.get(name)), None)
        if what is None:
            names = [name for name, one in model.named_parameters() if one.requires_grad]
            pairs = zip(names, since.norms, _norms(model), strict=True)
            what = next((f"the weight {name}" for name, before, after in pairs if repr(before.item()) != repr(after.item())), None)
        return None if what is None else f"memory ran out while {what} was changed, and the script did not change it back"


def _switches(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, one in model.named_parameters():
        yield f"whether {name} is trained", one.requires_grad
    for name, module in model.named_modules():
        yield f"a hook of {name or 'the model'}", sum(map(is_own, _hooks(module)))
        for switch in _SWITCHES:
            if switch in vars(module):
                yield f"{name}.{switch}", repr(vars(module)[switch])


def _hooks(module: torch.nn.Module) -> Iterator[Any]:
    """Libraries put theirs on in a first forward, and leave them there."""
    for hooks in HOOKS:
        yield from getattr(module, hooks).values()


def _norms(model: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """Sharded weights by their own part, so that ranks need not meet; of halves in float32, which sees smaller changes."""
    local = [one.to_local() if hasattr(one, "to_local") else one for one in model.parameters() if one.requires_grad]
    found: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for halves in (True, False):
            own = {place: one.detach() for place, one in enumerate(local) if (one.dtype in _HALVES) == halves}
            norms = torch._foreach_norm(list(own.values()), 2, torch.float32 if halves else None) if own else ()
            found |= dict(zip(own, norms, strict=True))
    return tuple(found[place] for place in range(len(local)))
