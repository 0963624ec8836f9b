"""True values for small integer and boolean tensors on the virtual GPU.

Its kernels do nothing, so `if attention_mask.all():` would read garbage and the model would take another attention kernel than on a
real card. This torch function mode keeps a CPU twin of every small integer or boolean CUDA tensor whose content follows from the host, and
of small float ones that were made from such and from constants, and runs each operation on the twins as well. It works at the Python API,
above the dispatcher, allocates nothing on the device and does not change what runs there. Scalars whose value is not known (the loss, a
gradient norm) read as zero. What a model chooses among such numbers outside of training (the next token of a text) is the middle one: no
special token, so a text is written to its full length. They are finite, too, none is equal to a constant, and what should be in order is:
a mask of those that are keeps them all.
"""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from hfopt_rehearsal_journal import journal  # type: ignore[import-not-found]
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils.weak import WeakTensorKeyDictionary

_MOST_ELEMENTS = 1 << 22
_MOST_FLOATS = 1 << 12  # of a tensor made on the card from constants and masks; weights and data have no twin
_MOST_ALIKE = 1 << 28  # elements of one value, kept as that value
_PASSED_THROUGH = {
    "__get__",
    "__set__",
    "is_complex",
    "is_floating_point",
    "size",
    "dim",
    "numel",
    "_set_grad_enabled",
    "linear",
    "layer_norm",
}
_READS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__", "is_nonzero", "equal"}
_RANDOM = {"randint", "randint_like", "randperm", "bernoulli", "bernoulli_", "multinomial", "random_"}
_RANDOM_FLOATS = {"rand_like", "randn_like", "normal_", "uniform_", "empty_like", "new_empty", "dropout", "exponential_"}
_CONSTANTS = {"zeros", "ones", "full", "arange", "linspace", "tensor", "eye"}
_BY_SHAPE_ALONE = {"ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"}
_CHOICES = {"argmax", "multinomial"}
_FINITE = {"isnan": False, "isinf": False, "isposinf": False, "isneginf": False, "isfinite": True}
_COMPARED = {"eq": False, "__eq__": False, "ne": True, "__ne__": True}
_ORDERED = {"ge", "__ge__", "le", "__le__"}
_READ_INSIDE = {"ctc_loss": {2: "input_lengths", 3: "target_lengths"}}  # arguments the C++ side copies to the host by itself
_twins = WeakTensorKeyDictionary()

_LET_GO_S = 0.2  # at the end: a thread of autograd that still lets go of Python objects would abort the process once Python is gone


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _names_cuda(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (isinstance(value, str) and value.startswith("cuda"))


def _on_host(value: Any) -> Any:
    """An argument as the run on the twins sees it."""
    if isinstance(value, torch.Tensor):
        return _twins[value] if value.is_cuda else value
    if type(value) in (tuple, list):
        return type(value)(map(_on_host, value))
    return torch.device("cpu") if _names_cuda(value) else value


def _zeros(value: Any) -> Any:
    return torch.zeros_like(value, device="cpu") if isinstance(value, torch.Tensor) else value


def _may_have_twin(tensor: torch.Tensor) -> bool:
    most = _MOST_FLOATS if tensor.is_floating_point() else _MOST_ALIKE
    return tensor.is_cuda and not tensor.is_complex() and tensor.numel() <= most


def _kept(twin: torch.Tensor) -> torch.Tensor | None:
    """The values of a tensor, if they are few, or all alike."""
    if twin.numel() <= _MOST_ELEMENTS or not any(twin.stride()):
        return twin
    first = twin.flatten()[0].clone()
    return first.expand(twin.shape) if bool((twin == first).all()) else None


def _remember(out: Any, twin: Any) -> Any:
    """Attach the CPU results to the CUDA results; give data-dependent sizes their true size."""
    if isinstance(out, torch.Tensor) and isinstance(twin, torch.Tensor):
        if not _may_have_twin(out):
            return out
        if out.shape != twin.shape:
            out = twin.to(out.device)
        if (kept := _kept(twin)) is not None:
            _twins[out] = kept
        return out
    if type(out) in (tuple, list) and type(twin) is type(out) and len(out) == len(twin):
        return type(out)(map(_remember, out, twin))
    return out


def _without_masks(index: Any) -> Any:
    """Replace known boolean masks in an index by the positions CUDA would find with nonzero()."""
    items: list[Any] = []
    for item in index if type(index) is tuple else (index,):
        if isinstance(item, torch.Tensor) and item.dtype == torch.bool and item in _twins:
            items.extend(_remember(found.to(item.device), found) for found in _twins[item].nonzero(as_tuple=True))
        else:
            items.append(item)
    return items[0] if len(items) == 1 else tuple(items)


def _places(values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Size, tuple[torch.Tensor, ...]]:
    """The common shape, and where the mask is true in it, on the host."""
    shape = torch.broadcast_shapes(values.shape, mask.shape)
    return shape, _twins[mask].expand(shape).nonzero(as_tuple=True)


class _MaskedScatter(torch.autograd.Function):  # type: ignore[misc]
    """masked_scatter, whose backward selects by the mask inside C++ (masked_scatter_backward, TensorAdvancedIndexing.cpp): here by places
    whose number is known, in one tensor as nonzero() makes it."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(mask)
        context.shapes = values.shape, source.shape
        return torch.masked_scatter(values, mask, source)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None]:
        (mask,), (values, source) = context.saved_tensors, context.shapes
        to_values = to_source = None
        if context.needs_input_grad[0]:
            to_values = gradient.masked_fill(mask, 0).sum_to_size(values)
        if context.needs_input_grad[2]:
            places = _twins[mask].expand(gradient.shape).nonzero()
            chosen = gradient[tuple(places.t().contiguous().to(mask.device).unbind())]
            missing = source.numel() - chosen.numel()
            to_source = (torch.cat([chosen, chosen.new_zeros(missing)]) if missing else chosen).view(source)
        return to_values, None, to_source


def _select(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """masked_select, which on CUDA is an index by the mask."""
    shape, where = _places(values, mask)
    out: torch.Tensor = values.expand(shape)[tuple(found.to(mask.device) for found in where)]
    return _remember(out, _twins[values].expand(shape)[where]) if values in _twins else out


def _meant(name: str, out: Any, args: Any, kwargs: Any) -> int | bool | None:
    """What a function of unknown numbers is taken to answer: they are finite, and of several the middle one is chosen."""
    if name in _FINITE and _may_have_twin(out):
        return _FINITE[name]
    if name in _COMPARED and isinstance(args[1], (int, float)) and args[0].is_floating_point() and _may_have_twin(out):
        return _COMPARED[name]
    if name in _ORDERED and isinstance(args[1], torch.Tensor) and args[0].is_floating_point() and _may_have_twin(out):
        return True
    if name not in _CHOICES or torch.is_grad_enabled() or not _may_have_twin(out):
        return None
    values, dim = args[0], -1 if name == "multinomial" else kwargs.get("dim", args[1] if len(args) > 1 else None)
    return int(values.numel() if dim is None else values.shape[dim]) // 2


def _known_size(args: Any, kwargs: Any) -> dict[str, int]:
    """How long repeat_interleave's result is, which the C++ side would read from the card."""
    repeats = kwargs.get("repeats", args[1] if len(args) > 1 else args[0])
    if not isinstance(repeats, torch.Tensor) or repeats not in _twins:
        return {}
    values, dim = (args[0], kwargs.get("dim", args[2] if len(args) > 2 else None)) if repeats is not args[0] else (repeats, None)
    length = values.numel() if dim is None else values.shape[dim]
    total = int(_twins[repeats].sum())
    return {"output_size": total * length if repeats.numel() == 1 and repeats is not args[0] else total}


def _with_true_lengths(read: dict[int, str], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments a function reads on the host without our seeing it, as host tensors where their values are known."""

    def true(value: Any) -> Any:
        return _twins.get(value, value) if isinstance(value, torch.Tensor) and value.is_cuda else value

    positional = tuple(true(value) if place in read else value for place, value in enumerate(args))
    return positional, {key: true(value) if key in read.values() else value for key, value in kwargs.items()}


def _cuda_arguments(values: Iterable[Any]) -> tuple[bool, bool]:
    """Is one of them a CUDA tensor, and are all CUDA tensors ones whose values are known?"""
    any_cuda, all_known = False, True
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_cuda:
                any_cuda = True
                all_known = all_known and value in _twins
        elif isinstance(value, (tuple, list)):
            cuda, known = _cuda_arguments(value)
            any_cuda, all_known = any_cuda or cuda, all_known and known
    return any_cuda, all_known


class TrueValues(TorchFunctionMode):  # type: ignore[misc]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _PASSED_THROUGH:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        try:
            any_cuda, known = _cuda_arguments((*args, *kwargs.values()) if kwargs else args)
        except RuntimeError:  # inside a transform such as vmap
            return func(*args, **kwargs)
        if any_cuda and name in _READS:
            journal.note("sync", "value")
            return func(*map(_on_host if known else _zeros, args), **kwargs)
        if any_cuda and name in ("__getitem__", "__setitem__"):
            args = (args[0], _without_masks(args[1]), *args[2:])
        if any_cuda and name == "repeat_interleave" and "output_size" not in kwargs:
            kwargs = {**kwargs, **_known_size(args, kwargs)}
        if any_cuda and name in _READ_INSIDE:
            args, kwargs = _with_true_lengths(_READ_INSIDE[name], args, kwargs)
        if any_cuda and name == "masked_select" and len(args) == 2 and args[1] in _twins:
            return _select(*args)
        if any_cuda and name == "masked_scatter" and len(args) == 3 and args[1] in _twins:
            return _MaskedScatter.apply(*args)
        out = func(*args, **kwargs)
        if any_cuda and not known and name in _BY_SHAPE_ALONE and args and _may_have_twin(out):
            args, known = (torch.empty_like(args[0], device="cpu"), *args[1:]), True
        if any_cuda and not known and (meant := _meant(name, out, args, kwargs)) is not None:
            _twins[out] = torch.full(out.shape, meant) if out.numel() <= _MOST_ELEMENTS else torch.tensor(meant).expand(out.shape)
            return out
        if not known or name in _RANDOM or (name in _RANDOM_FLOATS and isinstance(out, torch.Tensor) and out.is_floating_point()):
            if any_cuda and args and isinstance(args[0], torch.Tensor) and (out is args[0] or name == "__setitem__"):
                _twins.pop(args[0], None)  # overwritten with something unknown
            return out
        if not any_cuda and name != "cuda" and not any(map(_names_cuda, (*args, *kwargs.values()))):
            return out
        return _run_on_twins(func, name, args, kwargs, out, any_cuda)


def _run_on_twins(func: Any, name: str, args: Any, kwargs: Any, out: Any, has_cuda: bool) -> Any:
    results = _tensors((out,))
    if name != "__setitem__" and not any(_may_have_twin(tensor) or (has_cuda and not tensor.is_cuda) for tensor in results):
        return out
    if isinstance(out, torch.Tensor) and out.is_floating_point() and (not has_cuda and name not in _CONSTANTS):
        return out  # data from the host, a weight, or numbers drawn or left as they were
    try:
        if name == "cuda":
            twin = _twins[args[0]] if has_cuda else args[0].clone()
        else:
            twin = func(*map(_on_host, args), **{key: _on_host(value) for key, value in kwargs.items()})
            if not has_cuda and args and twin is args[0]:
                twin = twin.clone()
    except (RuntimeError, NotImplementedError, TypeError):
        return out
    if isinstance(out, torch.Tensor) and not out.is_cuda:
        return twin  # device to host
    return _remember(out, twin)


def _without_mode(function: Any) -> Any:
    """For functions that look at every parameter and touch no integer tensor: thousands of attributes a step, none of them ours."""

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        if any(map(callable, args[1:])) or callable(kwargs.get("closure")):  # an optimizer that runs the model itself
            return function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return plain


def _spare_the_optimizer() -> None:
    hook_step = torch.optim.Optimizer.profile_hook_step
    torch.optim.Optimizer.profile_hook_step = staticmethod(lambda step: _without_mode(hook_step(step)))
    torch.optim.Optimizer.zero_grad = _without_mode(torch.optim.Optimizer.zero_grad)
    torch.nn.Module.zero_grad = _without_mode(torch.nn.Module.zero_grad)
    torch.nn.utils.clip_grad_norm_ = _without_mode(torch.nn.utils.clip_grad_norm_)


def _follow_into_operators(mode: TrueValues) -> None:
    """Operators written in Python (bitsandbytes') read values inside of them, where torch has switched the mode off."""
    register = torch.library.register_kernel

    def with_values(kernel: Any) -> Any:
        @functools.wraps(kernel)
        def run(*args: Any, **kwargs: Any) -> Any:
            if isinstance(_get_current_function_mode(), TrueValues):
                return kernel(*args, **kwargs)
            with mode:
                return kernel(*args, **kwargs)

        return run

    @functools.wraps(register)
    def register_kernel(op: Any, device_types: Any, func: Any = None, /, **options: Any) -> Any:
        if func is not None:
            return register(op, device_types, with_values(func), **options)
        return lambda kernel: register(op, device_types, with_values(kernel), **options)

    torch.library.register_kernel = register_kernel


def install() -> None:
    """Turns the mode on in this thread, for good."""
    atexit.register(time.sleep, _LET_GO_S)
    mode = TrueValues()
    mode.__enter__()
    _spare_the_optimizer()
    _follow_into_operators(mode)
    # DDP compares parameter counts gathered by a kernel, which would read as zero
    import torch.nn.parallel.distributed as ddp

    ddp._verify_param_shape_across_processes = lambda *_, **__: True
    torch.distributions.Distribution.set_default_validate_args(False)  # numbers that no kernel has computed are in no range
