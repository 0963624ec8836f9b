"""A transformer of equal blocks by arithmetic alone, and the first answer it gives before torch is imported.

Its parameters, the most a step of it can take, and a checkpointed step, roughly. The first answer says that a job cannot fit, certainly
fits, or is open. The least: the published parameters of a known model (`model/architectures.jsonl`), each with its weight, its gradient
and the states of its optimizer; what does not fit by this fits by no estimate. The most: a model of equal blocks. Adapters, packed or
frozen weights and several devices are open, and so is a model that is not in the table.

What cannot fit is answered whole without torch, where the model is a decoder that counting understands: `counted_workload` stands in for
the model, and the remedies are priced by the same formulas (`nothing_fits`). What else is asked of it builds the model after all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from hfopt.facts.argument_effects import TORCH_ADAM
from hfopt.memory.layer_extrapolation import RoughStep
from hfopt.memory.step_memory import ParameterCount, TrainedTensors, context_bytes
from hfopt.model.known_models import Architecture, find
from hfopt.schema import (
    BatchShape,
    BlockSizes,
    ConfigFacts,
    Hardware,
    Lora,
    ModelSpec,
    OpCost,
    Quantization,
    StepSettings,
    TrainJob,
    Workload,
)
from hfopt.units import GIB, format_bytes

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


_ELEMENTS_OF_WIDTH, _ELEMENTS_OF_INNER, _MATRICES = 24, 8, 4  # that a block keeps of a token: more than any that was traced
_FRAGMENTS, _CONTEXT_BYTES = 1.15, int(1.5 * GIB)


def most_bytes(sizes: BlockSizes, *, tokens: int, length: int, states: int) -> int:
    """More than any step of a whole model takes, whatever its precision, attention and checkpointing: everything in float32, attention
    matrices whole, logits in every copy. `states`: of the optimizer, for each weight."""
    held = 4 * sizes.parameters * (4 + states)  # weights, their 16-bit copy, gradients twice over, the update's temporaries
    block = _ELEMENTS_OF_WIDTH * sizes.width + _ELEMENTS_OF_INNER * sizes.inner + _MATRICES * sizes.heads * length
    return int(_FRAGMENTS * (held + 4 * tokens * (sizes.layers * block + 5 * sizes.vocabulary))) + _CONTEXT_BYTES


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


_HALF = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16"}
_PARTS = ("vision_config", "audio_config", "experts")  # of a config whose parts may get no gradient
_ROUNDED = 0.98  # of a count that is published as '8B': at the least


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstAnswer:
    verdict: Literal["impossible", "fits", "open"]
    words: str


def first_answer(job: TrainJob, hardware: Hardware, headroom: float) -> FirstAnswer | None:
    """None where there is no card, whose memory would be asked for."""
    gpu = hardware.smallest
    if gpu is None:
        return None
    room, entry = budget_bytes(gpu.available_bytes, headroom), find(job.model.name or "")
    usable = f"{format_bytes(room)} usable"
    if entry is None or job.model.overrides or _is_divided(job):
        return FirstAnswer(verdict="open", words=f"Open: what a step takes of {usable} is traced now")
    held, what = _least(job, entry)
    least = f"at least {format_bytes(held)} ({what}), {usable}"
    if held > room:
        return FirstAnswer(verdict="impossible", words=f"Cannot fit as it is: {least}")
    most = _most(job, entry)
    if most is not None and most <= room:
        words = f"Certainly fits: at most {format_bytes(most)} by counting, {usable}; looking for faster settings"
        return FirstAnswer(verdict="fits", words=words)
    return FirstAnswer(verdict="open", words=f"Open: {least}; tracing the rest")


def _least(job: TrainJob, entry: Architecture) -> tuple[int, str]:
    """Of a model that trains in parts the weights alone: the rest is not counted here."""
    count = int(entry.parameters * (_ROUNDED if entry.rounded else 1.0))
    packing = job.model.quantization
    if packing is not None:
        return count * packing.bits // 8, f"{packing.bits}-bit weights"
    weights = count * (2 if _stored(job.model, entry) in _HALF else 4)
    if not _trains_whole(job, entry):
        return weights, "weights"
    return (4 * weights, "weights, gradients, AdamW's states") if job.settings.optim in TORCH_ADAM else (2 * weights, "weights, gradients")


def _most(job: TrainJob, entry: Architecture) -> int | None:
    sizes, length = block_sizes(entry), job.data.max_length
    plain = job.trainer == "Trainer" and job.settings.optim in TORCH_ADAM and not job.data.lengths and not job.settings.torch_compile
    if sizes is None or length is None or not plain or not _trains_whole(job, entry):
        return None
    return most_bytes(sizes, tokens=job.per_device_batch * length, length=length, states=2)


def counted_workload(job: TrainJob, remake: Callable[[], Workload]) -> Workload | None:
    """The facts of a decoder as planning reads them, the model itself only on demand; None where counting does not understand it."""
    entry = find(job.model.name or "")
    sizes = None if entry is None or not _trains_whole(job, entry) else block_sizes(entry)
    if entry is None or sizes is None or not sizes.gated or job.trainer != "Trainer" or job.data.max_length is None or job.data.lengths:
        return None
    (head,) = entry.config.get("architectures") or [""]
    stored = _HALF.get(_stored(job.model, entry))
    if not head.endswith("ForCausalLM") or job.model.task not in (None, "causal_lm") or stored is None or job.model.like is not None:
        return None
    length = job.data.max_length

    def with_layers(layers: int) -> Workload | None:
        own = remake().with_layers
        return None if own is None else own(layers)

    return Workload(
        name=entry.hub_id,
        model_class=head,
        task="causal_lm",
        build_model=lambda: remake().build_model(),
        make_batch=lambda size: remake().make_batch(size),
        shape=BatchShape(kind="text", length=length),
        parameters=entry.parameters,
        trainable_parameters=entry.parameters,
        layers=sizes.layers,
        tokens_per_sample=length,
        weights_dtype=stored,
        checkpoint_dtype=str(entry.config.get("torch_dtype") or entry.config.get("dtype") or "float32"),
        with_layers=with_layers,
        facts=_facts(entry.config),
        blocks=sizes,
        remake=remake,
    )


def _facts(config: Any) -> ConfigFacts:
    return ConfigFacts(
        model_type=config["model_type"],
        hidden_size=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        key_value_heads=config.get("num_key_value_heads"),
        head_size=config.get("head_dim"),
        width=config["hidden_size"],
        vocabulary=config["vocab_size"],
        tied_head=bool(config.get("tie_word_embeddings", False)),
    )


def _stored(model: ModelSpec, entry: Architecture) -> str:
    """What the weights are held in; where the installed transformers widens them unasked, that is more, and this a bound."""
    return model.stored_in(entry.config.get("torch_dtype") or entry.config.get("dtype"))


def _trains_whole(job: TrainJob, entry: Architecture) -> bool:
    """On one device, every weight of it."""
    model = job.model
    changed = (model.lora, model.quantization, model.frozen, model.frozen_parts, model.overrides, model.last_layers)
    return not any(changed) and not _is_divided(job) and not any(key.endswith(_PARTS) for key in entry.config)


def _is_divided(job: TrainJob) -> bool:
    engine = job.settings.engine
    return job.world_size > 1 or engine.deepspeed is not None or engine.fsdp is not None


def budget_bytes(free_bytes: int, headroom: float) -> int:
    """What may be planned with: the free memory less a share kept for what no estimate sees (longer samples, other processes)."""
    if not 0 <= headroom < 1:
        raise ValueError(f"headroom is a share between 0 and 1, not {headroom}")
    return int(free_bytes * (1 - headroom))
