"""Other kernels are offered only where they can run, are known to the model, and can be written into the config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hfopt.hardware import catalog
from hfopt.job.subject import Subject, from_file
from hfopt.planner import Request
from hfopt.planner.choices import attention_choices, attention_note, liger_choices, liger_note, runs_liger

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 1000,
}
BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BOTH = frozenset({"use_liger_kernel", "attn_implementation"})


def subject(tmp_path: Path, model: dict[str, object], extra: str = "", card: str = "rtx 4090") -> Subject:
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = tmp_path / "train.yaml"
    config.write_text(f"model_name_or_path: {tmp_path}\nmax_seq_length: 64\noutput_dir: out\nper_device_train_batch_size: 8\n{extra}")
    return from_file(config, Request(gpu=card, dry_run=False))


def test_nothing_is_tried_that_was_not_allowed(tmp_path: Path) -> None:
    made = subject(tmp_path, LLAMA, "attn_implementation: eager\n")
    assert liger_choices(made, frozenset()).values == (False,)
    assert attention_choices(made, frozenset(), catalog.find("rtx 4090")).values == (None,)


def test_liger_is_for_models_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfopt.planner.choices._liger_folder", lambda: None)
    offered = liger_choices(subject(tmp_path, LLAMA), BOTH)
    assert offered.values == (False, True) and offered.note is not None and "not installed here" in offered.note
    assert liger_choices(subject(tmp_path, LLAMA, "use_liger_kernel: false  # hfopt: keep\n"), BOTH).values == (False,)
    smoothed = liger_choices(subject(tmp_path, LLAMA, "label_smoothing_factor: 0.1\n"), BOTH)
    assert smoothed.values == (False,) and smoothed.note is not None and "label smoothing" in smoothed.note
    other = liger_choices(subject(tmp_path, BERT), BOTH)
    assert other.values == (False,) and other.note is not None and "causal language models" in other.note


def test_an_installed_liger_says_itself_what_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "liger_kernel"
    (folder / "transformers").mkdir(parents=True)
    (folder / "transformers" / "monkey_patch.py").write_text('MODEL_TYPE_TO_APPLY_LIGER_FN = {\n    "qwen2": apply,\n}\n')
    monkeypatch.setattr("hfopt.planner.choices._liger_folder", lambda: folder)
    refused = liger_choices(subject(tmp_path, LLAMA), BOTH)
    assert refused.values == (False,) and refused.note is not None and "does not know llama" in refused.note


def test_attention_is_changed_where_the_file_states_it(tmp_path: Path) -> None:
    card = catalog.find("rtx 4090")
    eager = attention_choices(subject(tmp_path, LLAMA, "attn_implementation: eager\n"), BOTH, card)
    assert eager.values[:2] == (None, "sdpa")
    silent = attention_choices(subject(tmp_path, LLAMA), BOTH, card)
    assert silent.values == (None,) and silent.note is not None and "from_pretrained" in silent.note


def test_flash_attention_needs_package_and_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = subject(tmp_path, LLAMA, "attn_implementation: sdpa\n")
    monkeypatch.setattr("hfopt.planner.choices.find_spec", lambda name: object())
    assert attention_choices(made, BOTH, catalog.find("rtx 4090")).values == (None, "flash_attention_2")
    assert attention_choices(made, BOTH, catalog.find("t4")).values == (None,)
    monkeypatch.setattr("hfopt.planner.choices.find_spec", lambda name: None)
    missing = attention_choices(made, BOTH, catalog.find("rtx 4090"))
    assert missing.values == (None,) and missing.note is not None and "flash-attn is not installed" in missing.note


def test_an_attention_that_the_card_or_the_dtype_rules_out_is_named(tmp_path: Path) -> None:
    def note(stated: str, card: str) -> str:
        made = subject(tmp_path, LLAMA, f"attn_implementation: {stated}\n")
        return " ".join(attention_note(made, catalog.find(card)))

    assert "does not run on Tesla T4: it needs compute capability 8.0" in note("flash_attention_2\nbf16: true", "t4")
    assert "compute capability 9.0" in note("kernels-community/vllm-flash-attn3\nbf16: true", "rtx 4090")
    assert "in float32" in note("flash_attention_2\ndtype: float32", "rtx 4090")
    for stated in ("flash_attention_2\nbf16: true", "flex_attention", "sdpa"):
        assert note(stated, "rtx 4090") == ""


def test_liger_of_the_file_is_in_the_figures_or_named(tmp_path: Path) -> None:
    llama = subject(tmp_path, LLAMA, "use_liger_kernel: true\n")
    assert runs_liger(llama) and "fused loss" in liger_note(llama)[0]
    assert "norms" in liger_note(llama)[0]
    bert = subject(tmp_path, BERT, "use_liger_kernel: true\n")
    assert not runs_liger(bert) and "use_liger_kernel: true is set; what it saves is not in the figures" in liger_note(bert)[0]
    assert liger_note(subject(tmp_path, LLAMA)) == ()
