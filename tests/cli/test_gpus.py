"""`hfopt gpus` as it is run: tables on stdout, one clear message for a name that fits nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from hfopt.hardware import catalog


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "hfopt", "gpus", *arguments], capture_output=True, text=True, check=False)


def test_all_cards_are_listed_one_to_a_line() -> None:
    result = run()
    assert result.returncode == 0
    assert all(gpu.name in result.stdout for gpu in catalog.cards())
    assert len(result.stdout.splitlines()) == len(catalog.cards()) + 2


def test_one_card_in_full_with_its_source() -> None:
    result = run("rtx", "3070")
    assert result.stdout == run("rtx 3070").stdout
    assert result.returncode == 0
    known = catalog.find("3070")
    assert known.source is not None and known.source in result.stdout
    assert f"{known.peak_flops['fp16'] / 1e12:.1f} TFLOP/s" in result.stdout


def test_one_card_in_full_with_its_public_prices() -> None:
    shown = run("l4").stdout
    assert "0.80 USD/h, HF Jobs l4x1 (2026-" in shown and "3.80 USD/h for 4, HF Jobs l4x4" in shown and "jobs-pricing" in shown
    assert "rented at" not in run("gtx 1080").stdout


def test_a_name_for_several_lists_them() -> None:
    result = run("a100")
    assert result.returncode == 0
    assert [line.split("  ")[0] for line in result.stdout.splitlines() if line.startswith("A100")] == [
        gpu.name for gpu in catalog.cards() if gpu.name.startswith("A100")
    ]


@pytest.mark.parametrize(("name", "count"), [("4090", 1), ("4060 ti", 2)])
def test_json_is_a_list_of_cards(name: str, count: int) -> None:
    cards = json.loads(run(name, "--json").stdout)
    assert len(cards) == count and all(card["memory_bytes"] > 0 and card["peak_flops"]["bf16"] > 0 for card in cards)


def test_an_unknown_name_gets_the_nearest_and_no_traceback() -> None:
    result = run("RTX 3071")
    assert result.returncode == 2 and result.stdout == ""
    assert "RTX 3071" in result.stderr and "GeForce RTX 3070" in result.stderr and "Traceback" not in result.stderr


def test_names_complete_in_the_shell() -> None:
    environment = {**os.environ, "_HFOPT_COMPLETE": "complete_bash", "COMP_WORDS": "hfopt gpus 307", "COMP_CWORD": "2"}
    code = "import sys; sys.argv = ['hfopt']; from hfopt.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["3070", "3070-ti", "3070-laptop", "3070-ti-laptop"]
