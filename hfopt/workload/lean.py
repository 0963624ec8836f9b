"""transformers in half a second less: its losses for object detection import scipy at once; here it is imported when one of them is used.

Only for a process of our own, before anything of transformers' models is imported: a script's own transformers is left as it is.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

_LOSSES = "transformers.loss.loss_utils"


def spare_scipy() -> None:
    """Imports the losses with scipy out of sight, then puts it back behind a function that imports it when called."""
    if "scipy" in sys.modules or _LOSSES in sys.modules:
        return
    utils = import_module("transformers.utils")
    known = getattr(utils, "is_scipy_available", None)
    if known is None or not known():
        return
    utils.is_scipy_available = lambda: False  # type: ignore[attr-defined]
    try:
        import_module(_LOSSES)
    except ImportError:  # this transformers keeps them elsewhere
        return
    finally:
        utils.is_scipy_available = known  # type: ignore[attr-defined]
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.loss.") and hasattr(module, "is_scipy_available"):
            module.is_scipy_available = known  # type: ignore[attr-defined]
            if not hasattr(module, "linear_sum_assignment"):
                module.linear_sum_assignment = _linear_sum_assignment  # type: ignore[attr-defined]


def _linear_sum_assignment(*args: Any, **kwargs: Any) -> Any:
    return import_module("scipy.optimize").linear_sum_assignment(*args, **kwargs)
