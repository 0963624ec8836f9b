"""Tiny Trainers and a memory that is too small at chosen moments."""

from tiny_trainers import lab, layer_of, too_small

__all__ = ["lab", "layer_of", "too_small"]
