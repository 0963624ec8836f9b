"""Estimates the plain fp32 training loop of the xMem study: reads rows as JSON on stdin, prints an estimate for each.

The loop, as stated with the data: `outputs = model(**batch); outputs.loss.backward(); optimizer.step()`, no autocast, no clipping;
outputs, loss and batch live until the next iteration overwrites them. Run with
transformers 4.51.3, whose modelling code the rows were measured with. A `precision` column (bf16, fp16) adds autocast around the forward.

Batches are padded to their longest sample and cut, so small ones are sometimes shorter, and lengths that vary fragment the allocator. Which
lengths came is not recorded: the estimate is the mean over drawn ones (`used_mib`), beside that of full batches only (`full_mib`).
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hfopt.errors import TraceError
from hfopt.memory.allocator import AllocatorOptions, CachingAllocator
from hfopt.memory.curve import MemoryCurve, Replay, replay_events
from hfopt.memory.real_steps import VaryingLengths, shortened, shorter_length, varying
from hfopt.memory.step_memory import LOADED_KERNELS_BYTES, TRACED_BATCHES, context_bytes
from hfopt.memory.timeline import Timeline, combine
from hfopt.model.known_models import architectures
from hfopt.schema import LengthSpread
from hfopt.trace.events import Kernels, Trace
from hfopt.trace.tracer import Tracer, TraceSession
from hfopt.units import MIB

ITERATIONS = 4
CUT_SHARE = 0.25
"""Of the samples that reach the cut; the others are spread evenly below it. Not published: how many runs with a small batch deviate from
full batches is most likely with 0.21 (all deviations) to 0.28 (those above the estimate)."""
DRAWS, SEED = 16, 7
TORCH = (2, 6)  # what the rows were measured with
OPTIONS = AllocatorOptions(torch_version=TORCH)
CARDS = {"RTX 3060": ((8, 6), 28), "RTX 4060": ((8, 9), 24), "A100-SXM4-40GB": ((8, 0), 108)}
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
UNKNOWN_CARD = ((8, 6), 28)

# as stated with the data; other models come from the bundled table by the last part of their name
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt-neo-125m": {
        "model_type": "gpt_neo",
        "hidden_size": 768,
        "num_layers": 12,
        "num_heads": 12,
        "attention_types": [[["global", "local"], 6]],
        "max_position_embeddings": 2048,
        "attention_dropout": 0,
        "embed_dropout": 0,
        "resid_dropout": 0,
    },
    "cerebras-gpt-111m": {
        "model_type": "gpt2",
        "n_layer": 10,
        "n_embd": 768,
        "n_head": 12,
        "n_inner": 3072,
        "n_positions": 2048,
        "activation_function": "gelu",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "distilgpt2": {"model_type": "gpt2", "n_layer": 6},
    "t5-small": {"model_type": "t5", "d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "decoder_start_token_id": 0},
    "t5-base": {"model_type": "t5", "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0},
    "opt-125m": {"model_type": "opt"},
    "qwen3-4b": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
}


def config_of(name: str) -> Any:
    fields = ARCHITECTURES.get(name.lower())
    if fields is None:
        entries = [entry for entry in architectures() if entry.hub_id.lower().rpartition("/")[2] == name.lower()]
        if not entries:
            raise SystemExit(f"{name}: not among the stated architectures nor in the bundled table")
        fields = dict(entries[0].config)
    fields = {key: value for key, value in fields.items() if key not in ("torch_dtype", "dtype", "architectures", "transformers_version")}
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def make_batch(config: Any, length: int) -> Callable[[int], dict[str, torch.Tensor]]:
    def batch(size: int) -> dict[str, torch.Tensor]:
        ids = torch.ones(size, length, dtype=torch.long)
        mask = torch.ones_like(ids)
        mask[0, length // 2 :] = 0  # the mask has padding: shortcuts for full masks are not taken
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}

    return batch


def make_optimizer(name: str, parameters: Any) -> Any:
    if name == "Adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(parameters, lr=1e-3, relative_step=False)
    return getattr(torch.optim, name)(parameters, lr=1e-3, foreach=True)


def loop(optimizer_name: str, zero_grad: str, precision: str = "fp32") -> Callable[[TraceSession], None]:
    def script(session: TraceSession) -> None:
        optimizer = make_optimizer(optimizer_name, session.model.parameters())
        scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
        autocast = torch.autocast("cpu", dtype=AUTOCAST.get(precision), enabled=precision in AUTOCAST)
        for step in range(ITERATIONS):
            session.recorder.mark(f"step_{step}")
            batch = session.to_device()
            if zero_grad == "iteration_start":
                optimizer.zero_grad()
            with session.phase("forward"), autocast:
                outputs = session.model(**batch)
                loss = outputs.loss
            if zero_grad == "before_backward":
                optimizer.zero_grad()
            with session.phase("backward"):
                scaler.scale(loss).backward()
            with session.phase("optimizer"):
                scaler.step(optimizer)
                scaler.update()
            if zero_grad == "after_step":
                optimizer.zero_grad()
        session.recorder.mark("end")

    return script


class Curves:
    """One trace pair per kind of run; rows that differ in the batch size alone share it."""

    def __init__(self) -> None:
        self._curves: dict[tuple[Any, ...], MemoryCurve] = {}

    def get(self, row: dict[str, Any]) -> MemoryCurve:
        capability, multiprocessors = CARDS.get(row["gpu"], UNKNOWN_CARD)
        precision = row.get("precision") or "fp32"
        key = (row["model"], row["seq_len"], row["optimizer"], row["zero_grad"], row["attn"], capability, precision)
        if key not in self._curves:
            config = config_of(row["model"])
            kind = AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else AutoModelForCausalLM
            tracer = Tracer(
                lambda: kind.from_config(config, attn_implementation=row["attn"]).train(),
                make_batch(config, int(row["seq_len"])),
                Kernels(capability=capability, multiprocessors=multiprocessors, torch_version=TORCH),
            )
            script = loop(row["optimizer"], row["zero_grad"], precision)
            first, second = (tracer.record(script, batch) for batch in TRACED_BATCHES)
            timeline = combine(first, second)
            self._curves[key] = MemoryCurve(timeline, 0, _varying(tracer, script, timeline, first, int(row["seq_len"])))
        return self._curves[key]


def _varying(
    tracer: Tracer, script: Callable[[TraceSession], None], timeline: Timeline, full: Trace, longest: int
) -> VaryingLengths | None:
    """None where a shorter batch is not the same sequence of events, or the batches are too short to be any shorter."""
    length = shorter_length(longest)
    if length is None:
        return None
    spread = LengthSpread(longest=longest, lengths=tuple(sorted(sample_lengths(longest))))
    try:
        short = tracer.record(script, full.batch, change=lambda batch: shortened(batch, longest, length))
        return varying(timeline, full, short, spread, length)
    except TraceError:
        return None


def sample_lengths(longest: int) -> list[int]:
    """A hundred samples: those at the cut, and those evenly below it."""
    below = round(100 * (1 - CUT_SHARE))
    return [longest] * (100 - below) + [1 + round((longest - 2) * number / (below - 1)) for number in range(below)]


def full_batches(curve: MemoryCurve, batch: int, room: int | None) -> Replay:
    events = zip(curve.timeline.blocks.tolist(), curve.timeline.sizes(batch), strict=True)
    return replay_events(curve.timeline, events, CachingAllocator(OPTIONS, capacity_bytes=room))


def drawn_batches(curve: MemoryCurve, batch: int, room: int) -> float | None:
    """Reserved bytes, the mean over drawn lengths; None where only full batches can be replayed."""
    if curve.varying is None:
        return None
    samples, dice, found = sample_lengths(curve.varying.spread.longest), random.Random(SEED), []
    for _ in range(DRAWS):
        lengths = [max(dice.choices(samples, k=batch)) for _ in range(ITERATIONS)]
        allocator = CachingAllocator(OPTIONS, capacity_bytes=room)
        found.append(replay_events(curve.timeline, curve.varying.events(batch, lengths), allocator).reserved_bytes)
    return fmean(found)


def main() -> None:
    curves = Curves()
    for line in sys.stdin:
        row = json.loads(line)
        began = time.perf_counter()
        curve = curves.get(row)
        batch, total = int(row["batch_size"]), float(row["gpu_total_mib"])
        capability, multiprocessors = CARDS.get(row["gpu"], UNKNOWN_CARD)
        room = int(total * MIB) - context_bytes(capability, multiprocessors=multiprocessors)
        free, capped = full_batches(curve, batch, None), full_batches(curve, batch, room)
        drawn = drawn_batches(curve, batch, room) if capped.fits else None
        answer = {
            "allocated_mib": free.allocated_bytes / MIB,
            "reserved_mib": free.reserved_bytes / MIB,
            "used_mib": ((drawn or capped.reserved_bytes) + LOADED_KERNELS_BYTES) / MIB,
            "full_mib": (capped.reserved_bytes + LOADED_KERNELS_BYTES) / MIB,
            "fits": capped.fits,
            "seconds": time.perf_counter() - began,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
