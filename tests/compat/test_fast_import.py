"""transformers imported without scipy and datasets, and with nothing collected meanwhile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from hfopt.compat.transformers_patches import _compiled_later

CODE = """
import sys
from importlib.util import find_spec
from hfopt.compat.transformers_patches import spare_scipy
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


TRAINER = """
import gc, sys
from hfopt.compat.transformers_patches import lean_imports, spare_datasets
with lean_imports():
    assert not gc.isenabled()
    spare_datasets()
    from transformers import Trainer
assert gc.isenabled() and gc.get_freeze_count() > 100_000
assert "datasets" not in sys.modules, "datasets was imported with the Trainer"
from transformers.utils import is_datasets_available
from importlib.util import find_spec
assert is_datasets_available() == (find_spec("datasets") is not None)
"""


PEFT = """
import sys, torch
from hfopt.compat.transformers_patches import spare_inductor
compiles = torch.compile
spare_inductor()
import peft
assert torch.compile is compiles and "torch._inductor.compile_fx" not in sys.modules, "torch's compiler was imported with peft"
"""


def test_what_is_compiled_later_is_what_was_asked_for() -> None:
    asked: list[object] = []

    def compiles(function: Callable[[int], int], **options: bool) -> Callable[[int], int]:
        asked.append((function, options))
        return lambda value: 10 * function(value)

    def twice(value: int) -> int:
        return 2 * value

    for later in (_compiled_later(compiles, twice, {"dynamic": False}), _compiled_later(compiles, None, {"dynamic": False})(twice)):
        asked.clear()
        assert later.__name__ == "twice" and not asked
        assert [later(1), later(2)] == [20, 40] and asked == [(twice, {"dynamic": False})]


@pytest.mark.slow
def test_peft_comes_without_the_compiler() -> None:
    pytest.importorskip("peft"), pytest.importorskip("bitsandbytes")
    done = subprocess.run([sys.executable, "-c", PEFT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_the_trainer_comes_without_datasets_and_nothing_is_left_to_complain_at_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", TRAINER], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "leaked" not in done.stderr, done.stderr[-2000:]


@pytest.mark.slow
def test_scipy_is_imported_only_when_a_loss_needs_it() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
