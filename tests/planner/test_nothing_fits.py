"""When nothing fits: settled by counting, and every remedy priced, ranked, and marked where it trains something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from hfopt.errors import NothingFits, WorkloadError
from hfopt.job.subject import from_file
from hfopt.memory import step_memory
from hfopt.planner import Request, nothing_fits, plan
from hfopt.planner.choices import current_candidate
from hfopt.planner.nothing_fits import Rescue, _larger_card
from hfopt.planner.remedies import SHORTEST_SHARE, MemoryRemedy, remedies, together
from hfopt.pricing.target_device import device_of
from hfopt.schema import Checkpointing, StepSettings
from hfopt.units import GIB

CARD = "rtx 3070"
LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "num_hidden_layers": 8, "vocab_size": 32000},
    **{"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 2048, "dtype": "float32"},
}


def config(folder: Path, **args: object) -> Path:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    path = folder / "train.yaml"
    values = {"model_name_or_path": str(folder), "max_length": 512, "per_device_train_batch_size": 1, "output_dir": "out", **args}
    path.write_text(yaml.safe_dump({"gradient_accumulation_steps": 8, "bf16": True, "optim": "adamw_torch", **values}))
    return path


@pytest.fixture
def rescue(tmp_path: Path) -> Callable[..., Rescue]:
    """What would help a Llama of 66 million float32 weights on a card of so many GiB."""

    def make(gib: float, **args: object) -> Rescue:
        request = Request(gpu=CARD, vram_gib=gib, headroom=0.0)
        subject = from_file(config(tmp_path, **args), request)
        device = device_of(subject, request)
        pool = (replace(current_candidate(subject), checkpointing=Checkpointing(every_n_layers=1)),)
        return Rescue(subject=subject, device=device, pricing=device.pricing(subject, None, lambda text: None), pool=pool)

    return make


def line(found: Rescue, words: str) -> str | None:
    return next((one for one in found.lines() if words in one), None)


@pytest.mark.slow
def test_fused_adam_is_named_where_its_temporaries_are_what_is_too_much(rescue: Callable[..., Rescue]) -> None:
    """The foreach update takes a quarter more than all states; the fused one is the same update."""
    needs = rescue(24)
    both = [needs._price(one) for one in remedies(needs.subject, "adamw_torch") if one.settings.get("optim") == "adamw_torch_fused"]
    assert both[0] is not None
    fused, foreach = both[0].device_bytes, needs._rough_bytes(needs.smallest)
    assert fused < foreach
    told = line(rescue((fused + foreach) / 2 / GIB), "fused AdamW")
    assert told is not None and "optim: adamw_torch_fused" in told and "--allow optim" in told and "samples/s" in told


def test_what_cannot_fit_is_settled_without_a_single_trace(rescue: Callable[..., Rescue], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr(nothing_fits, "rough_step", never)
    assert rescue(1.0).hopeless()


@pytest.mark.slow
def test_inputs_of_a_long_window_are_named_where_they_are_what_is_too_much(
    rescue: Callable[..., Rescue], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images at an accumulation of hundreds: the Trainer fetches a whole window onto the card."""
    found = rescue(24)
    without = found._rough_bytes(found.smallest)
    monkeypatch.setattr(type(found.pricing), "windows_bytes", lambda *_: 64 * GIB)
    assert without + 32 * GIB <= found._rough_bytes(found.smallest) and found._rough_bytes(found.smallest) >= 64 * GIB
    assert "inputs of two windows of 8 batches, which the Trainer holds on the card while it fetches 64.00 GiB" in str(found.error())
    assert not list(found._priced(remedies(found.subject, "adamw_torch"))), "none of them makes the inputs smaller"
    shards, card = found._other_hardware()
    assert "sharding over 4 such cards" in shards and "more memory" in card and "6GB" not in card


def test_a_job_that_fits_is_not_hopeless(rescue: Callable[..., Rescue]) -> None:
    assert not rescue(24).hopeless()


@pytest.mark.slow
def test_the_whole_plan_says_what_is_missing_and_what_would_fit(tmp_path: Path) -> None:
    with pytest.raises(NothingFits) as refusal:
        plan(config(tmp_path), Request(gpu=CARD, vram_gib=1.1, dry_run=False))
    message, hint = str(refusal.value), refusal.value.hint or ""
    assert "weights" in message and "gradients" in message and "optimizer states" in message
    assert "a card with more memory" in hint and "paged_adamw_8bit" in hint


@pytest.mark.slow
def test_what_trains_something_else_stands_last_and_is_marked(rescue: Callable[..., Rescue]) -> None:
    lines = list(rescue(1.2).lines())
    other = [any(word in one for word in ("trains adapters", "trains on shorter text")) for one in lines]
    assert any(other) and not all(other)
    assert other == sorted(other)


def test_no_remedy_goes_below_a_quarter_of_the_length(rescue: Callable[..., Rescue]) -> None:
    found = rescue(1.2)
    every = (*remedies(found.subject, "adamw_torch"), *together(remedies(found.subject, "adamw_torch")))
    assert max(one.length_divided_by for one in every) == SHORTEST_SHARE
    prices = [found._price(one) for one in every if one.length_divided_by > 1 and one.job is None]
    sizes = [one.device_bytes for one in prices if one is not None]
    assert sizes == sorted(sizes, reverse=True), "shorter text never needs more"


def test_an_adapter_on_weights_that_are_too_much_is_not_traced(rescue: Callable[..., Rescue], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("traced")

    found = rescue(1.0)
    huge = replace(found.subject, workload=replace(found.subject.workload, parameters=10**12))
    monkeypatch.setattr(nothing_fits, "rough_step", never)
    adapters = [one for one in remedies(found.subject, "adamw_torch") if one.job is not None]
    assert adapters and [replace(found, subject=huge)._price(one) for one in adapters] == [None] * len(adapters)


def test_changes_are_put_together_where_none_is_enough() -> None:
    one = MemoryRemedy(words="a", how="x: 1", effect="same", settings={"optim": "paged_adamw_8bit"})
    other = MemoryRemedy(words="b", how="y: 2", effect="training", settings={"fused_loss": True})
    (both,) = together((one, other))
    assert both.words == "a and b" and both.how == "x: 1; y: 2" and both.effect == "training"
    assert both.settings == {"optim": "paged_adamw_8bit", "fused_loss": True}


def test_a_change_that_cannot_be_built_is_no_remedy(rescue: Callable[..., Rescue], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise WorkloadError("peft is not installed")

    found = rescue(1.2)
    monkeypatch.setattr(nothing_fits, "workload_of", fails)
    assert not any("LoRA" in one for one in found.lines())


def test_an_adapters_job_is_not_told_to_use_adapters(rescue: Callable[..., Rescue]) -> None:
    found = rescue(1.2, use_peft=True, lora_r=8, lora_target_modules="all-linear")
    assert found.subject.job.model.lora is not None
    words = [one.words for one in remedies(found.subject, "adamw_torch")]
    assert not any("LoRA on all linear layers" in one or "8-bit states" in one for one in words)
    assert any("QLoRA" in one for one in words)


def test_sharding_divides_states_but_not_activations(rescue: Callable[..., Rescue]) -> None:
    found = rescue(1.0)
    step = found._step(None, found.pricing.settings(found.smallest), 1)
    assert step is not None
    told = found._shards(step, StepSettings(optim="adamw_torch"))
    assert told is not None
    cards, needed = told
    states = step_memory.state_bytes(step.count, StepSettings(optim="adamw_torch")).total_bytes
    assert cards >= 2 and needed > states / cards + step.activations_bytes


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="TRL's default of dtype is read from TRL")
def test_weights_that_trl_widens_may_stay_as_they_are_published(rescue: Callable[..., Rescue], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any("as they are published" in one.words for one in remedies(rescue(1.2).subject, "adamw_torch"))
    monkeypatch.setitem(LLAMA, "dtype", "bfloat16")
    found = rescue(24, packing=True)
    (published,) = [one for one in remedies(found.subject, "adamw_torch") if "as they are published" in one.words]
    assert published.how == "dtype: bfloat16" and published.effect == "training"
    priced = found._price(published)
    assert priced is not None and priced.device_bytes < 0.75 * found._rough_bytes(found.smallest)


def test_a_larger_card_holds_vllm_too() -> None:
    alone, beside = _larger_card(60 * GIB), _larger_card(60 * GIB, 0.5)
    assert alone is not None and beside is not None and beside != alone
    assert _larger_card(60 * GIB, 0.93) is None


def test_llama_factory_widens_what_trains_and_no_model_below_adapters(rescue: Callable[..., Rescue]) -> None:
    found = rescue(24, stage="sft", finetuning_type="full", template="llama3", cutoff_len=512)
    assert found.subject.job.model.weights_dtype == "float32"
    adapted = [one.job for one in remedies(found.subject, "adamw_torch") if one.job is not None and one.job.model.lora is not None]
    assert adapted and {job.model.weights_dtype for job in adapted} == {"bfloat16"}
    plain = remedies(rescue(24).subject, "adamw_torch")
    assert {one.job.model.weights_dtype for one in plain if one.job is not None} == {None}
