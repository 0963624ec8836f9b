"""Tokens are known by name and by form; names of models, revisions and a tokenizer's own tokens are not taken for one."""

from __future__ import annotations

from typing import Any

import pytest

from hfopt.redact import HIDDEN, is_secret, said, scrub, shown

TOKEN = "hf_" + "Ab3" * 10


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hub_token", "short"),
        ("push_to_hub_token", "x"),
        ("WANDB_API_KEY", "0123456789abcdef"),
        ("run_name", f"x-{TOKEN}"),
        ("note", f"({TOKEN})"),
        ("note", "sk-proj-" + "a1" * 12),
        ("note", "github_pat_" + "a1" * 12),
        ("aws_secret_access_key", "abc"),
    ],
)
def test_what_is_one(key: str, value: str) -> None:
    assert is_secret(key, value)
    assert shown(key, value) == scrub(value, key) == HIDDEN


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_name_or_path", "hf-internal-testing/tiny-random-BertForSequenceClassification"),
        ("revision", "0123456789abcdef0123456789abcdef01234567"),
        ("eos_token", "<|im_end|>"),
        ("max_tokens", "512"),
        ("hub_token", ""),
        ("hub_token", None),
        ("learning_rate", 5e-5),
        ("run_name", "hf_short"),
    ],
)
def test_what_is_none(key: str, value: Any) -> None:
    assert not is_secret(key, value)


def test_nothing_of_one_is_left_however_deep_it_stands() -> None:
    tree = {"args": [{"hub_token": "abc", "plain": 1}, {"env": {"text": f"export T={TOKEN}"}}], "nan": float("nan"), "huge": 1 << 4000}
    clean = scrub(tree)
    assert clean["args"][0] == {"hub_token": HIDDEN, "plain": 1}
    assert TOKEN not in str(clean) and "abc" not in str(clean)
    assert clean["huge"] == "a number of 4001 bits"


def test_the_words_of_others_are_repeated_without_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("MY_TOKEN", "on")  # too short to be looked for: it stands in ordinary words
    error = f"401 for https://user:{TOKEN}@huggingface.co with key 0123456789abcdef on rank 1"
    assert said(error) == f"401 for https://user:{HIDDEN}@huggingface.co with key {HIDDEN} on rank 1"
