"""The status line to the letter, and where it is shown."""

from __future__ import annotations

from typing import Any

import pytest

from hfopt.monitor.metrics import say, show, status_line
from hfopt.schema import GpuReading, Sample
from hfopt.units import GIB


def sample(*gpus: GpuReading, cpu: float | None = 0.452) -> Sample:
    return Sample(time_s=0.0, gpus=gpus, cpu_util=cpu, main_thread_util=None, ram_used_bytes=int(18.4 * GIB), ram_total_bytes=64 * GIB)


def card(**changed: Any) -> GpuReading:
    return GpuReading(**{"uuid": "a", "sm_util": 0.85, "used_bytes": int(12.3 * GIB), "total_bytes": 24 * GIB, **changed})


def test_the_line_with_a_card() -> None:
    expected = "GPU: 85% | VRAM: 12.3/24.0GiB (51.2%) | CPU: 45.2% | RAM: 18.4/64.0GiB (28.8%) | data wait 3%"
    assert status_line(sample(card()), 0.03) == expected


def test_without_a_card_its_parts_are_left_out() -> None:
    assert status_line(sample(), 0.03) == "CPU: 45.2% | RAM: 18.4/64.0GiB (28.8%) | data wait 3%"


def test_what_is_unknown_or_impossible_is_left_out() -> None:
    assert (
        status_line(sample(card(sm_util=3.0, suspect=("sm_util",)), cpu=None), None)
        == "VRAM: 12.3/24.0GiB (51.2%) | RAM: 18.4/64.0GiB (28.8%)"
    )


def test_several_cards_are_joined() -> None:
    assert status_line(sample(card(), card(sm_util=0.55)), None).startswith("GPU: 70% | VRAM: 24.6/48.0GiB (51.2%)")


def test_in_a_notebook_it_stands_before_the_bar() -> None:
    class Tracker:
        prefix = ""

    class Notebook:
        training_tracker = Tracker()

    show([Notebook()], "GPU: 85%")
    assert Notebook.training_tracker.prefix == "GPU: 85%"


def test_without_a_bar_words_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say([], "hello")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "hello\n")
