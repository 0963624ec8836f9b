"""A micro-batch cut by sample: nothing is lost or moved, and what has no samples to cut by is refused by name."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch

from hfopt.oom.split_batch import batch_size, shallow_copy, split, take, versions, why_not

IDS = torch.arange(12).reshape(4, 3)
BATCH: dict[str, Any] = {
    "input_ids": IDS,
    "scores": np.arange(4.0),
    "names": ["a", "b", "c", "d"],
    "pair": (IDS, IDS + 100),
    "nested": {"mask": torch.ones(4, 2), "scale": 3},
    "return_loss": True,
    "temperature": torch.tensor(2.0),
    "nothing": None,
}


@pytest.mark.parametrize("piece", [1, 2, 3, 4, 9])
def test_the_pieces_are_the_batch(piece: int) -> None:
    parts = split(BATCH, 4, piece)
    assert [batch_size(part, "input_ids") for part in parts] == [min(piece, 4 - start) for start in range(0, 4, piece)]
    assert torch.equal(torch.cat([part["input_ids"] for part in parts]), IDS)
    assert torch.equal(torch.cat([part["pair"][1] for part in parts]), IDS + 100)
    assert [name for part in parts for name in part["names"]] == BATCH["names"]
    assert np.concatenate([part["scores"] for part in parts]).tolist() == [0, 1, 2, 3]
    for part in parts:
        assert isinstance(part["pair"], tuple) and len(part["nested"]["mask"]) == len(part["input_ids"])
        assert (part["return_loss"], part["nothing"], part["nested"]["scale"]) == (True, None, 3)
        assert part["temperature"] is BATCH["temperature"]


def test_single_samples_are_taken_in_the_order_asked_for() -> None:
    found = take(BATCH, [2, 0], 4)
    assert found["input_ids"].tolist() == [[6, 7, 8], [0, 1, 2]] and found["names"] == ["c", "a"]


def test_a_batch_of_a_tokenizers_kind_stays_one() -> None:
    given = UserDict({"input_ids": IDS})
    (first, _) = split(given, 4, 2)
    assert type(first) is UserDict and first["input_ids"].shape == (2, 3) and given["input_ids"] is IDS
    twin = shallow_copy(given)
    twin.pop("input_ids")
    assert "input_ids" in given
    assert shallow_copy(7) == 7


@pytest.mark.parametrize(
    ("inputs", "main_input", "size"),
    [
        ({"x": torch.zeros(2, 3), "input_ids": IDS}, "input_ids", 4),
        ({"flag": True, "x": torch.zeros(2, 3)}, "input_ids", 2),
        ({"images": [torch.zeros(5, 1)]}, None, 5),
        ({"vision": {"pixels": torch.zeros(6, 1)}}, None, 6),
        ({"scale": torch.tensor(1.0)}, None, None),
        ([IDS], None, None),
    ],
)
def test_how_many_samples_there_are(inputs: Any, main_input: str | None, size: int | None) -> None:
    assert batch_size(inputs, main_input) == size


def test_all_that_runs_over_the_samples_can_be_cut() -> None:
    assert why_not(BATCH, 4) is None


@pytest.mark.parametrize(
    ("inputs", "size", "name", "words"),
    [
        ([IDS], None, "ragged", "not a dict of tensors"),
        ({"x": torch.tensor(1.0)}, None, "ragged", "not a dict of tensors"),
        ({"input_ids": IDS, "cu_seq_lens_q": torch.tensor([0, 3])}, 4, "packed", "cu_seq_lens_q"),
        ({"input_ids": IDS[:1], "position_ids": torch.tensor([[0, 1, 0]])}, 1, "packed", "start again within it"),
        ({"input_ids": IDS, "patches": torch.zeros(9, 2)}, 4, "ragged", "'patches' does not run over the 4 samples"),
        ({"input_ids": IDS, "inner": {"x": torch.zeros(3)}}, 4, "ragged", "'inner'"),
        ({"input_ids": IDS, "rows": [1, 2]}, 4, "ragged", "'rows'"),
        ({"input_ids": IDS, "object": object()}, 4, "ragged", "'object'"),
        (
            {"input_ids": IDS, "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)},
            4,
            "ragged",
            "'nested'",
        ),
    ],
)
def test_what_cannot_be_cut_is_named(inputs: Any, size: int | None, name: str, words: str) -> None:
    refused = why_not(inputs, size)
    assert refused is not None and refused.name == name and words in refused.reason


def test_positions_that_only_grow_or_are_none_are_not_packed() -> None:
    for positions in (torch.tensor([[0, 1, 2]]), torch.tensor([[0]]), None):
        assert why_not({"input_ids": IDS[:1], "position_ids": positions}, 1) is None


def test_a_tensor_written_in_place_is_noticed() -> None:
    inputs = {"x": torch.zeros(2), "name": "a"}
    before = versions(inputs)
    inputs["x"].add_(1)  # type: ignore[attr-defined]
    assert versions(inputs) != before and len(before) == 1
    assert versions([torch.zeros(2)]) == ()
