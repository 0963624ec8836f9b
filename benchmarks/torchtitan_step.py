"""torchtitan's own training step of Llama 3.1 8B, traced: its FSDP2 units, its selective checkpointing and its loss.

One FSDP unit per block (the last keeps its weights), all else in the root; weights gathered in bfloat16, gradients reduced in float32;
of the matrix products of a block each second one is recomputed, attention is kept; cross entropy over float32 logits; fused AdamW.
The model is transformers' Llama of the same sizes: torchtitan's own rotates with complex numbers, which takes more inside a block.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hfopt.memory.allocator import AllocatorOptions
from hfopt.memory.curve import MemoryCurve
from hfopt.memory.layer_extrapolation import DEEP, SHALLOW, DepthCurve, share_of
from hfopt.memory.timeline import alone
from hfopt.model.from_config import from_spec
from hfopt.schema import DataSpec, MemoryPeak, ModelSpec, Workload
from hfopt.trace.events import Kernels
from hfopt.trace.fsdp import ShardRecorder, fake_world, local
from hfopt.trace.tracer import Tracer, TraceSession

LAYERS, LENGTH, BATCH, VOCABULARY = 32, 8192, 2, 128_256
KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}


def selective() -> Any:
    """Keeps attention and each first of two matrix products; the count starts over in each block and in its recomputation."""
    products: dict[bool, int] = defaultdict(int)

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if op == torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def sharded(workload: Workload, mesh: Any) -> Any:
    model = workload.build_model().train()
    model.config.use_cache = False
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    blocks = model.model.layers
    for number, block in enumerate(blocks):
        blocks[number] = checkpoint_wrapper(block, context_fn=selective, preserve_rng_state=False)
        fully_shard(blocks[number], reshard_after_forward=number < len(blocks) - 1, **options)
    return fully_shard(model, reshard_after_forward=True, **options)


def step(session: TraceSession) -> None:
    model, recorder = session.model, session.recorder
    pairs = [(parameter, local(parameter)) for parameter in model.parameters()]
    optimizer = torch.optim.AdamW([shard for _, shard in pairs], lr=3e-4, fused=True)
    for _ in range(2):
        batch = session.to_device()
        with session.phase("forward"):
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(0, 1))
            del logits
        with session.phase("backward"):
            loss.backward()
        with session.phase("optimizer"):
            for parameter, shard in pairs:
                shard.grad = local(parameter.grad)
            torch.nn.utils.clip_grad_norm_([shard for _, shard in pairs], 1.0, foreach=True)
            optimizer.step()
            model.zero_grad()
            for _, shard in pairs:
                shard.grad = None
    recorder.recording = False


def curve(world: int, layers: int) -> MemoryCurve:
    spec = ModelSpec(name="meta-llama/Llama-3.1-8B", weights_dtype="float32", overrides={"num_hidden_layers": layers})
    workload = from_spec(spec, DataSpec(max_length=LENGTH))

    def batch(size: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(size, LENGTH, dtype=torch.long)
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}  # all ones: causal, no mask is made

    with fake_world(world) as mesh:
        tracer = Tracer(lambda: sharded(workload, mesh), batch, Kernels(capability=(8, 0), multiprocessors=132), recorder=ShardRecorder)
        tracer.record(step, 1)
        return MemoryCurve(alone(tracer.record(step, BATCH)), 0)


def peak(world: int) -> MemoryPeak:
    """Per rank, at local batch 2; torchtitan's run_train.sh turns expandable segments on."""
    shallow, deep = curve(world, SHALLOW), curve(world, DEEP)
    return DepthCurve(deep.timeline, 0, shallow=shallow, deep=deep, share=share_of(LAYERS)).peak(
        BATCH, AllocatorOptions(expandable_segments=True)
    )
