"""CUDA's choices put into a trace on CPU tensors: which attention kernel it takes, and its autocast lists.

Attention goes by dtype, mask, head size, dropout and capability; windows of a vision tower are attended to together.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any
from unittest import mock

import torch
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from hfopt.compat.versions import installed_torch
from hfopt.trace.events import at_least, one_of

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


class Attention:
    """The override of aten::scaled_dot_product_attention for one capability."""

    def __init__(self, capability: tuple[int, int], torch_version: tuple[int, int] | None = None) -> None:
        self.capability = capability
        self.torch_version = torch_version or installed_torch()

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if (windows := windows_in(query)) > 1 and attn_mask is None:
            query, key, value = (as_batch(tensor, windows) for tensor in (query, key, value))
            return as_tokens(self(query, key, value, None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa))
        flash_heads, efficient_heads = self.takes_heads(query, key, value, enable_gqa=enable_gqa)
        if flash_heads and self.flash(query, key, value, attn_mask, dropout_p):
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if efficient_heads and self.efficient(query, key, value, attn_mask):
            return _efficient(query, key, value, _additive(attn_mask, query), dropout_p, is_causal, scale)
        return aten._scaled_dot_product_attention_math(
            query, key, value, _additive(attn_mask, query), dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]

    def takes_heads(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, enable_gqa: bool) -> tuple[bool, bool]:
        """check_batch_size_and_num_heads_dense, for flash and for memory-efficient attention. From 2.15 on the latter takes grouped heads,
        and both take one head of keys and values for all (pytorch#191085); flash took it before where it was asked to group."""
        heads, of_key, of_value = (tensor.shape[-3] if tensor.dim() > 2 else 1 for tensor in (query, key, value))
        if heads == of_key == of_value:
            return True, True
        late = self.torch_version >= (2, 15)
        grouped = enable_gqa and of_key == of_value and heads % of_key == 0
        return grouped or (late and of_key == of_value == 1), late and (grouped or of_key == of_value == 1)

    def flash(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout_p: float) -> bool:
        width = query.shape[-1]
        if mask is not None or query.dim() != 4 or query.dtype not in _HALF:
            return False
        if not (width == key.shape[-1] == value.shape[-1]) or width > 256 or any(t.stride(-1) != 1 for t in (query, key, value)):
            return False
        if not at_least(self.capability, (8, 0)):
            return False
        # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
        wide = 192 < width <= 224 or (width > 224 and dropout_p > 0)
        trained = any(t.requires_grad for t in (query, key, value))
        return not (trained and wide and one_of(self.capability, ((8, 6), (8, 9), (12, 0), (12, 1))))

    def efficient(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
        if query.dim() != 4 or not at_least(self.capability, (8, 0) if query.dtype == torch.bfloat16 else (5, 0)):
            return False
        if query.dtype not in (*_HALF, torch.float32) or not query.shape[-2] or not key.shape[-2]:
            return False
        if any(t.stride(-1) != 1 for t in (query, key, value)):
            return False
        widths = (query.shape[-1], value.shape[-1])
        return bool(query.shape[-1] == key.shape[-1]) and (
            all(width % 8 == 0 for width in widths) or all(width % self._alignment(query.dtype) == 0 for width in widths)
        )

    def _alignment(self, dtype: torch.dtype) -> int:
        """check_head_dim_size_mem_efficient with minimum_gemm_alignment: 8 at the most."""
        if at_least(self.capability, (8, 0)):
            return 8 if dtype in _HALF else 4
        return 8 if dtype in _HALF and at_least(self.capability, (7, 0)) else 1


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    """pad_last_dim<8>: heads are padded to a multiple of 8, with the scale of the true width."""
    width = query.shape[-1]
    if width % 8:
        scale = scale if scale is not None else 1 / math.sqrt(width)
        query, key, value = (torch.nn.functional.pad(t, (0, 8 - width % 8)) for t in (query, key, value))
    out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    return out[..., :width] if width % 8 else out


def _additive(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """convert_boolean_attn_mask of attention.cpp."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, torch.scalar_tensor(0.0, dtype=query.dtype), torch.scalar_tensor(float("-inf"), dtype=query.dtype))


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """preprocess_mask of attention.cpp: a bias whose rows are not a multiple of 8 is copied into a padded one."""
    needs_gradient = any(t is not None and t.requires_grad for t in (query, key, value, mask))
    if mask is not None:
        length = mask.shape[-1]
        if length % 8 and mask.dim() > 1:
            mask = torch.nn.functional.pad(mask, (0, 8 - length % 8))[..., :length]
        mask = mask.expand(*query.shape[:3], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(query, key, value, mask, needs_gradient, dropout_p, is_causal, scale=scale)[0]


MANY = 16  # fewer pieces than this are images of a batch, which stay apart as they are in a run
_MARK = "_hfopt_windows"
_batched: set[tuple[int, ...]] = set()  # shapes (windows, heads, length, width) of the trace under way


@contextmanager
def grouped_windows() -> Iterator[None]:
    """`torch.split` along the tokens of (1, heads, tokens, width) gives one piece for each length, marked with its number of windows."""
    original = torch.split

    def split(tensor: Any, split_size_or_sections: Any, dim: int = 0) -> Any:  # named as torch's: MobileViT says it by name
        sizes = split_size_or_sections
        if not (isinstance(tensor, FakeTensor) and dim == 2 and tensor.dim() == 4 and isinstance(sizes, list) and len(sizes) > MANY):
            return original(tensor, sizes, dim)
        counts = Counter(size for size in sizes if size)
        pieces = original(tensor, [length * count for length, count in counts.items()], dim)
        for piece, count in zip(pieces, counts.values(), strict=True):
            setattr(piece, _MARK, count)
        return pieces

    torch.split = split
    _batched.clear()
    try:
        yield
    finally:
        torch.split = original


def windows_in(tensor: torch.Tensor) -> int:
    """How many windows a piece holds; 1 where it is none."""
    return getattr(tensor, _MARK, 1)


def as_batch(tensor: torch.Tensor, windows: int) -> torch.Tensor:
    """(1, heads, windows × length, width) → (windows, heads, length, width), without a copy."""
    batch = tensor.squeeze(0).unflatten(1, (windows, -1)).transpose(0, 1)
    _batched.add(tuple(batch.shape))
    return batch


def as_tokens(batch: torch.Tensor) -> torch.Tensor:
    """Back again; attention kernels put heads behind tokens in memory, so there is no copy either."""
    windows, heads, length, width = batch.shape
    return batch.transpose(1, 2).reshape(1, windows * length, heads, width).transpose(1, 2)


def launches_of(shape: torch.Size) -> int:
    """Of an attention kernel on queries of this shape: one, or one for each window."""
    return shape[0] if tuple(shape) in _batched else 1


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
