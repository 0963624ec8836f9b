"""Fixtures of runs that are planned and protected where they are."""

from planned_runs import attached, desk, tiny
from tiny_trainers import lab, layer_of, too_small

__all__ = ["attached", "desk", "lab", "layer_of", "tiny", "too_small"]
