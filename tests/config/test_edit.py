"""An edit replaces the values' own characters and nothing else, or it is refused."""

from __future__ import annotations

import pytest
import yaml

from hfopt.config.edit import Edited, edit
from hfopt.config.load import load_bytes
from hfopt.schema import Change

BATCH = "per_device_train_batch_size"


def edited(text: str, **values: object) -> Edited:
    changes = [Change(key=key, before=None, after=value, reason="a test") for key, value in values.items()]
    return edit(load_bytes(text.encode(), "config.yaml"), changes)


def text_of(text: str, **values: object) -> str:
    return edited(text, **values).data.decode()


def test_no_change_is_the_identity() -> None:
    source = f"\ufeff# é\r\n{BATCH}: 8   \r\n\r\nlearning_rate: 1.0e-5 #x"
    assert edited(source).data == source.encode()
    assert edited(source, **{BATCH: 8}).data == source.encode()


@pytest.mark.parametrize(
    ("before", "values", "after"),
    [
        (f"{BATCH}: 8  # small\nseed: 1", {BATCH: 16}, f"{BATCH}: 16  # small\nseed: 1"),
        (f"{BATCH}: 8\r\nseed: 1", {"bf16": True}, f"{BATCH}: 8\r\nbf16: true\r\nseed: 1"),
        (f"seed: 1\n{BATCH}: 8", {"gradient_accumulation_steps": 2}, f"seed: 1\n{BATCH}: 8\ngradient_accumulation_steps: 2"),
        (f"training:\n    {BATCH}: 8\n", {"bf16": True}, f"training:\n    {BATCH}: 8\n    bf16: true\n"),
        (f"{BATCH}: 8\nfp16: True\n", {"fp16": False}, f"{BATCH}: 8\nfp16: False\n"),
        (f"{{{BATCH}: 8, seed: 1}}\n", {BATCH: 4, "bf16": True}, f"{{{BATCH}: 4, bf16: true, seed: 1}}\n"),
        (f"{BATCH}: 8\noptim: 'adamw_torch'\n", {"optim": "sgd"}, f"{BATCH}: 8\noptim: 'sgd'\n"),
        (f"{BATCH}: 8\nlearning_rate:\nseed: 1\n", {"learning_rate": 1e-05}, f"{BATCH}: 8\nlearning_rate: 1.0e-05\nseed: 1\n"),
    ],
)
def test_only_the_values_own_characters_change(before: str, values: dict[str, object], after: str) -> None:
    assert text_of(before, **values) == after


def test_a_value_behind_an_alias_changes_at_its_use() -> None:
    source = f"size: &size 8\ntraining:\n  {BATCH}: *size\n  learning_rate: 0.1\n"
    assert text_of(source, **{BATCH: 4}) == f"size: &size 8\ntraining:\n  {BATCH}: 4\n  learning_rate: 0.1\n"


def test_an_anchor_is_handed_to_its_first_reader() -> None:
    source = f"{BATCH}: &size 8\nper_device_eval_batch_size: *size\nother: *size\n"
    after = text_of(source, **{BATCH: 16})
    assert yaml.safe_load(after) == {BATCH: 16, "per_device_eval_batch_size": 8, "other": 8}


def test_a_merged_value_is_overridden_in_its_section() -> None:
    source = f"base: &base\n  {BATCH}: 8\n  fp16: true\ntraining:\n  <<: *base\n  learning_rate: 0.1\n"
    after = text_of(source, **{BATCH: 16})
    assert yaml.safe_load(after)["training"] == {BATCH: 16, "fp16": True, "learning_rate": 0.1}
    assert yaml.safe_load(after)["base"] == {BATCH: 8, "fp16": True}


def test_a_comment_that_states_the_old_value_is_told() -> None:
    done = edited(f"{BATCH}: 8  # 8 fits on a T4\nseed: 1  # 42\n", **{BATCH: 16, "seed": 2})
    assert [(stale.key, stale.place.line) for stale in done.stale_comments] == [(BATCH, 1)]
