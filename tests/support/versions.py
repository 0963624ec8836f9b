"""What an older transformers or torch, as pyproject.toml allows it, does not have: the tests of it are skipped there, by name."""

from __future__ import annotations

from importlib.metadata import version

import pytest

_HERE = version("transformers")
_MAJOR, _MINOR = (int(part) for part in _HERE.split(".")[:2])

BEFORE_5 = _MAJOR < 5
needs_5 = pytest.mark.skipif(BEFORE_5, reason=f"of transformers 5; here is {_HERE}")
needs_graded_checkpointing = pytest.mark.skipif(
    (_MAJOR, _MINOR) < (5, 22), reason=f"transformers checkpoints every n-th layer from 5.22 on; here is {_HERE}"
)

_TORCH = version("torch")
RESETS_FSDP = tuple(int(part) for part in _TORCH.split("+")[0].split(".")[:2]) >= (2, 15)
needs_reset_of_fsdp = pytest.mark.skipif(not RESETS_FSDP, reason=f"torch resets a failed FSDP2 step from 2.15 on; here is {_TORCH}")
