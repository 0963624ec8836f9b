"""hfopt: the HuggingFace Trainer settings that train the same model fastest without running out of memory.

The public names are resolved on first use, so that `import hfopt` imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # so that an editor knows what the names are
    from hfopt.errors import HfoptError as HfoptError
    from hfopt.errors import NothingFits as NothingFits
    from hfopt.monitor.callback import HFGpuMonitor as HFGpuMonitor
    from hfopt.oom.protect import protect as protect
    from hfopt.planner import Plan as Plan
    from hfopt.planner import Request as Request
    from hfopt.planner import plan as plan

__version__ = "0.1.0"
__all__ = ["HFGpuMonitor", "HfoptError", "NothingFits", "Plan", "Request", "plan", "protect"]

_DEFINED_IN: dict[str, str] = {
    "HFGpuMonitor": "hfopt.monitor.callback",
    "HfoptError": "hfopt.errors",
    "NothingFits": "hfopt.errors",
    "Plan": "hfopt.planner",
    "Request": "hfopt.planner",
    "plan": "hfopt.planner",
    "protect": "hfopt.oom.protect",
}


def __getattr__(name: str) -> Any:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module 'hfopt' has no attribute {name!r}")
    return getattr(import_module(_DEFINED_IN[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
