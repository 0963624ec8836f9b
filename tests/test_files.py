"""What is written is whole or not there, keeps its permissions, and leaves nothing behind when it fails."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hfopt import files
from hfopt.files import write_private, write_whole


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_permissions_are_those_of_a_new_file_or_of_the_one_replaced(tmp_path: Path, umask: None) -> None:
    target = tmp_path / "plan.json"
    write_whole(target, "1")
    assert mode(target) == 0o640
    target.chmod(0o606)
    write_whole(target, b"2")
    assert (mode(target), target.read_text()) == (0o606, "2")
    write_private(target, "3")
    assert (mode(target), target.read_text()) == (0o600, "3")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "live.json"
    write_whole(target, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(target, "new", durable=True)
    with pytest.raises(UnicodeEncodeError):
        write_whole(target, "half \ud800")
    assert [entry.name for entry in tmp_path.iterdir()] == ["live.json"]
    assert target.read_text() == "old"


def test_writers_in_many_threads_never_leave_a_mixture(tmp_path: Path) -> None:
    target = tmp_path / "live.json"
    texts = [letter * 100_000 for letter in "abcdefgh"]
    threads = [threading.Thread(target=lambda text=text: [write_whole(target, text) for _ in range(5)]) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_text() in texts
    assert [entry.name for entry in tmp_path.iterdir()] == ["live.json"]


@pytest.mark.parametrize("how", ["a link", "open to all", "of another user"])
def test_a_predictable_name_that_somebody_else_took_is_refused(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a home the cache is at /tmp/hfopt-UID, a name that anybody can take first."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    taken = files.own_temporary()
    if how == "a link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        taken.symlink_to(tmp_path / "theirs")
    elif how == "open to all":
        taken.mkdir()
        taken.chmod(0o777)
    else:
        taken.mkdir(mode=0o700)
        monkeypatch.setattr(files.os, "getuid", lambda: 4321)
        taken.rename(files.own_temporary())
    with pytest.raises(PermissionError):
        write_private(files.own_temporary() / "neutrality" / "x.json", "{}")
    assert not list(tmp_path.rglob("x.json"))


def test_the_same_place_of_ones_own_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    write_private(files.own_temporary() / "neutrality" / "x.json", "{}")
    assert mode(files.own_temporary()) == 0o700
