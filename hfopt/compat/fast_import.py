"""torch, transformers and peft imported without what a process of our own never uses.

Only for a process of our own, before anything of transformers' models is imported: a script's own transformers is left as it is.

transformers' models import DTensor, Inductor behind it, Triton and Dynamo, and use none of them on one device in eager mode. They are
imported as on a torch without `torch.distributed`, which transformers supports; and `torch._dynamo` is a stand-in that answers what eager
code asks of it (`disable`: a function that is never compiled is itself) and becomes the real package when anything else is asked.
"""

from __future__ import annotations

import atexit
import gc
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_DYNAMO = "torch._dynamo"
_MODELS = "transformers.modeling_utils"
_LOSSES = "transformers.loss.loss_utils"
_TRAINER = "transformers.trainer"


@contextmanager
def lean_imports() -> Iterator[None]:
    """What is imported stays to the end: looking through it for garbage takes a fifth of the time, then and later."""
    was_on = gc.isenabled()
    gc.disable()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it, and it misses kernels that only the CPU would use
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # extensions complain at the end of what was never collected
        if was_on:
            gc.enable()


def spare_dynamo(*, one_device: bool = False) -> None:
    """Puts stand-ins for torch's compiler in front of it: what asks more of it than to leave eager code alone gets the real one.

    `one_device`: and for DTensor, which autograd asks for (torch/csrc/autograd/python_variable.cpp) though no tensor here is one.
    """
    import_module("torch")
    for name, answers in (*_EAGER.items(), *(_UNSHARDED.items() if one_device else ())):
        stand_in(name, answers)
    import_module(f"{_DYNAMO}.config")  # plain values, which checkpoints and fake tensors read


def stand_in(name: str, answers: Mapping[str, Any]) -> None:
    """Puts a module in place of one that is installed and not imported yet."""
    spec = None if name in sys.modules else find_spec(name)
    if spec is None:
        return
    sys.modules[name] = module = module_from_spec(spec)
    module.__class__ = _Later
    module.__dict__[_ANSWERS] = answers
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)


class _Later(ModuleType):
    """A module that is not executed until more is asked of it than its answers."""

    def __getattr__(self, name: str) -> Any:
        answers = self.__dict__[_ANSWERS]
        if name in answers:
            return answers[name]
        if name.startswith("__") or self.__spec__ is None or self.__spec__.loader is None:
            raise AttributeError(name)
        for module in (sys.modules.get(self.__name__.rpartition(".")[0]), self):  # a package imports its modules in its own order
            _execute(module)
        return getattr(self, name)


def _execute(module: ModuleType | None) -> None:
    if isinstance(module, _Later) and module.__spec__ is not None and module.__spec__.loader is not None:
        for name, inside in list(sys.modules.items()):
            if isinstance(inside, _Later) and name.startswith(f"{module.__name__}."):
                inside.__dict__[_ANSWERS] = {}  # the real package wants the real ones of its own modules
        module.__class__ = ModuleType  # type: ignore[assignment]
        module.__spec__.loader.exec_module(module)


def _itself(function: Any = None, recursive: bool = True, **_: Any) -> Any:
    return (lambda given: given) if function is None else function


class _Source:
    """Where a compiled graph would find a tensor."""

    def __init__(self, name: str) -> None:
        self.name = name


_ANSWERS = "_hfopt_answers"
_EAGER: Mapping[str, Mapping[str, Any]] = {
    _DYNAMO: {
        **dict.fromkeys(("disable", "allow_in_graph", "assume_constant_result"), _itself),
        "graph_break": lambda *_, **__: None,
    },
    f"{_DYNAMO}.eval_frame": {"OptimizedModule": type("OptimizedModule", (), {})},  # accelerate asks whether a model is one
    f"{_DYNAMO}.source": {
        "ConstantSource": _Source,
        **{name: type(name, (_Source,), {}) for name in ("RandomValueSource", "CallMethodItemSource", "FloatTensorSource")},
    },
}
_UNSHARDED: Mapping[str, Mapping[str, Any]] = {"torch.distributed.tensor": {"DTensor": type("DTensor", (), {})}}
"""What names of torch's compiler come to where nothing is compiled (torch/_dynamo/decorators.py)."""


def spare_second_look() -> None:
    """transformers reads all its models' files for their names, and again for `transformers.models`: the same answer, found once."""
    transformers = import_module("transformers")
    helpers = import_module("transformers.utils.import_utils")
    look = getattr(helpers, "create_import_structure_from_path", None)
    if look is None or not hasattr(look, "cache_info") or "transformers.models" in sys.modules:
        return
    folder = Path(str(transformers.__file__)).parent / "models"
    setattr(  # noqa: B010 - a module's own helper
        helpers, "create_import_structure_from_path", lambda path: look(folder if path == str(folder / "__init__.py") else path)
    )
    try:
        import_module("transformers.models")
    finally:
        setattr(helpers, "create_import_structure_from_path", look)  # noqa: B010


def spare_scipy(*, one_device: bool = False) -> None:
    """Imports the losses for object detection with scipy out of sight, then puts it back behind a function that imports it when called.

    `one_device`: transformers' models come as where torch is built without `torch.distributed`, for nothing is a DTensor.
    """
    packages = [*(() if "scipy" in sys.modules else ("scipy",)), *(("torch_distributed",) if one_device else ())]
    if not packages or not _imported_without(packages, _MODELS if one_device else _LOSSES):
        return
    known = import_module("transformers.utils").is_scipy_available
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.loss.") and hasattr(module, "is_scipy_available"):
            module.is_scipy_available = known  # type: ignore[attr-defined]
            if not hasattr(module, "linear_sum_assignment"):
                module.linear_sum_assignment = _linear_sum_assignment  # type: ignore[attr-defined]


def spare_the_trainer(*, adapters: bool) -> None:
    """Imports the Trainer with datasets out of sight, for a process whose data is no `datasets.Dataset`: it only asks whether it is one.
    Without `adapters` peft is out of sight too, which would bring bitsandbytes, and that the compiler."""
    packages = ("datasets", *(() if adapters else ("peft",)))
    _imported_without([name for name in packages if name not in sys.modules], _TRAINER)


def spare_inductor() -> None:
    """Imports bitsandbytes, which peft wants wherever it is installed, with its functions compiled when they are first called: to compile
    them at the import takes in all of torch's compiler, which nothing here asks for."""
    if "bitsandbytes" in sys.modules or find_spec("bitsandbytes") is None:
        return
    torch = import_module("torch")
    compiles = torch.compile
    torch.compile = lambda model=None, **options: _compiled_later(compiles, model, options)  # type: ignore[attr-defined]
    try:
        import_module("bitsandbytes")
    except ImportError:  # who needs it says so
        return
    finally:
        torch.compile = compiles  # type: ignore[attr-defined]


def _compiled_later(compiles: Callable[..., Any], function: Any, options: Mapping[str, Any]) -> Any:
    if function is None:
        return lambda given: _compiled_later(compiles, given, options)
    made: list[Any] = []

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not made:
            made.append(compiles(function, **options))
        return made[0](*args, **kwargs)

    return call


def _imported_without(packages: Sequence[str], module: str) -> bool:
    """Whether the module was imported now, with the packages as if not installed; afterwards transformers finds them again."""
    if module in sys.modules:
        return False
    places = [import_module(f"transformers.{name}") for name in ("utils", "utils.import_utils")]
    found = [(place, name) for place in places for name in (f"is_{one}_available" for one in packages) if hasattr(place, name)]
    known = [getattr(*one) for one in found]
    for place, name in found:
        setattr(place, name, lambda: False)
    try:
        import_module(module)
    except ImportError:  # this transformers keeps it elsewhere
        return False
    finally:
        for (place, name), available in zip(found, known, strict=True):
            setattr(place, name, available)
    return bool(found)


def _linear_sum_assignment(*args: Any, **kwargs: Any) -> Any:
    return import_module("scipy.optimize").linear_sum_assignment(*args, **kwargs)
