"""torch's own word on the cards: asked in a child, whatever the child does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hfopt.hardware import catalog
from hfopt.hardware.checkup import Probe, disagreements, probe, runs_on
from hfopt.hardware.detect import named
from hfopt.schema import Hardware, Host
from hfopt.units import GIB

HOST = Host(cores=8, ram_bytes=64 * GIB, ram_free_bytes=50 * GIB)
TWO_CARDS = Hardware(gpus=(catalog.find("3070"),) * 2, host=HOST)
BUILT_FOR = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


@pytest.mark.parametrize(
    ("card", "architectures", "runs"),
    [
        ("3070", BUILT_FOR, True),
        ("4090", BUILT_FOR, True),  # 8.9 runs what was built for 8.6
        ("t4", BUILT_FOR, True),
        ("1080 ti", BUILT_FOR, False),
        ("tesla v100 sxm2 16gb", BUILT_FOR, False),
        ("5090", ("sm_80", "sm_90"), False),
        ("5090", ("sm_80", "compute_90"), True),  # compiled on the spot
        ("a100 sxm 40gb", ("sm_86",), False),
        ("h100 pcie", ("sm_90a",), True),
        ("3070", ("rubbish", "sm_"), False),
    ],
)
def test_kernels_run_within_their_major_version(card: str, architectures: tuple[str, ...], runs: bool) -> None:
    assert runs_on(catalog.find(card), architectures) is runs


def test_a_card_of_unknown_capability_is_given_the_benefit() -> None:
    assert runs_on(replace(catalog.find("3070"), capability=None), BUILT_FOR)


@pytest.mark.parametrize(
    ("answer", "codes"),
    [
        (Probe(count=2, architectures=BUILT_FOR), []),
        (Probe(count=1, architectures=BUILT_FOR), ["torch_misses_gpu"]),
        (Probe(count=0), ["torch_misses_gpu"]),
        (Probe(count=0, error="CUDA unknown error"), ["torch_fails"]),
        (Probe(count=2, architectures=("sm_90",)), ["no_kernels", "no_kernels"]),
    ],
)
def test_where_torch_and_the_driver_differ(answer: Probe, codes: list[str]) -> None:
    found = list(disagreements(TWO_CARDS, answer))
    assert [problem.code for problem in found] == codes
    assert all(problem.severity == "error" and problem.fix for problem in found)


def child(folder: Path, body: str) -> str:
    script = folder / "python"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo 'libcudart not found' >&2; exit 1", "libcudart not found"),
        ("kill -9 $$", "ended with code"),
        ("echo rubbish", "ended with code 0"),
    ],
)
def test_a_child_that_dies_is_an_answer(tmp_path: Path, body: str, said: str) -> None:
    answer = probe(child(tmp_path, body))
    assert answer.count == 0 and answer.error is not None and said in answer.error


def test_a_child_that_hangs_is_left_behind(tmp_path: Path) -> None:
    answer = probe(child(tmp_path, "exec sleep 60"), limit_s=0.2)
    assert answer.error is not None and "no answer" in answer.error


def test_no_python_is_an_answer(tmp_path: Path) -> None:
    assert probe(str(tmp_path / "none")).error is not None


@pytest.mark.slow
@pytest.mark.virtual_gpu
@pytest.mark.parametrize(("card", "codes"), [("a100 sxm 40gb", set()), ("1080 ti", {"card_too_old"})])
def test_doctor_asks_the_real_torch_on_a_virtual_card(card: str, codes: set[str]) -> None:
    from hfopt.virtual.environment import environment

    environment_there = {**os.environ, **environment(named(card).gpus[0])}
    command = [sys.executable, "-m", "hfopt", "doctor", "--probe", "--json"]
    result = subprocess.run(command, env=environment_there, capture_output=True, text=True, check=False)
    report = json.loads(result.stdout)
    assert report["probe"]["count"] == 1 and report["probe"]["error"] is None
    assert {problem["code"] for problem in report["problems"] if problem["severity"] == "error"} == codes
