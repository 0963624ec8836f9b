"""A transformer of equal blocks by arithmetic alone: its parameters, the most a step of it can take, and a checkpointed step, roughly.

For what must be said before torch is imported. A model of the table counts as understood where the matrices of its blocks, its embedding
and its head come to the published number of parameters, less two thousandths for norms and biases: experts, second towers and
convolutions do not. Of a checkpointed step with 16-bit weights:

    at the loss:    the input of every block, and of the logits (tokens × vocabulary) their 16-bit values, float32 copies, and a gradient
    in a block:     the inputs of the blocks below, and what the one that is computed again holds

Gradients stand beside both where batches are accumulated. On packed weights (QLoRA) peft makes all that is not packed float32, and the
head is multiplied by a 16-bit copy of its weights. Kernels are the matrix products, attention, and the bytes that norms, rotations,
residuals and the adapter's casts pass, counted off modeling_llama.py and peft's `lora.Linear`.

Compared with rough steps of traces (Llama-3.1-8B, Qwen2.5-7B; whole, LoRA and QLoRA) the device's bytes are within 5 % and the operations
within 6 % (tests/memory/test_counted_step.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from hfopt.memory.rough_estimate import ParameterCount, RoughStep, TrainedTensors
from hfopt.memory.step_memory import context_bytes
from hfopt.model.known_models import Architecture
from hfopt.schema import BlockSizes, Lora, ModelSpec, OpCost, Quantization, StepSettings
from hfopt.units import GIB

SMALL_SHARE = 0.002  # of the parameters: norms and biases
_GATED = ("silu", "swiglu", "swish")
_ABSMAX_BYTES = 4 / 64  # bitsandbytes keeps a float32 for each 64 packed weights


def block_sizes(entry: Architecture) -> BlockSizes | None:
    """None where the published count is not that of equal blocks."""
    config = entry.config
    needed = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    found = [config.get(name) for name in needed]
    if entry.rounded or not all(isinstance(value, int) and value > 0 for value in found):
        return None
    layers, width, inner, heads, vocabulary = (int(value) for value in found if value is not None)
    head_size = config.get("head_dim") or width // heads
    sizes = BlockSizes(
        layers=layers,
        width=width,
        inner=inner,
        gated=config.get("hidden_act") in _GATED or "gelu_pytorch_tanh" in (config.get("hidden_act"), config.get("hidden_activation")),
        heads=heads,
        query_width=heads * head_size,
        key_value_width=int(config.get("num_key_value_heads") or heads) * head_size,
        vocabulary=vocabulary,
        tied=entry.counts == "base" or bool(config.get("tie_word_embeddings", False)),
        parameters=entry.parameters,
    )
    others = entry.parameters - sizes.matrix_elements
    beside = (0, width * int(config.get("max_position_embeddings") or 0))  # a table of places
    pooled = (0, width * width) if entry.counts == "base" else (0,)
    equal = any(0 <= others - table - pooler <= SMALL_SHARE * entry.parameters for table in beside for pooler in pooled)
    return sizes if equal and not config.get("relative_attention") else None  # DeBERTa attends three times over


# ------------------------------------------------------------------------------------------------- the most a step can take

_ELEMENTS_OF_WIDTH, _ELEMENTS_OF_INNER, _MATRICES = 24, 8, 4  # that a block keeps of a token: more than any that was traced
_FRAGMENTS, _CONTEXT_BYTES = 1.15, int(1.5 * GIB)


def most_bytes(sizes: BlockSizes, *, tokens: int, length: int, states: int) -> int:
    """More than any step of a whole model takes, whatever its precision, attention and checkpointing: everything in float32, attention
    matrices whole, logits in every copy. `states`: of the optimizer, for each weight."""
    held = 4 * sizes.parameters * (4 + states)  # weights, their 16-bit copy, gradients twice over, the update's temporaries
    block = _ELEMENTS_OF_WIDTH * sizes.width + _ELEMENTS_OF_INNER * sizes.inner + _MATRICES * sizes.heads * length
    return int(_FRAGMENTS * (held + 4 * tokens * (sizes.layers * block + 5 * sizes.vocabulary))) + _CONTEXT_BYTES


# ------------------------------------------------------------------------------------------------- a rough step


def counted_parameters(sizes: BlockSizes, lora: Lora | None = None, packing: Quantization | None = None) -> ParameterCount:
    """With 16-bit weights, or packed ones below an adapter."""
    blocks, rest = sizes.layers * sizes.block_elements, sizes.parameters - sizes.layers * sizes.block_elements
    whole = 2 * sizes.parameters if packing is None else int(blocks * (packing.bits / 8 + _ABSMAX_BYTES)) + 4 * rest
    if lora is None:
        each = [(sizes.layers, i * o, 2, False, True) for i, o in sizes.linears]
        each.append((1 if sizes.tied else 2, sizes.vocabulary * sizes.width, 2, True, True))
        each.append((2 * sizes.layers + 1, max(1, sizes.parameters - sizes.matrix_elements) // (2 * sizes.layers + 1), 2, False, False))
        added = 0
    else:
        each = [(sizes.layers, lora.r * size, 4, False, True) for linear in sizes.linears for size in linear]
        added = sum(count * size for count, size, *_ in each)
    trained = tuple(TrainedTensors(count=n, elements=size, element_bytes=w, embedding=e, decays=d) for n, size, w, e, d in each)
    return ParameterCount(weights_bytes=whole + 4 * added, elements=sizes.parameters + added, trained=trained)


def counted_step(sizes: BlockSizes, model: ModelSpec, settings: StepSettings, *, batch: int, length: int) -> RoughStep | None:
    """None for what the formulas are not for: weights or precisions of 32 bits, blocks that are kept, other adapters."""
    plain = settings.precision in ("bf16", "fp16") and settings.checkpointing.every_n_layers == 1 and not settings.torch_compile
    lora = model.lora
    if not plain or (model.quantization is not None and lora is None) or (lora is not None and not _on_all_linears(lora)):
        return None
    count = counted_parameters(sizes, lora, model.quantization)
    tokens, wide = batch * length, 4 if model.quantization is not None else 2
    inputs = sizes.layers * tokens * sizes.width * wide
    logits = 0 if settings.fused_loss else 12 * tokens * sizes.vocabulary
    head = 2 * sizes.vocabulary * sizes.width if model.quantization is not None else 0
    block = tokens * wide * sum(inner + outer for inner, outer in sizes.linears)
    activations = inputs + max(logits + head, block) + 4 * tokens * sizes.width * wide
    gradients = count.trained_bytes
    together = settings.accumulation > 1
    return RoughStep(
        count=count,
        above_bytes=activations + gradients if together else max(activations, gradients + block),
        activations_bytes=activations,
        cached_bytes=max(logits // 3, block // 2),
        context_bytes=context_bytes(settings.capability, multiprocessors=settings.multiprocessors),
        ops=tuple(_kernels(sizes, model, count, tokens=length)),
    )


def _on_all_linears(lora: Lora) -> bool:
    return lora.target_modules == "all-linear" and not lora.use_dora and not lora.modules_to_save


Phase = Literal["forward", "backward", "optimizer"]
_NORMS, _ROTATION, _RESIDUALS, _GATE = 68, 16, 12, 10  # bytes that pass for an element of a token, in a forward
_ADAPTER_INPUT, _ADAPTER_OUTPUT = 12, 10
_LOSS, _LOSS_BACKWARD = 20, 30  # for each logit
_UPDATE = 13  # passes over all weights: AdamW's states, and the norm of the gradients


def _kernels(sizes: BlockSizes, model: ModelSpec, count: ParameterCount, *, tokens: int) -> Iterator[OpCost]:
    """`tokens` of one sample: kernels grow with the batch."""
    lora, packing = model.lora, model.quantization
    pairs = list(sizes.linears)
    whole = 1 if lora is None else 0  # the gradient of the weights themselves
    for phase, repeats in (("forward", 1), ("backward", 2 + whole)):  # computed again, and once or twice for the gradients
        yield from (_matmul(phase, sizes.layers * repeats, tokens, inner, outer) for inner, outer in pairs[:-1])
        last = repeats - whole if phase == "backward" else repeats  # its result is needed again by an adapter alone
        yield _matmul(phase, sizes.layers * last, tokens, *pairs[-1])
        yield _matmul(phase, repeats - (phase == "backward"), tokens, sizes.width, sizes.vocabulary)
        if lora is not None:
            ways = 1 if phase == "forward" else 3
            yield from (_matmul(phase, sizes.layers * ways, tokens, size, lora.r) for pair in pairs for size in pair)
    passed = (_NORMS + _ROTATION + _RESIDUALS) * sizes.width + _GATE * sizes.inner
    if lora is not None:
        passed += sum(_ADAPTER_INPUT * inner + _ADAPTER_OUTPUT * outer for inner, outer in pairs)
    if packing is not None:
        passed *= 2  # float32 between the blocks
    unpacked = 0.0 if packing is None else sizes.block_elements * (packing.bits / 8 + _ABSMAX_BYTES + 2)
    square = 4 * tokens * tokens * sizes.query_width
    for phase, times, loss in (("forward", 1, _LOSS), ("backward", 3 if lora is None else 2.5, _LOSS_BACKWARD)):
        attended = 1.0 if phase == "forward" else 3.5
        yield _kernel("attention", phase, sizes.layers, flops=square * attended, size=8 * tokens * sizes.query_width * attended)
        yield _kernel("elementwise", phase, 25 * sizes.layers * times, size=tokens * passed / 25)
        yield _kernel("elementwise", phase, 1, size=tokens * loss * sizes.vocabulary)
        if packing is not None:
            yield _kernel("copy", phase, len(pairs) * sizes.layers * (1 if phase == "forward" else 2), fixed=unpacked / len(pairs))
    yield _kernel("optimizer", "optimizer", 1, fixed=_UPDATE * count.trained_bytes)


def _matmul(phase: Any, count: float, tokens: int, inner: int, outer: int) -> OpCost:
    shape = ((0, tokens), (outer, 0), (inner, 0), (1, 0))
    flops, moved = 2 * tokens * inner * outer, 2 * tokens * (inner + outer)
    return _kernel("matmul", phase, count, flops=flops, size=moved, fixed=2 * inner * outer, shape=shape)


def _kernel(
    kind: Any, phase: Any, count: float, *, flops: float = 0.0, size: float = 0.0, fixed: float = 0.0, shape: tuple[Any, ...] = ()
) -> OpCost:
    return OpCost(
        name=kind,
        kind=kind,
        dtype="bfloat16",
        phase=phase,
        count=count,
        flops_constant=0.0,
        flops_slope=flops,
        bytes_constant=fixed,
        bytes_slope=size,
        shape=shape,
    )
