"""Estimates the plain fp32 training loop of the xMem study: reads rows as JSON on stdin, prints an estimate for each.

The loop, as stated with the data: `outputs = model(**batch); outputs.loss.backward(); optimizer.step()`, no autocast, no clipping;
outputs, loss and batch live until the next iteration overwrites them. Run with
transformers 4.51.3, whose modelling code the rows were measured with.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hfopt.estimate.allocator_options import AllocatorOptions
from hfopt.estimate.context import LOADED_KERNELS_BYTES, context_bytes
from hfopt.estimate.kernels import Kernels
from hfopt.estimate.memory import TRACED_BATCHES, MemoryCurve
from hfopt.estimate.session import Session, Tracer
from hfopt.estimate.timeline import combine
from hfopt.units import MIB
from hfopt.workload.table import architectures

ITERATIONS = 4
TORCH = (2, 6)  # what the rows were measured with
CARDS = {"RTX 3060": ((8, 6), 28), "RTX 4060": ((8, 9), 24), "A100-SXM4-40GB": ((8, 0), 108)}
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


def loop(optimizer_name: str, zero_grad: str) -> Callable[[Session], None]:
    def script(session: Session) -> None:
        optimizer = make_optimizer(optimizer_name, session.model.parameters())
        for step in range(ITERATIONS):
            session.recorder.mark(f"step_{step}")
            batch = session.to_device()
            if zero_grad == "iteration_start":
                optimizer.zero_grad()
            with session.phase("forward"):
                outputs = session.model(**batch)
                loss = outputs.loss
            if zero_grad == "before_backward":
                optimizer.zero_grad()
            with session.phase("backward"):
                loss.backward()
            with session.phase("optimizer"):
                optimizer.step()
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
        key = (row["model"], row["seq_len"], row["optimizer"], row["zero_grad"], row["attn"], capability)
        if key not in self._curves:
            config = config_of(row["model"])
            kind = AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else AutoModelForCausalLM
            tracer = Tracer(
                lambda: kind.from_config(config, attn_implementation=row["attn"]).train(),
                make_batch(config, int(row["seq_len"])),
                Kernels(capability=capability, multiprocessors=multiprocessors, torch_version=TORCH),
            )
            script = loop(row["optimizer"], row["zero_grad"])
            self._curves[key] = MemoryCurve(combine(*(tracer.record(script, batch) for batch in TRACED_BATCHES)), 0)
        return self._curves[key]


def main() -> None:
    curves = Curves()
    for line in sys.stdin:
        row = json.loads(line)
        began = time.perf_counter()
        curve = curves.get(row)
        batch, total = int(row["batch_size"]), float(row["gpu_total_mib"])
        capability, multiprocessors = CARDS.get(row["gpu"], UNKNOWN_CARD)
        room = int(total * MIB) - context_bytes(capability, multiprocessors=multiprocessors)
        options = AllocatorOptions(torch_version=TORCH)
        free, capped = curve.replay(batch, options), curve.replay(batch, options, capacity_bytes=room)
        answer = {
            "allocated_mib": free.allocated_bytes / MIB,
            "reserved_mib": free.reserved_bytes / MIB,
            "used_mib": (capped.reserved_bytes + LOADED_KERNELS_BYTES) / MIB,
            "fits": capped.fits,
            "seconds": time.perf_counter() - began,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
