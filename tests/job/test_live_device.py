"""A live Trainer's device: what its process holds is free again, ranks share the host, and what was fixed when it was made stays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hfopt.job import live_trainer as live
from hfopt.job.live_trainer import data_parallel_world, kept_keys, live_hardware
from hfopt.job.request import Request
from hfopt.launch import apply_plan
from hfopt.memory.step_memory import context_bytes
from hfopt.schema import Gpu, Hardware, Host
from hfopt.units import GIB

HOST = Host(cores=8, ram_bytes=64 * GIB, ram_free_bytes=32 * GIB)
CARDS = tuple(
    Gpu(name=name, memory_bytes=24 * GIB, usable_bytes=23 * GIB, free_bytes=free * GIB, capability=(8, 6), sms=82)
    for name, free in (("first", 4), ("second", 22))
)


def trainer(device: str, **args: Any) -> Any:
    return SimpleNamespace(
        model=torch.nn.Linear(2, 2), args=SimpleNamespace(device=torch.device(device), **{"world_size": 1, "n_gpu": 1, **args})
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    hardware = Hardware(gpus=CARDS, host=HOST)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(live, "hardware_of", lambda request: hardware)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: GIB)  # none of it the model's, which is on the CPU here
    return hardware


def test_what_the_process_reserved_is_free_again_but_for_the_users_own_tensors(machine: Hardware) -> None:
    (card,) = live_hardware(trainer("cuda:0"), Request()).gpus
    assert card.name == "first"
    assert card.free_bytes == 6 * GIB + context_bytes((8, 6), multiprocessors=82)
    (card,) = live_hardware(trainer("cuda:1"), Request()).gpus
    assert card.name == "second" and card.free_bytes == card.usable_bytes, "no more than there is"


def test_several_ranks_have_all_cards_and_the_cpu_is_shared(machine: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    both = live_hardware(trainer("cuda:0", world_size=2), Request())
    assert [card.name for card in both.gpus] == ["first", "second"] and both.host == HOST
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    quarter = live_hardware(trainer("cpu", world_size=8), Request())
    assert quarter.gpus == () and (quarter.host.cores, quarter.host.ram_free_bytes) == (2, 8 * GIB)


def test_a_card_that_was_named_is_planned_for_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    named = Hardware(gpus=CARDS[:1], host=HOST, hypothetical=True)
    monkeypatch.setattr(live, "hardware_of", lambda request: named)
    assert live_hardware(trainer("cuda:0"), Request()) is named


def fixed(*, deepspeed: bool = False, optimizer: object = None, **args: Any) -> tuple[frozenset[str], str]:
    accelerator = SimpleNamespace(_models=[])
    kept = kept_keys(
        SimpleNamespace(
            is_deepspeed_enabled=deepspeed,
            accelerator=accelerator,
            optimizer=optimizer,
            args=SimpleNamespace(**{"bf16": False, "fp16": False, **args}),
        )
    )
    return kept.keys, " ".join(kept.notes)


def test_what_was_fixed_when_the_trainer_was_made_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    assert fixed() == (frozenset(), "")
    keys, said = fixed(deepspeed=True)
    assert {"per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16"} <= keys and "DeepSpeed has already read" in said
    assert fixed(optimizer=object())[0] == {"optim"}
    keys, said = fixed(torch_compile=True)
    assert keys == {"gradient_checkpointing", "gradient_checkpointing_kwargs"} and "the model is compiled with it" in said
    assert "hfopt run --nproc 2" in fixed(n_gpu=2)[1]
    assert "liger" in fixed(use_liger_kernel=True)[1]
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert fixed(bf16=True) == (frozenset(), "")
    keys, said = fixed()
    assert {"bf16", "fp16"} <= keys and "the launcher chose the precision" in said


def test_ranks_that_share_a_sample_do_not_multiply_the_batch() -> None:
    args = SimpleNamespace(world_size=8, n_gpu=1)
    assert data_parallel_world(SimpleNamespace(args=args)) == 8
    assert data_parallel_world(SimpleNamespace(args=args, get_tp_size=lambda: 2, get_cp_size=lambda: 2)) == 2
    assert data_parallel_world(SimpleNamespace(args=SimpleNamespace(world_size=1, n_gpu=4))) == 4


def test_a_dry_run_whose_data_ends_early_says_so_with_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(apply_plan.next_settings, "say", told.append)
    monkeypatch.setattr(apply_plan, "memory_now", lambda device: SimpleNamespace(capacity_bytes=8 * GIB))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2 * GIB)
    state = SimpleNamespace(is_world_process_zero=True, global_step=2)
    callback = apply_plan._callback(None)
    for device, peak in (("cpu", ""), ("cuda", ", at most 2.00 GiB reserved of 8.00 GiB (measured)")):
        with pytest.raises(SystemExit) as stopped:
            callback.on_train_end(SimpleNamespace(device=torch.device(device)), state, None)
        assert stopped.value.code == 0
        assert told[-1] == f"hfopt: dry run: the data ended after 2 steps{peak}; nothing was saved"
