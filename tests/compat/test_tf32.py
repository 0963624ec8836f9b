"""Whether TF32 is on is told whichever of torch's two settings said so; reading the wrong one would end monitor and fallback."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

NEW = hasattr(torch.backends.cuda.matmul, "fp32_precision")
SAID = {
    "": False,
    "torch.backends.cuda.matmul.allow_tf32 = True": True,
    "torch.set_float32_matmul_precision('high')": True,
    "set_tf32(True)": True,
    "set_tf32(True); set_tf32(False)": False,
}
SAID_ANEW = {
    "torch.backends.fp32_precision = 'tf32'": True,
    "torch.backends.fp32_precision = 'ieee'": False,
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": True,
}
ONE = """
import os, torch
from hfopt.compat.torch_patches import set_tf32, tf32_is_on
for statement, expected in {said!r}.items():
    child = os.fork()
    if not child:
        exec(statement)
        os._exit(tf32_is_on() != expected)
    assert os.waitpid(child, 0)[1] == 0, statement
"""


@pytest.mark.slow
def test_it_is_told_however_it_was_said() -> None:
    said = SAID | (SAID_ANEW if NEW else {})
    done = subprocess.run([sys.executable, "-c", ONE.format(said=said)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
