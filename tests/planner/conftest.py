"""Fixtures of the planner: a tiny model, and a desk to plan at."""

from planned_runs import attached, desk, tiny

__all__ = ["attached", "desk", "tiny"]
