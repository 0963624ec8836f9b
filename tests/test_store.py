"""The store believes only what it wrote itself, in this environment, whole; it is bounded, private, and safe under several writers."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import stat
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from hfopt import store as module
from hfopt.cli import main
from hfopt.store import OFF, Store, default_store, environment

PARTS = {"model": {"model_type": "bert"}, "settings": [1, "bf16"]}
VALUE = {"events": [[1, 2], [3, -1]], "slope": 0.1, "name": "größer"}


@pytest.fixture
def kept(tmp_path: Path) -> Store:
    store = Store(tmp_path / "traces")
    store.put(PARTS, VALUE, label="bert")
    return store


def only_file(store: Store) -> Path:
    (path,) = store.folder.iterdir()
    return path


def test_what_was_put_is_found_again_by_its_parts_alone(kept: Store) -> None:
    assert Store(kept.folder).get(dict(reversed(PARTS.items()))) == VALUE
    assert kept.get({**PARTS, "settings": [1, "fp16"]}) is None
    assert [entry.label for entry in kept.entries()] == ["bert"]


def test_entries_on_different_conditions_stand_side_by_side(kept: Store) -> None:
    kept.put(PARTS, "new cards", label="bert", condition={"least": 9})
    assert kept.get(PARTS, lambda condition: condition == {"least": 9}) == "new cards"
    assert kept.get(PARTS, lambda condition: condition is None) == VALUE
    assert kept.get(PARTS, lambda condition: condition == {"least": 8}) is None


def other_version(store: Store, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    changed = {**environment(), package: "0.0.1"}
    monkeypatch.setattr(module, "environment", lambda: changed)


@pytest.mark.parametrize("package", ["torch", "transformers", "peft", "trl", "hfopt"])
def test_an_entry_of_another_version_is_not_believed(kept: Store, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    other_version(kept, monkeypatch, package)
    assert kept.get(PARTS) is None


def test_an_entry_of_another_version_is_not_believed_under_a_new_name_either(kept: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    old = only_file(kept)
    other_version(kept, monkeypatch, "torch")
    kept.put(PARTS, "new", label="bert")
    (new,) = set(kept.folder.iterdir()) - {old}
    old.replace(new)
    assert kept.get(PARTS) is None


def test_an_edit_of_hfopt_itself_is_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(module, "resources", lambda package: tmp_path)
    digests = [module.source_digest.__wrapped__()]
    for name, text in (("a.py", "x = 2\n"), ("a.py", "x = 1\n"), ("b.toml", ""), ("notes.txt", "no part of it")):
        (tmp_path / name).write_text(text)
        digests.append(module.source_digest.__wrapped__())
    assert digests[0] == digests[2]
    assert digests[3] == digests[4]
    assert len(set(digests)) == 3


def signed(rest: bytes) -> bytes:
    return hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest


def repacked(data: bytes, payload: bytes) -> bytes:
    """A payload of one's own behind the true header, with a digest that is right."""
    header = data.split(b"\n", 2)[1]
    return signed(header + b"\n" + payload)


class Evil:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.system, ("touch /tmp/hfopt_was_here",)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:70],
        lambda data: b"",
        lambda data: data + b"x",
        lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
        lambda data: data.replace(b'"label":"bert"', b'"label":"gpt2"'),
        lambda data: repacked(data, zlib.compress(b"{not json")),
        lambda data: repacked(data, b"not compressed"),
        lambda data: repacked(data, zlib.compress(b"[" * 200_000)),
        lambda data: repacked(data, zlib.compress(pickle.dumps(Evil()))),
        lambda data: signed(b"[1]\n" + zlib.compress(b"1")),
        lambda data: signed(b'{"format":0,"parts":"","label":"","condition":null}\n' + zlib.compress(b"1")),
        lambda data: pickle.dumps(Evil()),
    ],
)
def test_what_was_cut_or_changed_is_not_believed(kept: Store, damage: Callable[[bytes], bytes]) -> None:
    path = only_file(kept)
    path.write_bytes(damage(path.read_bytes()))
    assert kept.get(PARTS) is None
    assert not Path("/tmp/hfopt_was_here").exists()
    kept.put(PARTS, VALUE, label="bert")
    assert kept.get(PARTS) == VALUE


def test_a_payload_that_unpacks_without_end_is_not_believed(kept: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_ENTRY_BYTES", 1000)
    kept.put(PARTS, [0] * 1000, label="bert")
    assert kept.get(PARTS) is None


def test_what_others_may_write_is_not_believed(kept: Store) -> None:
    path = only_file(kept)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.folder.stat().st_mode) == 0o700
    path.chmod(0o620)
    assert kept.get(PARTS) is None


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    text = os.urandom(500).hex()
    store = Store(tmp_path, most_bytes=4000)
    for number in range(3):
        store.put({"number": number}, text, label=str(number))
        os.utime(max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime), (number, number))
    assert store.get({"number": 0}) == text  # now the newest
    for number in range(3, 6):
        store.put({"number": number}, text, label=str(number))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4000
    assert store.get({"number": 0}) == text
    assert store.get({"number": 1}) is None


WRITER = """
import sys
from pathlib import Path
from hfopt.store import Store
store = Store(Path(sys.argv[1]), most_bytes=60_000)
for number in range(60):
    store.put({"number": number % 7}, [number % 7] * 3000, label="many")
    found = store.get({"number": number % 5})
    assert found is None or found == [number % 5] * 3000, found
"""


def test_several_processes_share_it(tmp_path: Path) -> None:
    children = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)]) for _ in range(3)]
    assert [child.wait(timeout=300) for child in children] == [0, 0, 0]
    assert all(path.suffix == ".entry" for path in tmp_path.iterdir())
    assert all(entry.label == "many" for entry in Store(tmp_path).entries())


def test_a_place_that_cannot_be_written_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "traces")
    store.put(PARTS, VALUE, label="bert")
    assert store.get(PARTS) is None
    assert list(store.entries()) == []


def test_it_is_switched_off_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for value, on in (("1", False), ("yes", False), ("0", True), ("", True)):
        monkeypatch.setenv(OFF, value)
        assert (default_store() is not None) == on
    found = default_store()
    assert found is not None and found.folder == tmp_path / "hfopt" / "traces"


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["hfopt", "cache", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code in (0, None)


def test_the_command_lists_and_clears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = Store(tmp_path / "hfopt" / "traces")
    store.put(PARTS, VALUE, label="bert-base-uncased")
    store.put({}, [1], label="bert-base-uncased")
    broken = store.folder / ("0" * 64 + "-0.entry")
    broken.write_text("what is this")
    command(monkeypatch)
    out, err = capsys.readouterr()
    assert "bert-base-uncased" in out and "2 ×" in out and "not to be believed" in out
    assert "3 traces" in err and "256 MiB" in err
    command(monkeypatch, "--json")
    data = json.loads(capsys.readouterr().out)
    assert data["total_bytes"] == sum(path.stat().st_size for path in store.folder.iterdir())
    command(monkeypatch, "clear")
    assert "3 traces removed" in capsys.readouterr().err
    assert list(store.folder.iterdir()) == []
    command(monkeypatch)
    assert "0 traces" in capsys.readouterr().err
