"""Versions are compared as numbers, not as text; what is not installed is older than everything."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from hfopt.compat import versions
from hfopt.compat.versions import installed_torch, is_at_least, package_version, release, source_folder, training_arguments_source


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
    monkeypatch.setattr(versions, "package_version", lambda name: "5.10.0")
    assert is_at_least("transformers", "5.2") and is_at_least("transformers", "5.10") and not is_at_least("transformers", "5.11")


def test_what_is_not_installed() -> None:
    assert not is_at_least("no-such-package", "0")
    assert source_folder("no_such_package") is None


def test_what_is_here() -> None:
    assert installed_torch() >= (2, 6)
    assert "class TrainingArguments" in training_arguments_source()


def test_folders_say_what_metadata_says() -> None:
    for name in ("torch", "transformers", "typing_extensions", "Typing-Extensions", "huggingface.hub", "pip"):
        try:
            expected = metadata.version(name)
        except metadata.PackageNotFoundError:
            expected = None
        assert package_version(name) == expected, name


@pytest.mark.parametrize(
    ("folder", "file", "expected"),
    [
        ("some_thing-1.2.3+cu9.dist-info", "METADATA", "1.2.3+cu9"),
        ("some_thing-1.2.3.dist-info", "left_over", None),  # of an installation that is gone
        ("some_thing_else-1.2.3.dist-info", "METADATA", None),
        ("some_thing.egg-info", "PKG-INFO", "4.5"),
    ],
)
def test_records_of_any_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, file: str, expected: str | None) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / file).write_text("Metadata-Version: 2.1\nName: some-thing\nVersion: 4.5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert package_version("some.thing") == expected
