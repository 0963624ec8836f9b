"""transformers imported in three quarters of the time: nothing is collected meanwhile, scipy and datasets come when somebody uses them.

Only for a process of our own, before anything of transformers' models is imported: a script's own transformers is left as it is.
"""

from __future__ import annotations

import atexit
import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

_LOSSES = "transformers.loss.loss_utils"
_TRAINER = "transformers.trainer"


@contextmanager
def lean_imports() -> Iterator[None]:
    """What is imported stays to the end: looking through it for garbage takes a fifth of the time, then and later."""
    was_on = gc.isenabled()
    gc.disable()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it, and it misses kernels that only the CPU would use
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # extensions complain at the end of what was never collected
        if was_on:
            gc.enable()


def spare_scipy() -> None:
    """Imports the losses for object detection with scipy out of sight, then puts it back behind a function that imports it when called."""
    if "scipy" in sys.modules or not _imported_without("scipy", _LOSSES):
        return
    known = import_module("transformers.utils").is_scipy_available
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.loss.") and hasattr(module, "is_scipy_available"):
            module.is_scipy_available = known  # type: ignore[attr-defined]
            if not hasattr(module, "linear_sum_assignment"):
                module.linear_sum_assignment = _linear_sum_assignment  # type: ignore[attr-defined]


def spare_datasets() -> None:
    """Imports the Trainer with datasets out of sight, for a process whose data is no `datasets.Dataset`: it only asks whether it is one."""
    if "datasets" not in sys.modules:
        _imported_without("datasets", _TRAINER)


def _imported_without(package: str, module: str) -> bool:
    """Whether the module was imported now, with the package as if not installed; afterwards transformers finds it again."""
    if module in sys.modules:
        return False
    utils, name = import_module("transformers.utils"), f"is_{package}_available"
    known = getattr(utils, name, None)
    if known is None or not known():
        return False
    setattr(utils, name, lambda: False)
    try:
        import_module(module)
    except ImportError:  # this transformers keeps it elsewhere
        return False
    finally:
        setattr(utils, name, known)
    return True


def _linear_sum_assignment(*args: Any, **kwargs: Any) -> Any:
    return import_module("scipy.optimize").linear_sum_assignment(*args, **kwargs)
