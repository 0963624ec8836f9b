"""Who owns the workspaces of cuBLAS and cublasLt, by PyTorch's version and the card, and what the context takes."""

from __future__ import annotations

import pytest

from hfopt.memory.step_memory import context_bytes
from hfopt.trace.events import Formula, KeptWorkspace, Kernels
from hfopt.units import KIB, MIB


@pytest.mark.parametrize(
    ("version", "cublas_kept", "lt_kept", "lt_bytes"),
    [
        ((2, 6), True, False, MIB),
        ((2, 9), True, True, MIB),
        ((2, 11), True, True, 8 * MIB + 128 * KIB),
        ((2, 15), False, False, MIB),
    ],
)
def test_workspaces_by_version(version: tuple[int, int], cublas_kept: bool, lt_kept: bool, lt_bytes: int) -> None:
    kernels = Kernels(capability=(8, 6), torch_version=version)
    (cublas,), (lt,) = kernels.workspace(), kernels.lt_workspace()
    assert isinstance(cublas, KeptWorkspace) is cublas_kept and isinstance(lt, KeptWorkspace) is lt_kept
    assert isinstance(lt, (KeptWorkspace, Formula))
    assert (lt.bytes if isinstance(lt, KeptWorkspace) else lt.bytes()) == lt_bytes


def test_a_shared_workspace_is_one_block() -> None:
    kernels = Kernels(capability=(9, 0), torch_version=(2, 13))
    assert kernels.workspace() == kernels.lt_workspace() == [KeptWorkspace("cublas", 32 * MIB)]


def test_the_installed_version_is_the_default() -> None:
    import torch

    assert ".".join(map(str, Kernels().torch_version)) == ".".join(torch.__version__.split(".")[:2])


@pytest.mark.parametrize(("version", "eager"), [(None, False), ("11.6", True), ("11.7", False), ("12.8", False)])
def test_before_cuda_11_7_the_context_holds_every_kernel(version: str | None, eager: bool) -> None:
    assert (context_bytes((8, 0), version) - context_bytes((8, 0)) > 800 * MIB) is eager


def test_a_larger_card_has_a_larger_context() -> None:
    sizes = [context_bytes((8, 9), multiprocessors=count) for count in (24, 58, 142)]
    assert sizes == sorted(sizes) and sizes[2] - sizes[0] > 200 * MIB
