"""TRL's fused head in a trace: as on CUDA, one tile for all of them, and nothing of TRL changed afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hfopt.memory.step_memory import estimate
from hfopt.model.from_config import from_spec
from hfopt.schema import Checkpointing, DataSpec, ModelSpec, StepSettings
from hfopt.trace.events import FORMULAS
from hfopt.trace.fused_head import Tile

pytest.importorskip("trl", reason="TRL is not installed: its 1.0 asks for a newer transformers than the oldest here")
VOCABULARY, LENGTH = 70_000, 512
TOKENS = 4096  # rows of a tile, TRL's TOKEN_CHUNK_SIZE
SETTINGS = StepSettings(precision="bf16", checkpointing=Checkpointing(every_n_layers=1))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    fields = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": VOCABULARY, "tie_word_embeddings": True, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_memory_stops_growing_with_the_tokens_where_the_tile_is_full(folder: str) -> None:
    workload = from_spec(ModelSpec(name=folder), DataSpec(max_length=LENGTH), trainer="SFT", trl_arguments={})
    curve = estimate(workload, SETTINGS).curve
    peaks = {batch: curve.peak(batch).allocated_bytes for batch in (2, 4, 8, 16, 32)}
    below = (peaks[4] - peaks[2]) / (2 * LENGTH)
    beyond = (peaks[32] - peaks[16]) / (16 * LENGTH)
    assert below > 32_768 * 2 > 10 * beyond  # a row of the tile in bfloat16
    assert peaks[32] < 32 * LENGTH * VOCABULARY * 2 / 4, "whole logits would be there"


def test_what_trl_is_made_of_is_as_it_is_borrowed(folder: str) -> None:
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    function = chunked_logprob.ChunkedLogProbFunction
    names = ("TOKEN_CHUNK_SIZE", "_use_triton", "_forward_kernel", "_backward_kernel", "_addmm_fp32")
    before = [getattr(chunked_logprob, name) for name in names] + [utils._use_triton, vars(function)["forward"], vars(function)["backward"]]
    assert chunked_logprob.TOKEN_CHUNK_SIZE == TOKENS
    estimate(from_spec(ModelSpec(name=folder), DataSpec(max_length=64), trainer="SFT", trl_arguments={}), SETTINGS)
    after = [getattr(chunked_logprob, name) for name in names] + [utils._use_triton, vars(function)["forward"], vars(function)["backward"]]
    assert all(one is two for one, two in zip(before, after, strict=True))
    assert "min" not in vars(chunked_logprob) and "range" not in vars(chunked_logprob)


def test_a_tile_has_a_row_count_of_its_own() -> None:
    tile = Tile.of(100, most=40, taken=(51, 64, 50))
    assert tile.rows == 49
    assert tile.size(torch.zeros(49, 8), 49 * 32) is not None and tile.size(torch.zeros(100, 8), 3200) is None
    formula = tile.size(torch.zeros(8, 49), 49 * 32)
    assert formula is not None and formula.bytes() == 40 * 32 == FORMULAS["tile"](100, 40, 32)
