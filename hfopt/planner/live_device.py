"""The device a live Trainer already sits on: its own card, with what its process holds there counted as free again.

A plan says what a whole training process needs, weights and CUDA context included. The live process has taken part of that already, so
free + reserved + context is what it can have; tensors that are not the trained model's (a reference model, the user's own) stay and are
taken off.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from hfopt.memory.step_memory import context_bytes
from hfopt.model.losses import trained_modules
from hfopt.planner.request import Request, hardware_of
from hfopt.schema import Gpu, Hardware


def live_hardware(trainer: Any, request: Request) -> Hardware:
    """The named card when one was asked for; else the Trainer's own device, the CPU included."""
    hardware = hardware_of(request)
    device, args = trainer.args.device, trainer.args
    if hardware.hypothetical:
        return hardware
    if device.type != "cuda" or not hardware.gpus:
        return _shared_host(replace(hardware, gpus=()), args) if device.type == "cpu" else hardware
    index = device.index or 0
    gpus = hardware.gpus
    if args.world_size == 1 and args.n_gpu <= 1:
        gpus = gpus[index : index + 1] or gpus
    held = _held_bytes(trainer)
    return _shared_host(replace(hardware, gpus=tuple(_as_if_fresh(gpu, held) for gpu in gpus)), args)


def _as_if_fresh(gpu: Gpu, held: int) -> Gpu:
    """With several ranks the others hold on their cards what this one holds on its own."""
    context = context_bytes(gpu.capability, multiprocessors=gpu.sms) if gpu.capability is not None else 0
    free = gpu.free_bytes if gpu.free_bytes is not None else gpu.available_bytes
    return replace(gpu, free_bytes=min(free + held + context, gpu.usable_bytes or gpu.memory_bytes))


def _held_bytes(trainer: Any) -> int:
    """Reserved by this process, less what lives there besides the model: that does not become free."""
    import torch

    device = trainer.args.device
    tensors = (tensor for module in trained_modules(trainer) for tensor in (*module.parameters(), *module.buffers()))
    sizes = {id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors if tensor.is_cuda}
    own = sum(sizes.values())
    others = max(0, torch.cuda.memory_allocated(device) - own)
    held: int = torch.cuda.memory_reserved(device) - others
    return held


def _shared_host(hardware: Hardware, args: Any) -> Hardware:
    """Ranks of one machine share its memory; where they compute on the CPU each has its part of it."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))
    if hardware.gpus or ranks <= 1:
        return hardware
    host = hardware.host
    return replace(hardware, host=replace(host, ram_free_bytes=host.ram_free_bytes // ranks, cores=max(1.0, host.cores / ranks)))
