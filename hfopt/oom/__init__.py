"""Surviving an out-of-memory error: the same step again in smaller pieces, at the same effective batch."""
