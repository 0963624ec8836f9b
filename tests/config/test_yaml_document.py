"""What cannot be a config is refused with one clear message that names the place, whatever it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hfopt.config.read_job import load_bytes
from hfopt.config.yaml_document import MAX_BYTES, Node, parse, read_bytes
from hfopt.errors import ConfigError, HfoptError


def laughs(levels: int, opening: str = "[", closing: str = "]") -> str:
    lines = ["a0: &a0 {x: 1}" if opening == "<<" else "a0: &a0 [x, x]"]
    for level in range(1, levels):
        aliases = ", ".join([f"*a{level - 1}"] * 9)
        lines.append(f"a{level}: &a{level} {{<<: [{aliases}]}}" if opening == "<<" else f"a{level}: &a{level} {opening}{aliases}{closing}")
    return "\n".join([*lines, "learning_rate: 0.1"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", "empty"),
        (b"# only words\n\n", "empty"),
        (b"- a\n- b\n", "a list at the root"),
        (b"words\n", "a single value at the root"),
        (b"a: 1\n---\nb: 2\n", r"c.yaml:2:1: several YAML documents"),
        (b"\x7fELF\x00\x01\x02", "a binary file"),
        ("a: é".encode("latin-1"), "c.yaml:1: not UTF-8"),
        ("a: 1".encode("utf-16"), "UTF-16"),
        (b"a: 1\nb: \x07\n", "c.yaml:2: not YAML"),
        (b"training:\n\tseed: 1\n", r"c.yaml:2:1: not valid YAML"),
        (b"a: b: c\n", r"c.yaml:1:5: not valid YAML"),
        (b"a: *nowhere\n", "undefined alias"),
        (b"a: &a\n  b: *a\n", "contains itself"),
        (b"a: " + b"[" * 50_000, "nested deeper"),
        (b"- " * 50_000, "nested deeper"),
        (b"a: !!int x\n", "c.yaml:1:4: a value PyYAML cannot read"),
        (b"a: !!timestamp x\n", "c.yaml:1:4: a value PyYAML cannot read"),
        (b"a: 1\nb: 2024-13-41\n", "c.yaml:2:4: a value PyYAML cannot read"),
        (b"a: " + b"9" * 5_000, "a value PyYAML cannot read"),
        (b"a: !!python/object/apply:os.system [id]\n", "could not determine a constructor"),
        (b"{[a]: 1}\n", "unhashable key"),
        (laughs(12).encode(), "aliases expand"),
        (laughs(12, "<<").encode(), "aliases expand"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name_and_place(source: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(source, "c.yaml")


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    with path.open("wb") as stream:
        stream.truncate(100 * MAX_BYTES)
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        read_bytes(path)


@pytest.mark.parametrize(("name", "message"), [("missing.yaml", "no such file"), (".", "is a directory"), ("a" * 300, "cannot be read")])
def test_what_is_no_file_is_said_to_be_none(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_bytes(tmp_path / name)


def test_a_name_no_system_takes_is_a_message() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_bytes(Path("a\0b"))


def test_every_value_knows_its_own_characters() -> None:
    text = "a: &x 5 # five\nb: *x\nc:\n  - 'one'\n  - {d: 2}\ne: |\n  text\n\nf:\n"
    document = parse(text.encode(), "c.yaml")

    def source(node: Node | None) -> str:
        assert node is not None
        return text[node.start : node.end]

    assert [source(document.node(path)) for path in [("a",), ("c", "0"), ("c", "1"), ("c", "1", "d"), ("e",), ("f",)]] == [
        *("&x 5", "'one'", "{d: 2}", "2", "|\n  text", ""),
    ]
    use = document.use(("b",))
    assert use is not None and use.alias == "x" and text[use.start : use.end] == "*x"
    assert document.value(("b",)) == 5


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_places_count_as_editors_do(ending: str) -> None:
    document = parse(ending.join(["\ufeffa: 1", "", "  ", "ü: {b: 2}"]).encode(), "c.yaml")
    node = document.node(("ü", "b"))
    assert node is not None
    assert (document.place(0).line, document.place(1).column) == (1, 1)
    assert (document.place(node.start).line, document.place(node.start).column) == (4, 8)


@given(st.binary(max_size=200))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_bytes_of_any_kind_are_read_or_refused(source: bytes) -> None:
    try:
        document = parse(source, "c.yaml")
    except HfoptError as error:
        assert str(error).startswith("c.yaml")
    else:
        assert document.data == yaml.safe_load(source.decode())


@given(st.text("abe: -[]{}&*#'\"|>!%@`\n\r\t0159.<,?", max_size=60))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_text_that_is_almost_yaml_is_read_as_pyyaml_does_or_refused(text: str) -> None:
    source = f"learning_rate: 0.1\n{text}\n".encode()
    try:
        loaded = load_bytes(source, "c.yaml")
    except HfoptError:
        return
    assert loaded.document.data.keys() == yaml.safe_load(source.decode()).keys()
    assert loaded.source == source
