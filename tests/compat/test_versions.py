"""Versions are compared as numbers, not as text; what is not installed is older than everything."""

from __future__ import annotations

from importlib import metadata

import pytest

from hfopt.compat.versions import installed_torch, is_at_least, release, source_folder, training_arguments_source


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2.9.0+cu128", (2, 9)),
        ("2.10.1", (2, 10)),
        ("2.9.0a0+gitabc", (2, 9)),
        ("5.2.0.dev0", (5, 2)),
        ("13", (13, 0)),
        ("1!4.51.3", (4, 51)),
    ],
)
def test_major_and_minor(text: str, expected: tuple[int, int]) -> None:
    assert release(text) == expected


def test_what_is_no_version_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown"):
        release("unknown")


def test_ten_comes_after_nine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "5.10.0")
    assert is_at_least("transformers", "5.2") and is_at_least("transformers", "5.10") and not is_at_least("transformers", "5.11")


def test_what_is_not_installed() -> None:
    assert not is_at_least("no-such-package", "0")
    assert source_folder("no_such_package") is None


def test_what_is_here() -> None:
    assert installed_torch() >= (2, 6)
    assert "class TrainingArguments" in training_arguments_source()
