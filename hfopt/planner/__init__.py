"""The planner: composes the stages into `plan()`; the algorithm is one page, in `algorithm.py`."""

from __future__ import annotations

from hfopt.job.request import Request
from hfopt.planner.python_api import plan
from hfopt.planner.result import Plan

__all__ = ["Plan", "Request", "plan"]
