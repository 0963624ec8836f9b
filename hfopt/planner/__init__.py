"""The planner: composes the stages into `plan()`; the algorithm is one page, in `algorithm.py`."""

from __future__ import annotations

from hfopt.planner.live import plan
from hfopt.planner.request import Request
from hfopt.planner.result import Plan

__all__ = ["Plan", "Request", "plan"]
