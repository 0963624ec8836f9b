"""Fixtures of prices: a tiny model."""

from planned_runs import tiny

__all__ = ["tiny"]
