"""CUDA_VISIBLE_DEVICES as the CUDA driver reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from nvml_standin import NvmlStandin

from hfopt.hardware.detect import Listed, visible

CARDS = tuple(Listed(uuid=uuid, speed=1.0) for uuid in ("GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44"))
SPLIT = Listed(uuid="GPU-dd55", split=True)
INSTANCES = (Listed(uuid="MIG-01", mig=True), Listed(uuid="MIG-02", mig=True, legacy_uuid="MIG-GPU-dd55/2/0"))


def shown(value: str | None, cards: tuple[Listed, ...] = CARDS, order: str | None = None) -> list[str]:
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    if order:
        environment["CUDA_DEVICE_ORDER"] = order
    return [device.uuid for device in visible(cards, environment)]


@pytest.mark.parametrize(
    ("value", "places"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("none", []),
        ("NoDevFiles", []),
        ("2", [2]),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("+1", [1]),
        ("1x,2", [1, 2]),
        ("0,-1,1", [0]),
        ("0,9,1", [0]),
        ("0,,1", [0]),
        ("1,1", []),
        ("GPU-bb", [2]),
        ("GPU-bb33,GPU-aa11", [2, 0]),
        ("GPU-aa", []),  # fits two
        ("GPU-ff,GPU-bb", []),
        ("GPU-bb,GPU-ff,GPU-cc", [2]),
        ("GPU-bb,GPU-bb33", []),  # the same twice
        ("0,GPU-bb", [0]),  # another kind than the first ends the list
        ("GPU-bb,0", [2]),
        ("0x1", [0]),
        ("--1", []),
        ("GPU-bb33,", [2]),
        ("gpu-bb", []),  # case matters
    ],
)
def test_entries(value: str | None, places: list[int]) -> None:
    assert shown(value) == [CARDS[place].uuid for place in places]


def test_indices_count_the_fastest_card_first_unless_the_bus_order_is_asked_for() -> None:
    cards = (Listed(uuid="GPU-slow", speed=1), Listed(uuid="GPU-middle", speed=2), Listed(uuid="GPU-fast", speed=3))
    assert shown(None, cards) == ["GPU-fast", "GPU-slow", "GPU-middle"]
    assert shown("0", cards) == ["GPU-fast"]
    assert shown("0", cards, "PCI_BUS_ID") == ["GPU-slow"]
    assert shown("GPU-slow", cards) == ["GPU-slow"]


def test_one_process_sees_one_mig_instance() -> None:
    cards = (SPLIT, *INSTANCES)
    assert shown(None, cards) == ["MIG-01"]
    assert shown("0", cards) == ["MIG-01"]
    assert shown("1", cards) == []
    assert shown("MIG-02", cards) == ["MIG-02"]
    assert shown("MIG-02,MIG-01", cards) == ["MIG-02"]
    assert shown("MIG-GPU-dd55/2/0", cards) == ["MIG-02"]
    assert shown("GPU-dd55", cards) == ["MIG-01"]


def test_the_first_instance_is_shown_though_another_is_faster() -> None:
    cards = (Listed(uuid="MIG-01", mig=True, speed=1), Listed(uuid="MIG-02", mig=True, speed=9))
    assert shown(None, cards) == ["MIG-01"]
    assert shown(None, (SPLIT, *cards)) == ["MIG-01"]


def test_whole_cards_come_before_mig_instances() -> None:
    cards = (SPLIT, *INSTANCES, *CARDS[:2])
    assert shown(None, cards) == ["GPU-aa11", "GPU-aa22"]
    assert shown("1", cards) == ["GPU-aa22"]


def test_no_cards_show_nothing() -> None:
    assert shown(None, ()) == [] and shown("0", ()) == []


@pytest.mark.slow
def test_pytorch_reads_it_the_same_way(nvml_standin: NvmlStandin) -> None:
    """torch counts the visible cards through NVML by its own reading of the variable; MIG entries it leaves to the driver."""
    for index, card in enumerate(CARDS):
        nvml_standin.card(index, uuid=card.uuid)
    values = ["", "-1", "none", "2", "2,0", " 1 , 3 ", "+1", "1x,2", "0,-1,1", "0,9,1", "0,,1", "1,1", "9", "0x1", "1.5", "0 1", "3,2,1,0"]
    values += [
        "GPU-bb",
        "GPU-bb33,GPU-aa11",
        "GPU-aa",
        "GPU-ff,GPU-bb",
        "GPU-bb,GPU-ff,GPU-cc",
        "GPU-bb,GPU-bb33",
        "0,GPU-bb",
        "GPU-bb,0",
        "GPU-",
    ]
    code = (
        "import json, os, sys, torch\n"
        "counts = []\n"
        "for value in json.loads(sys.argv[1]):\n"
        "    os.environ['CUDA_VISIBLE_DEVICES'] = value\n"
        "    counts.append(torch.cuda._device_count_nvml())\n"
        "print(json.dumps(counts))"
    )
    command = [sys.executable, "-c", code, json.dumps(values)]
    result = subprocess.run(command, env={**os.environ, **nvml_standin.environment}, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout.splitlines()[-1]) == [len(shown(value)) for value in values]
