"""`${a.b}` inside one file is followed by every reader; what needs another program stays, and a circle or a bomb does no harm."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from hfopt.config.interpolation import interpolated, left_over
from hfopt.config.read_job import load_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: {b: 4}\nc: ${a.b}\n", 4),
        ("a: {b: {d: 4}}\nc: ${a[b].d}\n", 4),
        ("a: [1, 2, 3]\nc: ${a[1]}\n", 2),
        ("a: [1, 2, 3]\nc: ${a.2}\n", 3),
        ("a: x\nb: ${a}\nc: ${b}\n", "x"),
        ("a: 8\nc: runs/${a}-b\n", "runs/8-b"),
        ("a: true\nc: is-${a}\n", "is-true"),
        ("a: {b: 1}\nc: ${a}\n", {"b": 1}),
        ("which: small\nsizes: {small: 2}\nc: ${sizes.${which}}\n", 2),
        ("c: ${oc.env:HOME}\n", "${oc.env:HOME}"),
        ("c: ${nowhere}\n", "${nowhere}"),
        ("c: \\${a}\na: 1\n", "\\${a}"),
        ("a: ${c}\nc: ${a}\n", "${a}"),
        ("a: ???\nc: ${a}\n", "${a}"),
        ("a: null\nc: ${a}\n", None),
    ],
)
def test_references_are_followed(text: str, expected: Any) -> None:
    assert interpolated(yaml.safe_load(text))["c"] == expected


def test_relative_references_count_from_their_own_mapping() -> None:
    data = yaml.safe_load("top: 1\na:\n  b: 2\n  c: ${.b}\n  d:\n    e: ${..b}\n    f: ${...top}\n")
    found = interpolated(data)["a"]
    assert found["c"] == 2 and found["d"] == {"e": 2, "f": 1}


def test_what_is_left_over_is_named_once() -> None:
    data = {"a": "${oc.env:X}", "b": ["${oc.env:X}", "y/${hydra:run.dir}"]}
    assert left_over(interpolated(data)) == ("${oc.env:X}", "${hydra:run.dir}")


def test_bombs_end() -> None:
    texts = {f"k{i}": f"${{k{i + 1}}}${{k{i + 1}}}" for i in range(60)} | {"k60": "x" * 50}
    mappings = {f"m{i}": {"l": f"${{m{i + 1}}}", "r": f"${{m{i + 1}}}"} for i in range(40)} | {"m40": {"x": 1}}
    assert len(str(interpolated(texts))) < 2_000_000
    assert len(str(interpolated(mappings))) < 20_000_000


def test_model_length_and_batch_may_all_be_references() -> None:
    text = (
        "sizes: {batch: 4, length: 256}\nnames: {org: bert, base: google-bert/bert-base-uncased}\nmodel_name_or_path: ${names.base}\n"
        "max_seq_length: ${sizes.length}\ntraining:\n  per_device_train_batch_size: ${sizes.batch}\n  learning_rate: 5.0e-5\n"
        "  output_dir: o\n"
    )
    job = load_bytes(text.encode(), "c.yaml").job
    assert job is not None and job.per_device_batch == 4 and job.data.max_length == 256
    assert job.model.name == "google-bert/bert-base-uncased"


def test_a_resolver_is_named() -> None:
    text = "model_name_or_path: ${oc.env:MODEL}\nper_device_train_batch_size: 4\nlearning_rate: 5.0e-5\noutput_dir: o\n"
    problems = load_bytes(text.encode(), "c.yaml").problems
    assert any("${oc.env:MODEL}" in problem.message and problem.severity == "note" for problem in problems)
