"""What is borrowed from torch and transformers.

Whether TF32 is on is told whichever of torch's two settings said so; reading the wrong one would end monitor and fallback. A trace asks
masks for their values.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.utils import import_utils

from hfopt.compat.transformers_patches import masks_read

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
from hfopt.compat import set_tf32, tf32_is_on
for statement, expected in {said!r}.items():
    child = os.fork()
    if not child:
        exec(statement)
        os._exit(tf32_is_on() != expected)
    assert os.waitpid(child, 0)[1] == 0, statement
"""


def test_it_is_told_however_it_was_said() -> None:
    said = SAID | (SAID_ANEW if NEW else {})
    done = subprocess.run([sys.executable, "-c", ONE.format(said=said)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_trace_asks_a_fake_mask_for_its_values_as_a_step_would() -> None:
    """The canary: transformers' question whether a tensor is fake stands where it is looked for, and is put back."""
    helpers = import_utils
    if not hasattr(helpers, "is_fake_tensor"):
        pytest.skip("this transformers does not ask")
    with FakeTensorMode():
        mask = torch.ones(2, 4, dtype=torch.long)
        assert helpers.is_tracing(mask)
        with masks_read():
            assert not helpers.is_tracing(mask)
        assert helpers.is_tracing(mask)
