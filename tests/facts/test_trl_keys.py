"""The keys of TRL's parser are those of its classes, and of no other."""

from __future__ import annotations

import pytest

from hfopt.facts.training_keys import RENAMED, TRAINERS, trl_parser_keys

trl = pytest.importorskip("trl")


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_they_are_those_of_the_installed_classes(trainer: str) -> None:
    from dataclasses import fields

    taken = trl_parser_keys(trainer)
    assert taken is not None
    classes = (getattr(trl, f"{trainer}Config"), trl.ModelConfig, trl.ScriptArguments, trl.DatasetMixtureConfig)
    real = {item.name for one in classes for item in fields(one) if item.init}
    assert real - taken.keys == set()
    assert taken.keys - real <= {"env", "reward_model_name_or_path", "reward_funcs"}


def test_what_was_renamed_has_a_successor_that_is_there() -> None:
    known = set().union(*(taken.keys for trainer in TRAINERS if (taken := trl_parser_keys(trainer)) is not None))
    assert set(RENAMED.values()) <= known
    assert not RENAMED.keys() & known
    assert trl_parser_keys("Trainer") is None
