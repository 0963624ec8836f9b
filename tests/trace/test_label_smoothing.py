"""Label smoothing takes the labels away from the model; an encoder-decoder gets its decoder's inputs from the collator then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hfopt.memory.step_memory import estimate
from hfopt.model.from_config import from_spec
from hfopt.schema import DataSpec, ModelSpec, StepSettings

T5 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": 32,
    "d_ff": 64,
    "d_kv": 16,
    "num_layers": 1,
    "num_heads": 2,
    "vocab_size": 8000,
    "decoder_start_token_id": 0,
}
BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 8000,
}


WHISPER = {
    "model_type": "whisper",
    "architectures": ["WhisperForConditionalGeneration"],
    **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
    **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 8000, "num_mel_bins": 8, "max_source_positions": 100},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3, "max_target_positions": 64},
}


def test_whisper_has_no_method_to_shift_labels_and_is_traced_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WHISPER))
    workload = from_spec(ModelSpec(name=str(tmp_path)), DataSpec(max_target_length=32))
    assert estimate(workload, StepSettings(label_smoothing=0.1)).curve.peak(4).allocated_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("config", [T5, BERT], ids=["t5", "bert"])
def test_smoothed_labels_are_traced_and_cost_memory(config: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    workload = from_spec(ModelSpec(name=str(tmp_path)), DataSpec(max_length=64))
    plain = estimate(workload, StepSettings()).curve.peak(16)
    smoothed = estimate(workload, StepSettings(label_smoothing=0.1)).curve.peak(16)
    logits_bytes = 16 * 64 * 8000 * 4
    assert smoothed.allocated_bytes >= plain.allocated_bytes
    assert smoothed.allocated_bytes < plain.allocated_bytes + 4 * logits_bytes
