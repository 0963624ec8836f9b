"""The names a Python user sees: what `hfopt` exports, the keywords of `plan`, and what misuse is answered with."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import pytest

import hfopt
from hfopt.errors import ConfigError
from hfopt.job.request import Request

OWN_BUSINESS = {"charts", "own_process"}


def test_dir_shows_what_is_public_and_nothing_else() -> None:
    assert set(dir(hfopt)) == {*hfopt.__all__, "__version__"}
    assert all(getattr(hfopt, name) is not None for name in hfopt.__all__)
    with pytest.raises(AttributeError, match="no_such"):
        hfopt.no_such  # noqa: B018


def test_every_wish_is_a_keyword_of_plan_with_a_type_and_a_word_of_help() -> None:
    parameters = inspect.signature(hfopt.plan).parameters
    wished = {item.name for item in fields(Request)} - OWN_BUSINESS
    assert wished <= set(parameters)
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in parameters.values())
    assert not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    text = inspect.getdoc(hfopt.plan) or ""
    assert [name for name in wished if name not in text] == []


def test_a_lone_string_is_not_taken_apart() -> None:
    with pytest.raises(ConfigError, match="one string") as raised:
        hfopt.plan("train.yaml", keep="bf16")
    assert raised.value.hint == "give a list of names: keep=['bf16']"


@pytest.mark.parametrize("thing", [3, object()], ids=["a number", "an object"])
def test_what_cannot_be_planned_is_said(thing: object) -> None:
    with pytest.raises(hfopt.HfoptError, match="cannot be planned"):
        hfopt.plan(thing, gpu="rtx 3070")


def test_what_cannot_be_protected_is_said() -> None:
    import torch

    with pytest.raises(hfopt.HfoptError, match="takes a Trainer, not a Linear"):
        hfopt.protect(torch.nn.Linear(2, 2))


def test_a_missing_file_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(hfopt.HfoptError, match=r"none\.yaml"):
        hfopt.plan(tmp_path / "none.yaml", gpu="rtx 3070")
