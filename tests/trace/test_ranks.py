"""One rank of several: what each engine divides, keeps whole and keeps away from the card."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hfopt.errors import TraceError
from hfopt.memory.step_memory import Estimate, estimate
from hfopt.schema import BatchShape, Sharding, StepSettings, Workload, ZeroSizes
from hfopt.trace.fsdp import fake_world, has_fake_collectives
from hfopt.trace.rank_step import bucket_sizes
from hfopt.trace.zero import in_compute_dtype
from hfopt.trace.zero3 import inputs_kept
from hfopt.units import MIB

WORLD = 4
HIDDEN, LAYERS, VOCABULARY = 256, 3, 2000
needs_fake_collectives = pytest.mark.skipif(
    not has_fake_collectives(), reason="this torch has no collectives for fake tensors: no FSDP2 trace"
)


def llama(*, lora: bool = False) -> Workload:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
    )

    def build() -> Any:
        from hfopt.model.builder import add_lora, build_here
        from hfopt.schema import Lora

        def assemble() -> Any:
            model = LlamaForCausalLM(config)
            return add_lora(model, Lora(r=4, target_modules="all-linear"), "causal_lm") if lora else model

        return build_here(assemble)

    def batch(size: int) -> dict[str, Any]:
        ids = torch.ones(size, 32, dtype=torch.long)
        return {"input_ids": ids, "labels": ids.clone()}

    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in LlamaForCausalLM(config).parameters())
    return Workload(
        name="tiny-llama",
        model_class="LlamaForCausalLM",
        task="causal_lm",
        build_model=build,
        make_batch=batch,
        shape=BatchShape(kind="text", length=32),
        parameters=parameters,
        trainable_parameters=parameters,
    )


def traced(sharding: Sharding | None, *, lora: bool = False, **settings: Any) -> Estimate:
    return estimate(llama(lora=lora), StepSettings(precision="bf16", optim="adamw_torch", sharding=sharding, **settings))


def held(made: Estimate, *categories: str, after: str) -> int:
    """Bytes of these kinds that are live right after a mark of the timeline."""
    from hfopt.memory.timeline import live_bytes

    live = live_bytes(made.curve.timeline, 2, made.curve.timeline.marks[after] + 2)
    return sum(live[category] for category in categories)


def fsdp(**options: Any) -> Sharding:
    return Sharding(engine="fsdp2", world_size=WORLD, wrap=("LlamaDecoderLayer",), **options)


def test_a_torch_that_cannot_gather_fake_shards_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfopt.trace.fsdp.has_fake_collectives", lambda: False)
    with pytest.raises(TraceError, match=r"FSDP2 cannot shard .*: torch \S+ has no collectives for fake tensors"):
        traced(fsdp())


@needs_fake_collectives
def test_fsdp_divides_weights_and_optimizer_states_by_the_world() -> None:
    whole, shard = llama().parameters * 4, traced(fsdp())
    assert held(shard, "weights", after="step_1") == pytest.approx(whole / WORLD, rel=0.02)
    assert held(shard, "optimizer", after="step_1") == pytest.approx(2 * whole / WORLD, rel=0.02)


@needs_fake_collectives
@pytest.mark.slow
def test_fsdp_keeps_gathered_weights_when_it_does_not_reshard() -> None:
    gathered, kept = traced(fsdp()).curve.peak(2), traced(fsdp(reshard_after_forward=False)).curve.peak(2)
    blocks = 2 * (llama().parameters - 2 * HIDDEN * VOCABULARY)
    assert kept.allocated_bytes - gathered.allocated_bytes > 0.3 * blocks


@needs_fake_collectives
def test_fsdp_offload_leaves_shards_and_states_on_the_host() -> None:
    offloaded = traced(fsdp(offload_parameters=True))
    assert held(offloaded, "weights", "optimizer", after="step_1") < 0.02 * llama().parameters * 4


@needs_fake_collectives
@pytest.mark.slow
def test_whole_gradients_are_kept_through_the_accumulation_unless_each_batch_is_synced() -> None:
    kept = traced(fsdp(), accumulation=2).curve.peak(2).allocated_bytes
    synced = traced(fsdp(sync_each_batch=True), accumulation=2).curve.peak(2).allocated_bytes
    assert kept - synced > 0.5 * llama().parameters  # whole gradients of two bytes each instead of shards of four


@needs_fake_collectives
@pytest.mark.slow
def test_fsdp_shards_frozen_weights_of_an_adapted_model_too() -> None:
    shard = traced(fsdp(), lora=True)
    assert held(shard, "weights", after="step_1") < 1.2 * llama().parameters * 4 / WORLD


@needs_fake_collectives
@pytest.mark.slow
def test_gathered_units_live_on_streams_of_their_own() -> None:
    assert traced(fsdp()).curve.timeline.streams
    assert not traced(None).curve.timeline.streams


def test_ddp_adds_the_buckets_to_the_memory_of_one_device() -> None:
    alone, rank = traced(None), traced(Sharding(engine="ddp", world_size=WORLD))
    added = held(rank, "gradients", after="step_1") - held(alone, "gradients", after="step_1")
    assert added == llama().parameters * 4


def test_buckets_close_at_their_limit() -> None:
    gradients = [("float", MIB), ("float", 20 * MIB), ("float", 6 * MIB), ("half", 10), ("float", 3)]
    assert sorted(bucket_sizes(gradients)) == [3, 10, MIB, 26 * MIB]


ZERO = ZeroSizes(reduce_bucket=HIDDEN * HIDDEN, prefetch_bucket=HIDDEN * HIDDEN, persistence_threshold=10 * HIDDEN, max_reuse_distance=1)


def test_zero_2_keeps_whole_weights_and_a_share_of_the_states() -> None:
    shard = traced(Sharding(engine="zero2", world_size=WORLD, zero=ZERO))
    parameters = llama().parameters
    assert held(shard, "weights", after="step_1") == pytest.approx(2 * parameters + 4 * parameters / WORLD, rel=0.02)
    assert held(shard, "optimizer", after="step_1") == pytest.approx(8 * parameters / WORLD, rel=0.02)


def test_zero_3_keeps_a_share_of_everything() -> None:
    shard = traced(Sharding(engine="zero3", world_size=WORLD, zero=ZERO))
    parameters = llama().parameters
    assert held(shard, "weights", after="step_1") == pytest.approx(6 * parameters / WORLD, rel=0.05)
    assert held(shard, "optimizer", after="step_1") == pytest.approx(8 * parameters / WORLD, rel=0.02)


def test_zero_offload_leaves_the_states_on_the_host() -> None:
    shard = traced(Sharding(engine="zero2", world_size=WORLD, offload_optimizer=True, zero=ZERO))
    assert held(shard, "optimizer", after="step_1") < 1000


def own_streams(made: Estimate, what: str) -> set[int]:
    timeline = made.curve.timeline
    named = [timeline.places[place].op == what for place in timeline.place_of.tolist()]
    taken = [
        block for block, found, freed in zip(timeline.blocks.tolist(), named, timeline.is_free.tolist(), strict=True) if found and not freed
    ]
    return {timeline.streams.get(block, 0) for block in taken}


def test_what_zero_2_makes_while_reducing_belongs_to_the_reducing_stream() -> None:
    overlapped = traced(Sharding(engine="zero2", world_size=WORLD, zero=replace(ZERO, overlap_comm=True)))
    assert own_streams(overlapped, "own_gradients") == {1} and own_streams(overlapped, "reduce_bucket") == {0}
    plain = traced(Sharding(engine="zero2", world_size=WORLD, zero=replace(ZERO, overlap_comm=False)))
    assert own_streams(plain, "own_gradients") == {0}


def test_zero_2_adds_up_micro_batches_in_the_first_ones_buffer() -> None:
    sharding = Sharding(engine="zero2", world_size=WORLD, zero=ZERO)
    once, twice = traced(sharding), traced(sharding, accumulation=2)
    added = held(twice, "gradients", after="step_1_micro_1") - held(once, "gradients", after="step_1_micro_0")
    share = 2 * llama().parameters / WORLD
    assert share <= added < 1.5 * share  # borders of the shares lie inside weights


def test_zero_1_keeps_whole_gradients_through_the_accumulation() -> None:
    one, two = (Sharding(engine="zero2", world_size=WORLD, zero=replace(ZERO, divides_gradients=divides)) for divides in (False, True))
    whole, divided = (held(traced(sharding, accumulation=2), "gradients", after="step_1_micro_1") for sharding in (one, two))
    assert whole >= 2 * llama().parameters > 1.5 * divided


def test_zero_3_gathers_on_a_stream_of_its_own_and_learns_the_order_in_the_first_micro_batch() -> None:
    made = traced(Sharding(engine="zero3", world_size=WORLD, zero=replace(ZERO, overlap_comm=True)))
    assert 2 in own_streams(made, "all_gather")
    timeline = made.curve.timeline
    largest = max(timeline.sizes(2)[timeline.marks["step_1"] :])
    assert largest >= 2 * HIDDEN * VOCABULARY


@pytest.mark.parametrize(
    ("made_in_parts", "packed", "adapters"),
    [(True, False, torch.float32), (True, True, torch.bfloat16), (False, False, torch.bfloat16)],
)
def test_adapters_keep_their_dtype_only_beside_weights_that_were_made_in_parts(
    made_in_parts: bool, packed: bool, adapters: torch.dtype
) -> None:
    def build() -> Any:
        model = llama(lora=True).build_model()
        if packed:
            model.register_parameter("packed", torch.nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False))
        return model

    weights = dict(in_compute_dtype(build, "bf16", made_in_parts=made_in_parts)().named_parameters())
    assert {weight.dtype for name, weight in weights.items() if "lora_" in name} == {adapters}
    assert {weight.dtype for name, weight in weights.items() if "lora_" not in name and name != "packed"} == {torch.bfloat16}


def test_under_zero_3_each_adapted_layer_keeps_its_input_twice() -> None:
    """In float32 for the adapter, in bfloat16 for the frozen weight; under ZeRO-2 the two are one."""
    sizes = replace(ZERO, persistence_threshold=HIDDEN * VOCABULARY)  # nothing comes and goes
    two, three = (traced(Sharding(engine=engine, world_size=WORLD, zero=sizes), lora=True).curve for engine in ("zero2", "zero3"))
    per_sample = [(curve.peak(64).allocated_bytes - curve.peak(32).allocated_bytes) / 32 for curve in (two, three)]
    inputs = 32 * LAYERS * (6 + 4) * HIDDEN  # tokens; six projections take the hidden size, one four times that
    assert per_sample[1] - per_sample[0] >= 4 * inputs


def test_the_linear_layer_of_zero_3_is_torchs_but_for_what_it_keeps() -> None:
    values, bias = torch.randn(2, 3, 4, requires_grad=True), torch.randn(5, requires_grad=True)
    weight = torch.randn(5, 4)
    usual = torch.nn.functional.linear
    with inputs_kept():
        made = torch.nn.functional.linear(values, weight, bias)
        flat = torch.nn.functional.linear(values[0], weight.requires_grad_(), bias)
    assert torch.nn.functional.linear is usual
    assert any(kept is values for kept in made.grad_fn.saved_tensors)  # type: ignore[union-attr]
    assert torch.allclose(made, usual(values, weight, bias)) and torch.allclose(flat, made[0])
    ours = torch.autograd.grad(flat.square().sum(), (values, weight, bias))
    assert all(map(torch.allclose, ours, torch.autograd.grad(usual(values[0], weight, bias).square().sum(), (values, weight, bias))))
    deep = torch.autograd.grad(made.square().sum(), (values, bias))
    assert all(map(torch.allclose, deep, torch.autograd.grad(usual(values, weight, bias).square().sum(), (values, bias))))


def test_a_process_group_that_is_up_is_put_back() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    hook = sys.excepthook
    try:
        with fake_world(WORLD):
            assert dist.get_world_size() == WORLD
        assert dist.get_world_size() == 2 and sys.excepthook is hook
    finally:
        dist.destroy_process_group()


def test_what_torch_says_of_the_units_is_told_as_the_engines_own() -> None:
    from hfopt.trace.fsdp import refusal

    shared = TraceError("the model cannot be traced: aten::add in the model: Parameter 'a' is shared")
    shared.__cause__ = ValueError("Parameter 'a' is shared with a parameter already managed by another FSDP group. Do this")
    told = refusal(shared, "BertForMaskedLM")
    assert str(told).startswith("FSDP2 cannot shard BertForMaskedLM") and str(told).endswith("by another FSDP group")
    assert told.hint == "plan with another --engine"
    own = TraceError("the model cannot be traced: aten::item")
    assert refusal(own, "Mine") is own


def gathered_blocks(made: Estimate) -> list[int]:
    """Sizes of what the second step gathers."""
    timeline = made.curve.timeline
    named = [timeline.places[place].op == "all_gather" for place in timeline.place_of.tolist()]
    events = list(zip(timeline.sizes(2), named, timeline.is_free.tolist(), strict=True))
    return [size for size, found, freed in events[timeline.marks["step_1"] :] if found and not freed]


def test_zero_3_gathers_several_weights_at_once_where_the_bucket_has_room() -> None:
    sizes = (1, 8 * HIDDEN**2)
    single, several = (traced(Sharding(engine="zero3", world_size=WORLD, zero=replace(ZERO, prefetch_bucket=size))) for size in sizes)
    assert held(several, "weights", after="step_1") == held(single, "weights", after="step_1")  # all are given back
    weights = {2 * size for size in (HIDDEN**2, 4 * HIDDEN**2, HIDDEN * VOCABULARY)}
    assert set(gathered_blocks(single)) == weights  # each alone
    flights = set(gathered_blocks(several)) - weights
    assert flights and all(2 * HIDDEN**2 < size <= 2 * 12 * HIDDEN**2 for size in flights)


def test_zero_3_offload_leaves_weights_and_states_on_the_host() -> None:
    shard = traced(Sharding(engine="zero3", world_size=WORLD, offload_parameters=True, offload_optimizer=True, zero=ZERO))
    small = 2 * HIDDEN * (2 * LAYERS + 1)  # norms are never divided
    assert held(shard, "weights", after="step_1") == pytest.approx(small, abs=4096)
    assert held(shard, "optimizer", after="step_1") < 1000
    assert any(place.op == "to_host" for place in shard.curve.timeline.places)
