"""The lock of a plan: what it keeps, and that every difference is named and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_plan import CHOSEN, FACTS, PLAN

from hfopt.config.settings import with_raw
from hfopt.errors import ConfigError
from hfopt.planner import plan_diff
from hfopt.planner.plan_diff import differences, lock_of, lock_text, read_lock
from hfopt.planner.result import Plan


@pytest.fixture
def lock(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "x.lock"
    path.write_text(lock_text(lock_of(PLAN, b"a: 1\n")))
    return read_lock(path)


def test_the_same_plan_is_as_locked(lock: dict[str, Any]) -> None:
    assert differences(lock, lock_of(PLAN, b"a: 1\n")) == ()
    assert lock["device"] == {"name": "T4", "memory_bytes": 16 << 30, "count": 1} and lock["effective_batch"] == 16
    assert lock["settings"]["per_device_batch"] == 8 and lock["versions"].keys() >= {"hfopt", "torch", "transformers"}


def test_every_difference_is_named(lock: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_diff, "package_version", lambda name: "99.0" if name == "torch" else lock["versions"].get(name))
    card = replace(FACTS.hardware.gpus[0], name="L4")
    candidate = replace(CHOSEN.candidate, per_device_batch=4, accumulation=4)
    after = replace(
        CHOSEN, candidate=candidate, memory=replace(CHOSEN.memory, reserved_bytes=2 << 30), time=replace(CHOSEN.time, samples_per_s=16.0)
    )
    facts = replace(FACTS, job=with_raw(FACTS.job, {"seed": 3}), hardware=replace(FACTS.hardware, gpus=(card, card)), after=after)
    found = differences(lock, lock_of(Plan(facts=facts), b"seed: 3\n"))
    assert "config seed: unset → 3" in found and "device name: T4 → L4" in found and "device count: 1 → 2" in found
    assert f"version of torch: {lock['versions']['torch']} → 99.0" in found
    assert "planned per_device_batch: 8 → 4" in found and "planned accumulation: 2 → 4" in found
    assert "predicted memory: 1.00 GiB → 2.00 GiB (+100.0 %)" in found
    assert "predicted rate: 32.0 samples/s → 16.0 samples/s (-50.0 %)" in found and len(found) == 8


def test_small_shifts_of_predictions_and_comments_are_not_plans(lock: dict[str, Any]) -> None:
    memory = replace(CHOSEN.memory, reserved_bytes=CHOSEN.memory.reserved_bytes + (2 << 20))
    after = replace(CHOSEN, memory=memory, time=replace(CHOSEN.time, samples_per_s=32.3))
    assert differences(lock, lock_of(Plan(facts=replace(FACTS, after=after)), b"a: 1\n")) == ()
    assert differences(lock, lock_of(PLAN, b"a: 1 # why\n")) == ("config: the file was changed, none of its training arguments",)
    smaller = replace(FACTS, hardware=replace(FACTS.hardware, gpus=(replace(FACTS.hardware.gpus[0], memory_bytes=8 << 30),)))
    assert differences(lock, lock_of(Plan(facts=smaller), b"a: 1\n")) == ("device memory: 16.00 GiB → 8.00 GiB",)


def test_a_lock_holds_no_credentials() -> None:
    facts = replace(FACTS, job=with_raw(FACTS.job, {"hub_token": "hf_" + "x" * 34}))
    assert "hf_xxx" not in lock_text(lock_of(Plan(facts=facts), b""))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 99}', '{"format": 1, "config": 3}'])
def test_what_is_no_lock_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.lock"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not a lock") as caught:
        read_lock(path)
    assert "remove it" in (caught.value.hint or "")


def test_a_lock_is_readable_json() -> None:
    assert json.loads(lock_text(lock_of(PLAN, b"")))["format"] == 1
