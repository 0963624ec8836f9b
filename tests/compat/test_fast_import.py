"""transformers imported without scipy and datasets, and with nothing collected meanwhile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from hfopt.compat.fast_import import _compiled_later, stand_in

CODE = """
import sys
from importlib.util import find_spec
from hfopt.compat.fast_import import spare_scipy
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
from hfopt.compat.fast_import import lean_imports, spare_dynamo, spare_scipy, spare_the_trainer
with lean_imports():
    assert not gc.isenabled()
    spare_dynamo(one_device=True)
    spare_scipy(one_device=True)
    spare_the_trainer(adapters=False)
    from transformers import Trainer
assert gc.isenabled() and gc.get_freeze_count() > 100_000
for name in ("datasets", "peft", "bitsandbytes", "torch._inductor.compile_fx"):
    assert name not in sys.modules, f"{name} was imported with the Trainer"
from transformers.utils import is_datasets_available
from importlib.util import find_spec
assert is_datasets_available() == (find_spec("datasets") is not None)
"""


PEFT = """
import sys, torch
from hfopt.compat.fast_import import spare_inductor, spare_the_trainer
compiles = torch.compile
spare_inductor()
spare_the_trainer(adapters=True)
assert "peft" in sys.modules and "datasets" not in sys.modules
assert torch.compile is compiles and "torch._inductor.compile_fx" not in sys.modules, "torch's compiler was imported with peft"
"""


EAGER = """
import sys
from hfopt.compat.fast_import import spare_dynamo, spare_scipy
from hfopt.compat.model_names import spare_other_models
spare_dynamo(one_device=True)
spare_other_models()
spare_scipy(one_device=True)
import torch
from transformers import BertConfig, BertForSequenceClassification
from transformers.utils import is_torch_distributed_available
from torch.utils.checkpoint import checkpoint
for name in ("scipy", "triton", "torch._inductor", "torch._dynamo.convert_frame", "torch.distributed.tensor._ops"):
    assert name not in sys.modules, f"{name} was imported with the models"
assert is_torch_distributed_available()
model = BertForSequenceClassification(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8))
model.gradient_checkpointing_enable()
model.train()(torch.ones(2, 4, dtype=torch.long), labels=torch.ones(2, dtype=torch.long)).loss.backward()
assert torch._dynamo.disable(recursive=False)(len) is len
from torch._subclasses import FakeTensorMode
assert FakeTensorMode().from_tensor(torch.nn.BatchNorm1d(1).num_batches_tracked).ndim == 0
assert "torch._dynamo.convert_frame" not in sys.modules, "a step in eager mode took the compiler in"
from accelerate.utils import is_compiled_module
assert not is_compiled_module(model) and "torch._dynamo.convert_frame" not in sys.modules
assert torch._dynamo.list_backends() and "torch._dynamo.convert_frame" in sys.modules
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
assert is_compiled_module(torch.compile(model, backend="eager")) and not is_compiled_module(model)
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import DTensor
assert issubclass(DTensor, torch.Tensor) and torch._dynamo.source.ConstantSource.__mro__[1] is not object
"""


MODELS = """
import sys
from hfopt.compat.model_names import spare_other_models
spare_other_models()
import transformers
from transformers.utils import import_utils
def listed(name):
    return name in vars(transformers)["_class_to_module"]
assert listed("AutoModel") and not listed("BertModel") and not listed("GPT2Model"), "the files of all models were read"
from transformers import BertConfig, GPT2Config, AutoConfig
assert listed("BertModel") and not listed("ViTModel") and not listed("PaddleOCRTextConfig")
assert transformers.BertConfig is BertConfig and type(AutoConfig.for_model("bert")) is BertConfig
from transformers import initialization
assert not listed("ViTModel"), "a module is no model's name"
assert not hasattr(transformers.models, "no_such_model") and not hasattr(transformers, "NoSuchModel")
assert listed("ViTModel"), "what no folder's name begins is looked for in all of them"
from transformers import ViTModel, BertTokenizerFast
from transformers.models import bert
"""


SYMBOLS = """
import sys
from hfopt.compat.fast_import import spare_dynamo
spare_dynamo(one_device=True)
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, _DEFAULT_SPARSE_BLOCK_SIZE
from torch.fx.experimental.symbolic_shapes import guard_or_false, sym_and, sym_eq, free_unbacked_symbols
from accelerate.utils.other import extract_model_from_parallel
model = torch.nn.Linear(2, 2)
assert extract_model_from_parallel(model) is model
assert guard_or_false(True) is True and sym_and(True, False) is False and sym_eq(torch.Size((2, 3)), (2, 3)) is True
assert free_unbacked_symbols(torch.ones(2, device="meta")) == set()
for name in ("sympy.core", "deepspeed.runtime", "torch.distributed.fsdp._flat_param"):
    assert name not in sys.modules, f"{name} was imported where all sizes are numbers and all is on one device"
mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 4, 4, device="cpu")
assert isinstance(mask, BlockMask) and not isinstance(model, BlockMask)
from torch.nn.attention import flex_attention
assert flex_attention._DEFAULT_SPARSE_BLOCK_SIZE == _DEFAULT_SPARSE_BLOCK_SIZE and flex_attention.BlockMask is type(mask)
from torch.fx.experimental.symbolic_shapes import ShapeEnv
unknown = ShapeEnv().create_unbacked_symint()
assert guard_or_false(unknown == 3) is False and type(sym_eq((unknown, 1), (3, 1))) is torch.SymBool and free_unbacked_symbols(unknown)
"""


FIRST = """
import sys
from importlib import import_module
from hfopt.compat.fast_import import spare_dynamo
spare_dynamo(one_device=True)
for name in ("sympy.printing", "torch.utils._sympy.printers", "torch.distributed.fsdp._flat_param", "torch._inductor.codegen.common"):
    assert import_module(name) is sys.modules[name] and sys.modules[name].__spec__.name == name
import sympy, sympy.printing, torch.utils._sympy.functions
assert sympy.printing is sys.modules["sympy.printing"] and sympy.Integer(2) + 1 == 3
assert sys.modules["torch._inductor.codegen.common"].Max is torch.utils._sympy.functions.Max
"""


def test_a_package_is_executed_before_its_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way round its own imports meet a module that is half there."""
    folder = tmp_path / "hfopt_stood_in"
    folder.mkdir()
    (folder / "__init__.py").write_text("from hfopt_stood_in.sources import Local\n")
    (folder / "sources.py").write_text("from . import helpers\nclass Local: pass\n")
    (folder / "helpers.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    stood_in = ("hfopt_stood_in", "hfopt_stood_in.sources")
    for name in (*stood_in, "hfopt_stood_in.helpers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        del sys.modules[name]  # what is imported below goes again
    stand_in("hfopt_stood_in", {"answer": 1})
    stand_in("hfopt_stood_in.sources", {})
    assert sys.modules["hfopt_stood_in"].answer == 1 and "hfopt_stood_in.helpers" not in sys.modules
    assert sys.modules["hfopt_stood_in.sources"].Local is sys.modules["hfopt_stood_in"].Local


@pytest.mark.slow
@pytest.mark.parametrize("code", [EAGER, MODELS, SYMBOLS, FIRST], ids=["the compiler", "the models' names", "symbols", "a module first"])
def test_what_is_left_out_is_there_when_it_is_asked_for(code: str) -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


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
