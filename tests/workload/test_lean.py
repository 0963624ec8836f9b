"""transformers imported without scipy, which comes when a loss asks for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
from importlib.util import find_spec
from hfopt.workload.lean import spare_scipy
spare_scipy()
from transformers import BertForSequenceClassification
assert "scipy" not in sys.modules, "scipy was imported with the models"
from transformers.loss import loss_for_object_detection as losses
if find_spec("scipy") is None:
    sys.exit()
rows, columns = losses.linear_sum_assignment([[4.0, 1.0], [2.0, 9.0]])
assert list(columns) == [1, 0] and "scipy" in sys.modules
assert losses.is_scipy_available()
"""


@pytest.mark.slow
def test_scipy_is_imported_only_when_a_loss_needs_it() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
