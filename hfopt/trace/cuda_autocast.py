"""CUDA's autocast lists, and all of CUDA's choices put into a trace on CPU tensors.

CUDA's autocast lists on the CPU's autocast key: what runs in half precision, what in float32. Mirrors ATen/autocast_mode.h. The
lower-precision list of the CPU is kept where both agree; what only the CPU lists becomes a plain call, what only CUDA lists is added. Which
operations CUDA lists at all is asked of the dispatcher itself, so a new version's additions are seen.

CUDA's choices put into a trace on CPU tensors: scoped overrides of the operations that do something else there. The overrides sit on
AutogradCPU (composite operations that pick a kernel by device) and AutocastCPU (the casting lists). They are library registrations and not
a function mode, so they also hold when checkpointing recomputes a layer inside backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any
from unittest import mock

import torch
from torch._C import DispatchKey
from torch.utils._pytree import tree_map_only

from hfopt.trace.cuda_attention import Attention

_HALF = (torch.float16, torch.bfloat16)
_FALL_THROUGH = torch.library.fallthrough_kernel  # what it is made of may still be on a list
_AUTOCAST = torch._C.DispatchKeySet(DispatchKey.AutocastCPU)
# torch 2.6 has no such word, and takes the override without it
_OVERRIDES: dict[str, Any] = {"allow_override": True} if "allow_override" in signature(torch.library.Library.impl).parameters else {}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# AT_FORALL_FP32, with norm from AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE
_FLOAT32 = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar
    softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity
    poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
    margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d
    upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa norm.Scalar norm.ScalarOpt_dim
""")
# AT_FORALL_FP32_SET_OPT_DTYPE
_FLOAT32_RESULT = _names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord
    sum sum.dim_IntList
""")
# AT_FORALL_PROMOTE
_PROMOTE = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
_LEFT_ALONE = frozenset({"binary_cross_entropy"})  # refused on CUDA, as it should be


def _overload(name: str) -> Any:
    packet, _, which = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), which or "default")


def _with_arguments(cast: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The rule that calls an operation with each of its tensors cast."""

    def rule(op: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
                return op(*tree_map_only(torch.Tensor, cast, args), **tree_map_only(torch.Tensor, cast, kwargs))

        return call

    return rule


def _up(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in _HALF else x


def _down(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.get_autocast_dtype("cpu")) if x.is_floating_point() and x.dtype != torch.float64 else x


def _with_float32_result(op: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            if args[0].dtype in _HALF and kwargs.get("dtype") is None and not any(isinstance(a, torch.dtype) for a in args):
                kwargs["dtype"] = torch.float32
            return op(*args, **kwargs)

    return call


def _in_widest(op: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        widest = torch.get_autocast_dtype("cpu")

        def see(x: torch.Tensor) -> torch.Tensor:
            nonlocal widest
            if x.dtype == torch.float32:
                widest = torch.float32
            return x

        tree_map_only(torch.Tensor, see, args)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return op(*tree_map_only(torch.Tensor, lambda x: x.to(widest) if x.is_floating_point() else x, args), **kwargs)

    return call


def install_cuda_lists(library: Any) -> None:
    """Overrides the CPU's autocast entries for as long as `library` lives."""
    on_cuda = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
        if name.startswith("aten::")
    }
    on_cpu = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
        if name.startswith("aten::")
    }
    for name in sorted((on_cuda | on_cpu) - _LEFT_ALONE):
        rule = _rule(name, on_cuda, on_cpu)
        if rule is _FALL_THROUGH:
            library.impl(name, rule, "AutocastCPU", **_OVERRIDES)
        elif rule is not None:
            library.impl(name, rule(_overload(name)), "AutocastCPU", **_OVERRIDES)


def _rule(name: str, on_cuda: set[str], on_cpu: set[str]) -> Any:
    if name not in on_cuda:
        return _FALL_THROUGH
    if name in _FLOAT32:
        return _with_arguments(_up)
    if name in _FLOAT32_RESULT:
        return _with_float32_result
    if name in _PROMOTE:
        return _in_widest
    return None if name in on_cpu else _with_arguments(_down)


aten = torch.ops.aten


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """ATen/native/Dropout.cpp, is_fused_kernel_acceptable: CUDA keeps a boolean mask."""
    return aten.native_dropout(x, p, True)[0] if train and 0 < p < 1 and x.numel() else x


def _softmax(op: Any) -> Any:
    """ATen/native/SoftMax.cpp: float16 to float32 is fused into the kernel on CUDA, every other conversion is a copy first."""

    def call(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if x.dtype == torch.float16 and dtype == torch.float32:
            return op(x, dim, True)
        return op(x if dtype is None else x.to(dtype), dim, False)

    return call


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """ATen/native/Linear.cpp; it adds the bias in place, but never for fake tensors (they count as tensor subclasses)."""
    if bias is None:
        return torch.matmul(x, weight.t())
    if x.dim() == 2:
        return torch.addmm(bias, x, weight.t())
    if x.dim() > 2 and x.is_contiguous() and bias.dim() == 1:
        return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], weight.shape[0])
    return torch.matmul(x, weight.t()).add_(bias)


def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    """ATen/native/Normalization.cpp: cuDNN gets a contiguous input, and backward keeps that copy."""
    if not x.is_contiguous() and not (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)):
        x = x.contiguous()
    return aten.native_batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)[0]


@contextlib.contextmanager
def cuda_rules(capability: tuple[int, int]) -> Iterator[None]:
    asked = torch.is_autocast_enabled
    # code that asks without naming a device asks for CUDA, whose autocast is the CPU's here
    answers = mock.patch.object(torch, "is_autocast_enabled", lambda *device: asked(*(device or ("cpu",))))
    with answers, torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("dropout", _dropout, "AutogradCPU")
        library.impl("scaled_dot_product_attention", Attention(capability), "AutogradCPU")
        library.impl("linear", _linear, "AutogradCPU")
        library.impl("batch_norm", _batch_norm, "AutogradCPU")
        library.impl("softmax.int", _softmax(aten._softmax), "AutogradCPU")
        library.impl("log_softmax.int", _softmax(aten._log_softmax), "AutogradCPU")
        install_cuda_lists(library)
        yield
