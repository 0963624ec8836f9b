"""Sizes of kernels' temporaries against what PyTorch's own CUDA code asked for on the virtual GPU with 28 multiprocessors."""

from __future__ import annotations

import pytest

from hfopt.trace.events import Formula


@pytest.mark.parametrize(
    ("rows", "columns", "asked"),
    [(2048, 768, 12582912), (2048, 3072, 22020096), (16384, 768, 22020096), (512, 768, 0), (2048, 2304, 22413312)],
)
def test_a_sum_over_rows_goes_through_global_memory(rows: int, columns: int, asked: int) -> None:
    assert Formula("column_reduction", (columns, rows, 4, 28, 1536)).bytes() == asked


@pytest.mark.parametrize(
    ("tokens", "rows", "width", "asked"), [(3073, 30522, 768, 10383360), (4096, 512, 768, 2829312), (3072, 30522, 768, 0)]
)
def test_the_embedding_gradient_sums_partial_segments(tokens: int, rows: int, width: int, asked: int) -> None:
    assert Formula("embedding_partials", (tokens, rows, width * 4)).bytes() == asked
