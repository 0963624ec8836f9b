"""Who owns the workspaces of cuBLAS and cublasLt, by PyTorch's version and the card."""

from __future__ import annotations

import pytest

from hfopt.estimate.formulas import Formula
from hfopt.estimate.kernels import Kept, Kernels
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
    assert isinstance(cublas, Kept) is cublas_kept and isinstance(lt, Kept) is lt_kept
    assert isinstance(lt, (Kept, Formula))
    assert (lt.bytes if isinstance(lt, Kept) else lt.bytes()) == lt_bytes


def test_a_shared_workspace_is_one_block() -> None:
    kernels = Kernels(capability=(9, 0), torch_version=(2, 13))
    assert kernels.workspace() == kernels.lt_workspace() == [Kept("cublas", 32 * MIB)]


def test_the_installed_version_is_the_default() -> None:
    import torch

    assert ".".join(map(str, Kernels().torch_version)) == ".".join(torch.__version__.split(".")[:2])
