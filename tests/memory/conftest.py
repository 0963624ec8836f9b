"""Small workloads for the memory estimate."""

from tiny_workloads import tiny_gpt2, tiny_wav2vec2

__all__ = ["tiny_gpt2", "tiny_wav2vec2"]
