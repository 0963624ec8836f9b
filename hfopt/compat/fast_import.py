"""torch, transformers, peft and typer without what a process of our own never uses.

Only for a process of our own, before anything of transformers' models is imported: a script's own transformers is left as it is.

transformers' models import DTensor, Inductor behind it, Triton and Dynamo, and use none of them on one device in eager mode. They are
imported as on a torch without `torch.distributed`, which transformers supports; and `torch._dynamo` is a stand-in that answers what eager
code asks of it (`disable`: a function that is never compiled is itself) and becomes the real package when anything else is asked. So are
symbolic shapes, which bring sympy, while all sizes are numbers; flex attention, until it is called; and the wrappers of several devices,
which a model on one is not.

From 0.20 on typer has pydantic convert every option of a command, given or not. Importing pydantic and making an adapter for each of forty
options takes longer than all else that a command does before it reads its config. Here an option that is not given, a default, a text and
a path stay what they are; numbers, lists and whatever else is to be checked go typer's own way. Other versions are left alone.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_DYNAMO = "torch._dynamo"
_FLEX = "torch.nn.attention.flex_attention"
_SHAPES, _FUNCTIONS = "torch.fx.experimental.symbolic_shapes", "torch.utils._sympy.functions"
_MODELS = "transformers.modeling_utils"
_LOSSES = "transformers.loss.loss_utils"
_TRAINER = "transformers.trainer"


@contextmanager
def lean_imports() -> Iterator[None]:
    """What is imported stays to the end: looking through it for garbage takes a fifth of the time, then and later."""
    import logging

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

    `one_device`: and for DTensor, which autograd asks for (torch/csrc/autograd/python_variable.cpp) though no tensor here is one, and for
    what a model would be wrapped in.
    """
    _torch()
    for name, answers in (*_EAGER.items(), *(_UNSHARDED.items() if one_device else ())):
        stand_in(name, answers)
    if _WholeFirst not in sys.meta_path:
        sys.meta_path.insert(0, _WholeFirst)
    import_module(f"{_DYNAMO}.config")  # plain values, which checkpoints and fake tensors read


def _torch() -> None:
    """Without NVIDIA's own bindings, with which torch only writes notes into CUDA graphs, and does without where they are not installed."""
    spared = {name: None for name in ("cuda.bindings",) if not {name, "torch"} & sys.modules.keys()}
    sys.modules.update(spared)  # type: ignore[arg-type] # None: as if it were not there
    try:
        import_module("torch")
    finally:
        for name in spared:
            del sys.modules[name]


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


class _WholeFirst:
    """Executes a package before a module of it that is imported by its own name, for those packages that do not stand it otherwise."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package = next((one for one in _WHOLE if name.startswith(f"{one}.")), None)
        if package is None or not isinstance(sys.modules.get(package), _Later):
            return None
        _execute(sys.modules[package])
        there = sys.modules.get(name)
        if there is None:
            return None
        there.__spec__ = ModuleSpec(name, _There(there))  # the package has imported it itself: importlib goes by the module's own
        return there.__spec__


class _There(Loader):
    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


_WHOLE = ("sympy", "deepspeed", "torch.distributed.fsdp")


def _execute(module: ModuleType | None) -> None:
    if isinstance(module, _Later) and module.__spec__ is not None and module.__spec__.loader is not None:
        for name, inside in list(sys.modules.items()):
            if isinstance(inside, _Later) and name.startswith(f"{module.__name__}."):
                inside.__dict__[_ANSWERS] = {}  # the real package wants the real ones of its own modules
        module.__class__ = ModuleType  # type: ignore[assignment]
        module.__spec__.loader.exec_module(module)


def _called_later(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is not executed before it is called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        _execute(sys.modules[module])
        return getattr(sys.modules[module], name)(*args, **kwargs)

    return call


def _of_numbers(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    """What symbolic shapes answer where all is numbers already."""
    otherwise = _called_later(_SHAPES, name)

    def call(*values: Any, **options: Any) -> Any:
        return answer(*values) if all(map(_is_plain, values)) else otherwise(*values, **options)

    return call


def _is_plain(value: Any) -> bool:
    if type(value) in (bool, int):
        return True
    numbers = (*value.shape, *value.stride()) if hasattr(value, "stride") else value  # of a tensor
    return isinstance(numbers, (tuple, list)) and all(type(one) is int for one in numbers)


class _Named(type):
    """A class of which whatever has its name is an instance: those of the real one, once there are any."""

    def __instancecheck__(cls, value: Any) -> bool:
        return type(value).__name__ == cls.__name__


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
    "sympy": {"Basic": type("Basic", (), {})},
    _FUNCTIONS: {"Max": _called_later(_FUNCTIONS, "Max")},
    _SHAPES: {
        **{name: _of_numbers(name, lambda value, *_: value) for name in ("expect_true", "guarding_hint_or_throw")},
        **{name: _of_numbers(name, bool) for name in ("guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true")},
        "compute_unbacked_bindings": _called_later(_SHAPES, "compute_unbacked_bindings"),
        "free_unbacked_symbols": _of_numbers("free_unbacked_symbols", lambda value: set()),
        "has_free_unbacked_symbols": _of_numbers("has_free_unbacked_symbols", lambda value: False),
        "has_guarding_hint": _of_numbers("has_guarding_hint", lambda value: True),
        **{name: _of_numbers(name, lambda value: False) for name in ("is_nested_int", "is_symbolic")},
        "sym_and": _of_numbers("sym_and", lambda *values: all(values)),
        "sym_or": _of_numbers("sym_or", lambda *values: any(values)),
        "sym_eq": _of_numbers("sym_eq", lambda one, other: tuple(one) == tuple(other) if isinstance(one, (tuple, list)) else one == other),
    },
    _FLEX: {
        "BlockMask": _Named("BlockMask", (), {}),
        "_DEFAULT_SPARSE_BLOCK_SIZE": 128,
        **{name: _called_later(_FLEX, name) for name in ("flex_attention", "create_block_mask", "AuxRequest")},
    },
}
"""What names of torch's compiler come to where nothing is compiled (torch/_dynamo/decorators.py), where all sizes are numbers
(torch/fx/experimental/symbolic_shapes.py), and where flex attention is imported and not used."""
_SHARDED = "torch.distributed.fsdp"
_UNSHARDED: Mapping[str, Mapping[str, Any]] = {
    "torch.distributed.tensor": {"DTensor": type("DTensor", (), {})},
    _SHARDED: {},
    f"{_SHARDED}.fully_sharded_data_parallel": {"FullyShardedDataParallel": type("FullyShardedDataParallel", (), {})},
    "deepspeed": {"DeepSpeedEngine": type("DeepSpeedEngine", (), {})},
}
"""Whether a model is wrapped for several devices is asked of these (accelerate/utils/other.py); one on one device is not."""


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


def spare_pydantic() -> None:
    """Once for a process; a second call changes nothing."""
    from typer import core

    parameter: Any = getattr(core, "_TyperParameter", None)
    whole = getattr(parameter, "get_runtime_param", None)
    if whole is None or hasattr(whole, "whole"):
        return

    def get_runtime_param(self: Any) -> _AsGiven:
        return _AsGiven(lambda: whole(self))

    get_runtime_param.whole = whole  # type: ignore[attr-defined]
    parameter.get_runtime_param = get_runtime_param


class _AsGiven:
    def __init__(self, whole: Callable[[], Any]) -> None:
        self._whole = whole

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        kind, stated = param.type_descriptor.annotation, param.type_descriptor.parameter_info
        if kind in (str, int, float) and type(value) is kind:
            return value
        if kind is Path and type(value) is str and not _has_conditions(stated) and not _unreadable(value):
            return Path(value)
        return self._whole().coerce(value, param=param, ctx=ctx)


def _has_conditions(stated: Any) -> bool:
    """What is asked of a path besides being one."""
    named = ("exists", "writable", "resolve_path", "allow_dash", "path_type", "parser", "click_type")
    return any(getattr(stated, name, None) for name in named) or not (stated.file_okay and stated.dir_okay)


def _unreadable(path: str) -> bool:
    return os.path.lexists(path) and not os.access(path, os.R_OK)
