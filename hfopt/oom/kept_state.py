"""What a script's own code keeps between two calls of its training step, looked at around a repetition.

A step that ran out of memory has moved such things already, and pieces move them once each: a generator of the script's own, a loss object
that counts, a queue of negatives, a teacher, a closure, a global, a second loader. Nothing is noted in ordinary steps. When memory ran out,
all that the step can reach is looked at; after its repetition it is looked at again. What moved then has moved in the failed attempt
too, and there is no way back: the step is not repeated in this process, and what moved is named.

Reached from the Trainer's own attributes and methods, its model, its loss and its callbacks: attributes, containers, closures, defaults,
classes, globals that a function names, generators, iterators. What the Trainer, the model and their libraries keep for themselves is
passed over, as is what can be put back (`own_counts.py`, `replay.py`).

Limits: state in compiled code, in a file, in another process or in an object of a known library is not seen; of containers with more than
`_LONG` entries only the length and both ends are, of large tensors what `state_prints.py` says.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
import types
from collections import UserDict, deque
from collections.abc import Set
from typing import Any

import numpy as np
import torch

from hfopt.oom.state_prints import ATOMS, ENDS, GRAPH, NEVER, digest, is_output, print_of_tensor, standing, state_of
from hfopt.oom.step_down import Refusal

Covered = set[tuple[int, str | None]]  # a container and a name in it, or None for all of them
_LONG = 10_000
_MOST = 50_000
LIBRARIES = frozenset(
    {
        *("torch", "transformers", "peft", "trl", "accelerate", "sentence_transformers", "setfit", "bitsandbytes", "timm", "torchvision"),
        *("torchaudio", "liger_kernel", "datasets", "tokenizers", "hfopt", "huggingface_hub", "safetensors", "numpy", "deepspeed"),
        *("PIL", "comet_ml", "evaluate", "loguru", "matplotlib", "mlflow", "pandas", "pyarrow", "tensorboard", "tqdm", "wandb"),
    }
)
"""What their objects and functions keep is theirs; a step that is repeated with them is tested."""
_LOOKED_INTO = frozenset({"builtins", "types", "argparse", "queue", "collections", "functools", "itertools"})
"""Of the standard library, whose other objects are passed over."""
_STATELESS = (torch.optim.Optimizer, torch.utils.data.Dataset, torch.utils.data.DataLoader, torch.utils.data.Sampler, np.generic)
_OF_TORCH = frozenset(vars(torch.nn.Module())) | {"gradient_checkpointing", "_gradient_checkpointing_func"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_COUNTED_ELSEWHERE = frozenset({"num_input_tokens_seen"})  # of TrainerState: TRL's Trainers count it in their steps (`own_counts.py`)
_RANDOM = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Look:
    """All that was reached, by the path it was reached on."""

    def __init__(self, *, weights: bool = False) -> None:
        self.prints: dict[str, Any] = {}
        self.weights = weights  # the model's own are among it

    def moved(self, later: Look, outputs: Set[str]) -> str | None:
        """In a sentence, the first thing that is another one later; what was an output once is passed over."""
        never = next((path for path, value in later.prints.items() if value is NEVER), None)
        if never is not None:
            return f"{never} {NEVER}, so it may change at every micro-batch"
        for path in dict.fromkeys((*self.prints, *later.prints)):
            before, now = self.prints.get(path), later.prints.get(path)
            if before != now and path not in outputs:
                return f"{path} changes at every micro-batch, and nothing can put it back"
        return None


def refusal(moved: str) -> Refusal:
    return Refusal(name="state_in_step", reason=moved, batch_bound=True, lasting=True)


class KeptState:
    """Of one Trainer and its training step."""

    def __init__(self, trainer: Any, step: Any) -> None:
        self._trainer, self._step = trainer, step
        self._seen: dict[int, Any] = {}  # held, so that no other object gets its identity
        self._waiting: deque[tuple[str, Any]] = deque()
        self._covered: Covered = set()
        self._look = Look()
        self._path = "the Trainer"  # that is looked at
        self._outputs: set[str] = set()  # paths on which a forward leaves what it made, with its graph

    def moved(self, since: Look, covered: Covered) -> str | None:
        return since.moved(self.look(covered, weights=since.weights), self._outputs)

    def look(self, covered: Covered, *, weights: bool = False) -> Look:
        """`covered` are containers and names in them that are put back; without `weights` the model's own tensors are passed over."""
        trainer = self._trainer
        self._seen = {id(one): one for one in (trainer, trainer.accelerator, trainer.optimizer, self)}
        self._waiting, self._covered, self._look = deque(), covered, Look(weights=weights)
        try:
            self._walk(trainer, weights=weights)
        except Exception as error:  # noqa: BLE001 - whatever a script's objects raise when they are looked at
            self._look.prints[f"what the script keeps ({type(error).__name__} in {self._path})"] = NEVER
        found, self._look, self._seen = self._look, Look(), {}
        self._outputs.update(path for path, value in found.prints.items() if value == GRAPH)
        return found

    def _walk(self, trainer: Any, *, weights: bool) -> None:
        self._trainer_itself(trainer)
        self._modules("model", trainer.model, is_the_model=True)
        for name, one in trainer.model.named_parameters():
            self._children(one, f"{name}.", [(key, value) for key, value in vars(one).items() if isinstance(value, (*ATOMS, torch.Tensor))])
        if weights:
            for name, one in trainer.model.named_parameters():
                self._look.prints[f"the weight {name}"] = print_of_tensor(one)
        for one in trainer.callback_handler.callbacks:
            self._waiting.append((type(one).__name__, one))
        self._waiting.append(("training_step", self._step))
        while self._waiting:
            self._path, value = self._waiting.popleft()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._visit(self._path, value)
            if len(self._seen) > _MOST:
                self._look.prints["a script of more than 50,000 objects"] = NEVER
                break

    def _trainer_itself(self, trainer: Any) -> None:
        libraries = set().union(*(_sets(base) for base in type(trainer).__mro__ if _root(base) in LIBRARIES))
        name = type(trainer).__name__
        own = {key: value for key, value in vars(trainer).items() if key not in libraries}
        self._children(trainer, f"{name}.", own.items())
        self._settings(trainer)
        passed_over = {"model", "model_wrapped", "train_dataset", "eval_dataset", "callback_handler"}
        for key in sorted(vars(trainer).keys() & libraries - passed_over):
            if not isinstance(value := vars(trainer)[key], ATOMS):
                self._waiting.append((f"{name}.{key}", value))
        self._look.prints[f"{name}.log"] = len(trainer.state.log_history)
        self._waiting.extend((base.__name__, base) for base in type(trainer).__mro__ if is_own(base))

    def _settings(self, trainer: Any) -> None:
        """Plain values of libraries' objects, which a script may move in its step: a schedule, a group's decay, a temperature."""
        kept = {name: getattr(trainer, name, None) for name in ("args", "state", "label_smoother", "lr_scheduler")}
        kept["lr_scheduler"] = getattr(kept["lr_scheduler"], "scheduler", kept["lr_scheduler"])
        kept["model.config"] = getattr(trainer.model, "config", None)
        groups = getattr(trainer.optimizer, "param_groups", ())
        found = [(name, getattr(one, "__dict__", {})) for name, one in kept.items()]
        for name, values in [*found, *((f"optimizer.param_groups[{number}]", group) for number, group in enumerate(groups))]:
            plain = {key: value for key, value in values.items() if isinstance(value, ATOMS) and key not in _COUNTED_ELSEWHERE}
            self._look.prints |= {f"{name}.{key}": repr(value) for key, value in plain.items()}

    def _children(self, container: Any, path: str, items: Any) -> None:
        whole = (id(container), None) in self._covered
        for name, value in list(items):
            covered = whole or (id(container), name) in self._covered
            if isinstance(value, ATOMS):
                if not covered:
                    self._look.prints[f"{path}{name}"] = repr(value)
            elif not (covered and isinstance(value, torch.Tensor)):
                self._waiting.append((f"{path}{name}", value))

    def _visit(self, path: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if (id(value), None) not in self._covered:
                self._look.prints[path] = print_of_tensor(value)
        elif isinstance(value, np.ndarray):
            if not isinstance(value, np.memmap) and value.flags.writeable and value.dtype != object:
                self._look.prints[path] = print_of_tensor(torch.from_numpy(value)) if value.dtype.kind in "biuf" else value.tobytes()
        elif isinstance(value, _RANDOM):
            self._look.prints[path] = digest(state_of(value))
        elif isinstance(value, torch.nn.Module):
            self._modules(path, value, is_the_model=False)
        elif isinstance(value, types.FunctionType):
            self._function(path, value)
        elif isinstance(value, types.MethodType):
            self._waiting.extend(((path, value.__self__), (path, value.__func__)))
        elif isinstance(value, functools.partial):
            self._children(value, f"{path} ", enumerate((value.func, *value.args, *value.keywords.values())))
        elif isinstance(value, type):
            self._class(value)
        elif "_num_yielded" in getattr(value, "__dict__", {}):
            self._look.prints[path] = value._num_yielded
        elif isinstance(value, _STATELESS) or not _is_looked_into(value):
            pass
        elif isinstance(value, dict | UserDict | list | deque | tuple | set | frozenset):
            self._container(path, value)
        elif hasattr(type(value), "__next__") and not hasattr(value, "__dict__"):
            self._look.prints[path] = standing(value)
        else:
            self._object(path, value)

    def _container(self, path: str, value: Any) -> None:
        if isinstance(value, UserDict):
            value = value.data
        covered = (id(value), None) in self._covered
        if not covered:
            self._look.prints[f"{path} (its length)"] = len(value)
        if isinstance(value, dict):
            known = dict.items(value)
            items = [(f"[{key!r}]" if isinstance(key, ATOMS) else f"[{type(key).__name__}]", inner) for key, inner in known]
        elif isinstance(value, set | frozenset):
            self._look.prints[path] = digest(sorted(map(repr, (one for one in value if isinstance(one, ATOMS)))))
            return
        else:
            items = [(f"[{number}]", inner) for number, inner in enumerate(value)]
        if any(is_output(inner) for _, inner in items):
            self._look.prints.pop(f"{path} (its length)", None)
            self._look.prints[path] = GRAPH
            return
        if len(items) > _LONG:
            items = [*items[:ENDS], *items[-ENDS:]]
        self._children(value, path, items)

    def _object(self, path: str, value: Any) -> None:
        if hasattr(value, "__dict__"):
            self._children(value, f"{path}.", vars(value).items())
        slots = [name for base in type(value).__mro__ for name in _slots(base) if hasattr(value, name)]
        self._children(value, f"{path}.", ((name, getattr(value, name)) for name in slots))
        self._waiting.append((type(value).__name__, type(value)))

    def _modules(self, path: str, root: torch.nn.Module, *, is_the_model: bool) -> None:
        for place, module in root.named_modules(prefix=path):
            self._seen[id(module)] = module
            tensors = module._buffers if is_the_model else {**module._buffers, **module._parameters}
            for name, value in tensors.items():
                if value is not None:
                    self._waiting.append((f"{place}.{name}", value))
            for hooks in HOOKS:
                self._waiting.extend((f"a hook of {place}", hook) for hook in getattr(module, hooks).values())
            own = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
            if bases := [base for base in type(module).__mro__ if is_own(base)]:
                self._children(module, f"{place}.", own.items())
                self._waiting.extend((base.__name__, base) for base in bases)
            else:
                self._waiting.extend((f"{place}.{name}", value) for name, value in own.items() if _may_be_given(value))

    def _function(self, path: str, function: types.FunctionType) -> None:
        own = is_own(function)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if not _is_filled(cell):
                continue
            if own:
                self._children(cell, f"{function.__qualname__}: ", ((name, cell.cell_contents),))
            elif _may_be_given(cell.cell_contents):  # a library has wrapped what the script gave it
                self._waiting.append((path, cell.cell_contents))
        if not own:
            return
        self._children(function, f"{function.__qualname__}.", vars(function).items())
        given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self._children(function, f"a default of {function.__qualname__} ", enumerate(given))
        where = function.__globals__
        if _is_installed(str(where.get("__name__"))):
            return
        known = _names(function.__code__)
        self._named(where, known)
        for module in [where.get(name) for name in known]:
            if isinstance(module, types.ModuleType) and not _is_familiar(module.__name__) and not _is_installed(module.__name__):
                self._named(vars(module), known)

    def _named(self, where: dict[str, Any], names: frozenset[str]) -> None:
        kept = {name: where[name] for name in sorted(names) if name in where and not isinstance(where[name], types.ModuleType)}
        self._children(where, f"{where.get('__name__')}.", kept.items())

    def _class(self, kind: type) -> None:
        if not is_own(kind):
            return
        for name, value in list(vars(kind).items()):
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType):
                self._waiting.append((f"{kind.__name__}.{name}", function))
            elif name[:2] != "__" and name != "_abc_impl" and not hasattr(type(value), "__get__"):
                self._children(kind, f"{kind.__name__}.", ((name, value),))
        self._waiting.extend((base.__name__, base) for base in kind.__bases__)


def _root(value: Any) -> str:
    return str(getattr(value, "__module__", None) or "builtins").split(".")[0]


def _is_familiar(module: str) -> bool:
    root = module.split(".")[0]
    return root in LIBRARIES or (root in sys.stdlib_module_names and root != "__main__")


@functools.cache
def _is_installed(module: str) -> bool:
    """Whether it lies where packages are installed: what those keep in globals is theirs."""
    where = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in where or "dist-packages" in where


def is_own(value: Any) -> bool:
    """A class or a function that the script brings."""
    return not _is_familiar(_root(value))


def _is_looked_into(value: Any) -> bool:
    from transformers import Trainer

    kind = type(value)
    root = _root(kind)
    known = root in LIBRARIES or (root in sys.stdlib_module_names and root not in _LOOKED_INTO)
    return not known and not isinstance(value, types.ModuleType | Trainer)


def _may_be_given(value: Any) -> bool:
    """To an object of a library, by the script: a function, a generator, an object."""
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial, *_RANDOM)):
        return True
    return not isinstance(value, (*ATOMS, torch.Tensor, type)) and is_own(type(value))


@functools.cache
def _sets(kind: type) -> frozenset[str]:
    """Names of attributes that a class sets on its objects."""
    functions = [getattr(value, "__wrapped__", value) for value in vars(kind).values()]
    codes = [function.__code__ for function in functions if isinstance(function, types.FunctionType)]
    return frozenset(one.argval for code in codes for one in dis.get_instructions(code) if one.opname == "STORE_ATTR")


def own_names(trainer: Any) -> frozenset[str]:
    """Attributes of a Trainer that the script's own code sets or names."""
    functions = [value for base in type(trainer).__mro__ if is_own(base) for value in vars(base).values()]
    named = frozenset().union(*(_names(one.__code__) for one in functions if isinstance(one, types.FunctionType)))
    libraries: frozenset[str] = frozenset().union(*(_sets(base) for base in type(trainer).__mro__ if _root(base) in LIBRARIES))
    return named | (frozenset(vars(trainer)) - libraries)


@functools.cache
def _names(code: types.CodeType) -> frozenset[str]:
    """All that a function's code, and that of functions within it, calls by name."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*map(_names, inner))


def _slots(base: type) -> list[str]:
    found = vars(base).get("__slots__", ())
    names = [found] if isinstance(found, str) else list(found)
    private = f"_{base.__name__.lstrip('_')}"
    return [
        f"{private}{name}" if name[:2] == "__" and name[-2:] != "__" else name for name in names if name not in ("__dict__", "__weakref__")
    ]


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
