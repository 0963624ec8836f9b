"""Weights that TRL loads onto the card by name: their order, the block before them, and what has no part in it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from hfopt.memory.step_memory import estimate
from hfopt.model.builder import skeleton
from hfopt.model.from_config import from_spec
from hfopt.model.loading import CardLoad, card_loads
from hfopt.schema import DataSpec, Lora, ModelSpec, StepSettings, Workload
from hfopt.units import MIB

pytest.importorskip("trl", reason="TRL is not installed: its 1.0 asks for a newer transformers than the oldest here")
Tiny = Callable[..., str]


def _made(name: str, kind: str = "SFT", *, lora: Lora | None = None, **arguments: Any) -> Workload:
    return from_spec(ModelSpec(name=name, lora=lora), DataSpec(max_length=16), trainer=kind, trl_arguments=arguments)


def _loads(workload: Workload) -> list[CardLoad]:
    return list(card_loads(skeleton(workload.build_model)))


def test_a_block_for_all_then_the_weights_by_name(tiny: Tiny) -> None:
    workload = _made(tiny("llama", vocab_size=20_000))
    model = skeleton(workload.build_model)
    (load,) = card_loads(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for parameter in load.weights]
    assert len(order) == len(names) and order[:2] == ["lm_head.weight", "model.embed_tokens.weight"]
    first, second = (order.index(f"model.layers.0.mlp.{part}_proj.weight") for part in ("down", "gate"))
    assert (
        second == first + 1 < order.index("model.layers.0.self_attn.k_proj.weight") < order.index("model.layers.1.input_layernorm.weight")
    )
    needed = sum(parameter.untyped_storage().nbytes() for parameter in load.weights)
    assert load.block_bytes == needed - 2 * MIB


def test_the_trace_begins_with_that_block(tiny: Tiny) -> None:
    workload = _made(tiny("llama", vocab_size=20_000))
    timeline = estimate(workload, StepSettings()).curve.timeline
    (load,) = _loads(workload)
    sizes = timeline.sizes(2)
    assert sizes[0] == load.block_bytes and timeline.blocks[1] == timeline.blocks[0] and timeline.is_free[1]
    assert sizes[2 : 2 + len(load.weights)] == [parameter.untyped_storage().nbytes() for parameter in load.weights]


def test_a_reference_follows_with_less_for_what_is_cached(tiny: Tiny) -> None:
    first, second = _loads(_made(tiny("llama", vocab_size=20_000), "DPO"))
    assert [parameter.shape for parameter in first.weights] == [parameter.shape for parameter in second.weights]
    assert 0 < second.block_bytes < first.block_bytes + 2 * MIB


def test_adapters_come_later(tiny: Tiny) -> None:
    workload = _made(tiny("llama"), lora=Lora(target_modules="all-linear"))
    model = skeleton(workload.build_model)
    (load,) = card_loads(model)
    adapters = {id(parameter) for name, parameter in model.named_parameters() if "lora_" in name}
    assert adapters and not adapters & {id(parameter) for parameter in load.weights}


@pytest.mark.parametrize("arguments", [{"model_init_kwargs": {"device_map": None}}, None])
def test_a_model_that_its_trainer_moves_has_none(tiny: Tiny, arguments: dict[str, Any] | None) -> None:
    name = tiny("llama")
    plain = from_spec(ModelSpec(name=name, task="causal_lm"), DataSpec(max_length=16))
    assert not _loads(plain if arguments is None else _made(name, **arguments))


def test_ten_comes_after_nine(tiny: Tiny) -> None:
    model = skeleton(_made(tiny("llama", num_hidden_layers=11)).build_model)
    (load,) = card_loads(model)
    names = {id(parameter): name.split(".") for name, parameter in model.named_parameters()}
    layers = [int(names[id(parameter)][2]) for parameter in load.weights if names[id(parameter)][1] == "layers"]
    assert all(one <= other for one, other in pairwise(layers)) and layers[-1] == 10
