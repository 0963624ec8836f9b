"""The memory of one rank against PyTorch's own allocator: DDP, FSDP2 and ZeRO under the Trainer on virtual cards, and published runs.

usage: python benchmarks/sharded_memory.py [--only NAME] [--published]

Each case is a whole Trainer run of three steps under torchrun, with as many virtual cards as ranks; DeepSpeed's cases run where it can
be imported. The published rows are torchtitan's and torchtune's own figures; see `torchtitan_step.py` and `torchtune_peak` for what is
traced in their place. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from hfopt.config.settings import sharding_of, step_settings, trainer_settings
from hfopt.hardware.catalog import find
from hfopt.memory.step_memory import estimate
from hfopt.model.from_config import from_spec
from hfopt.planner.engines import BOTH_BACKENDS, deepspeed_config, named_engine
from hfopt.schema import Checkpointing, DataSpec, Lora, MemoryPeak, ModelSpec, Sharding, StepSettings
from hfopt.units import GIB, MIB
from hfopt.virtual.environment import environment

WORKER = Path(__file__).parent / "sharded_worker.py"
TORCHTITAN_GIB = {8: 82.4, 128: 67.0}  # ranks: GiB; torchtitan benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, without compile
TORCHTUNE_GIB = 27.6  # torchtune README, memory and training speed (bd2a0fc)
CARD = "A100 SXM 80GB"
SMALL = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
TIED = {**SMALL, "tie_word_embeddings": True}
WIDE = {**SMALL, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 6, "tie_word_embeddings": True}
FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
KEEP = {"fsdp": True, "fsdp_config": {**FSDP["fsdp_config"], "reshard_after_forward": False}}  # type: ignore[dict-item]
RECOMPUTED = {"fsdp": True, "fsdp_config": {**FSDP["fsdp_config"], "activation_checkpointing": True}}  # type: ignore[dict-item]
STATES_ON_HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
SYNC = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
OFFLOAD = {"fsdp": True, "fsdp_config": {**FSDP["fsdp_config"], "cpu_offload": True}, "ddp_backend": BOTH_BACKENDS}  # type: ignore[dict-item]
ZERO_2, ZERO_3, OFFLOAD_2, OFFLOAD_3 = (
    {"deepspeed": deepspeed_config(named_engine(name))} for name in ("zero2", "zero3", "zero2-offload", "zero3-offload")
)
STATES_3 = {"deepspeed": {**ZERO_3["deepspeed"], "zero_optimization": {**ZERO_3["deepspeed"]["zero_optimization"], **STATES_ON_HOST}}}
Case = dict[str, Any]


def case(world: int, arguments: dict[str, Any], **changes: Any) -> Case:
    usual = {"model": SMALL, "weights": "float32", "lora": None, "batch": 4, "length": 512, "world": world}
    return {**usual, **changes, "arguments": {"bf16": True, "optim": "adamw_torch", **arguments}}


CASES: dict[str, Case] = {
    "ddp-2": case(2, {}),
    "ddp-2-accumulation": case(2, {"gradient_accumulation_steps": 2}),
    "fsdp2-2": case(2, FSDP),
    "fsdp2-4": case(4, FSDP),
    "fsdp2-2-fp32": case(2, {**FSDP, "bf16": False}),
    "fsdp2-2-keep": case(2, KEEP),
    "fsdp2-2-checkpointing": case(2, {**FSDP, "gradient_checkpointing": True}),
    "fsdp2-4-checkpointing": case(4, {**FSDP, "gradient_checkpointing": True}),
    "fsdp2-2-recomputed": case(2, RECOMPUTED),
    "fsdp2-2-recomputed-sync": case(2, {**RECOMPUTED, **SYNC, "gradient_accumulation_steps": 2}),
    "fsdp2-2-accumulation": case(2, {**FSDP, "gradient_accumulation_steps": 2}),
    "fsdp2-2-sync": case(2, {**FSDP, **SYNC, "gradient_accumulation_steps": 2}),
    "fsdp2-2-tied": case(2, FSDP, model=TIED),
    "fsdp2-2-offload": case(2, OFFLOAD),
    "fsdp2-2-tied-wide": case(2, FSDP, model=WIDE, batch=2),
    "fsdp2-2-lora": case(2, FSDP, lora=16, weights="bfloat16"),
    "fsdp2-2-fused": case(2, {**FSDP, "optim": "adamw_torch_fused"}),
    "zero2-2": case(2, ZERO_2),
    "zero2-4": case(4, ZERO_2),
    "zero2-2-accumulation": case(2, {**ZERO_2, "gradient_accumulation_steps": 2}),
    "zero2-2-checkpointing": case(2, {**ZERO_2, "gradient_checkpointing": True}),
    "zero2-2-tied": case(2, ZERO_2, model=TIED),
    "zero2-2-lora": case(2, ZERO_2, lora=16, weights="bfloat16"),
    "zero2-2-offload": case(2, OFFLOAD_2),
    "zero2-2-offload-accumulation": case(2, {**OFFLOAD_2, "gradient_accumulation_steps": 2}),
    "zero3-2": case(2, ZERO_3),
    "zero3-4": case(4, ZERO_3),
    "zero3-2-accumulation": case(2, {**ZERO_3, "gradient_accumulation_steps": 2}),
    "zero3-2-checkpointing": case(2, {**ZERO_3, "gradient_checkpointing": True}),
    "zero3-2-tied": case(2, ZERO_3, model=TIED),
    "zero3-2-wide": case(2, ZERO_3, model=WIDE, batch=2),
    "zero3-2-lora": case(2, ZERO_3, lora=16, weights="bfloat16"),
    "zero3-2-lora-checkpointing": case(2, {**ZERO_3, "gradient_checkpointing": True}, lora=16, weights="bfloat16"),
    "zero3-2-offload-states": case(2, STATES_3),
    "zero3-2-offload": case(2, OFFLOAD_3),
}


def rehearsed(one: Case) -> dict[str, int] | None:
    """What torch's allocator counted on rank 0; None where the run did not get through."""
    env = environment(find(CARD), count=one["world"])
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{env['PYTHONPATH']}:{Path(__file__).parents[1]}", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(one["world"])]
    done = subprocess.run([*command, str(WORKER), json.dumps(one)], env=env, capture_output=True, text=True, timeout=900, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("PEAK ")), None)
    if line is None:
        print("\n".join(done.stderr.splitlines()[-8:]), file=sys.stderr)
        return None
    peaks: dict[str, int] = json.loads(line.removeprefix("PEAK "))
    return peaks


def estimated(one: Case) -> MemoryPeak:
    card = find(CARD)
    assert card.capability is not None
    with tempfile.TemporaryDirectory() as folder:
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **one["model"]}
        Path(folder, "config.json").write_text(json.dumps(config))
        lora = None if one["lora"] is None else Lora(r=one["lora"], target_modules="all-linear")
        spec = ModelSpec(name=folder, weights_dtype=one["weights"], lora=lora)
        workload = from_spec(spec, DataSpec(max_length=one["length"]))
        read = trainer_settings(one["arguments"])
        accumulation = one["arguments"].get("gradient_accumulation_steps", 1)
        settings = step_settings(read, accumulation=accumulation, capability=card.capability, multiprocessors=card.sms)
        sharding = sharding_of(read.engine, world_size=one["world"], hidden_size=one["model"]["hidden_size"])
        settings = replace(settings, sharding=sharding)
        if sharding is not None and sharding.recomputes:
            settings = replace(settings, checkpointing=Checkpointing(every_n_layers=1))
        return estimate(workload, settings).curve.peak(one["batch"])


def against_the_allocator(only: str | None) -> Iterator[tuple[str, float, float]]:
    for name, one in CASES.items():
        if only is not None and only not in name:
            continue
        if "deepspeed" in one["arguments"] and find_spec("deepspeed") is None:
            print(f"{name:24} left out: DeepSpeed cannot be imported here")
            continue
        real, ours = rehearsed(one), estimated(one)
        if real is None:
            print(f"{name:24} the run itself failed")
            continue
        allocated, reserved = 100 * (ours.allocated_bytes / real["allocated"] - 1), 100 * (ours.reserved_bytes / real["reserved"] - 1)
        figures = f"{real['allocated'] / MIB:8.0f} {ours.allocated_bytes / MIB:8.0f} MiB {allocated:+6.2f} %"
        print(
            f"{name:24} allocated {figures}   reserved {real['reserved'] / MIB:6.0f} {ours.reserved_bytes / MIB:6.0f} {reserved:+6.2f} %",
            flush=True,
        )
        yield name, allocated, reserved


def published() -> Iterator[tuple[str, float]]:
    """torchtitan: reserved memory, its own step traced. torchtune: active memory, the Trainer's step with a fused loss."""
    from torchtitan_step import peak

    rows = [(f"torchtitan Llama 3.1 8B, FSDP over {world}", figure, peak(world).reserved_bytes) for world, figure in TORCHTITAN_GIB.items()]
    rows.append(("torchtune Llama 3.1 70B LoRA, FSDP over 8", TORCHTUNE_GIB, torchtune_peak().allocated_bytes))
    for name, figure, ours in rows:
        error = 100 * (ours / GIB / figure - 1)
        print(f"{name:44} published {figure:5.1f} GiB, estimated {ours / GIB:5.1f} GiB {error:+6.1f} %", flush=True)
        yield name, error


def torchtune_peak() -> MemoryPeak:
    """recipes/configs/llama3_1/70B_lora.yaml at the README's batch 2 and 2048 tokens: bfloat16 throughout, loss in slices."""
    targets = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    spec = ModelSpec(name="meta-llama/Llama-3.1-70B", weights_dtype="bfloat16", lora=Lora(r=16, target_modules=targets))
    card = find(CARD)
    assert card.capability is not None
    settings = StepSettings(
        precision="fp32",
        checkpointing=Checkpointing(every_n_layers=1),
        optim="adamw_torch_fused",
        fused_loss=True,
        capability=card.capability,
        multiprocessors=card.sms,
        sharding=Sharding(engine="fsdp2", world_size=8, wrap=("LlamaDecoderLayer",)),
    )
    return estimate(from_spec(spec, DataSpec(max_length=2048)), settings).curve.peak(2)


def summary(errors: list[float]) -> dict[str, Any]:
    sizes = [abs(error) for error in errors]
    within = sum(size <= 5 for size in sizes)
    return (
        {"n": len(sizes), "median_pct": round(median(sizes), 2), "max_pct": round(max(sizes), 2), "within_5_pct": within}
        if sizes
        else {"n": 0}
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only")
    parser.add_argument("--published", action="store_true", help="the published rows alone")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    rows = [] if options.published else list(against_the_allocator(options.only))
    result = {"allocated": summary([row[1] for row in rows]), "reserved": summary([row[2] for row in rows])}
    if options.only is None:
        result["published"] = summary([error for _, error in published()])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
