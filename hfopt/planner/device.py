"""The device that is planned for: its speed, what may be used of its memory, and what can be tried on it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from hfopt.config.settings import step_settings
from hfopt.hardware import catalog
from hfopt.memory.step_memory import estimate
from hfopt.planner.ahead import Estimator
from hfopt.planner.feasible import budget_bytes
from hfopt.planner.pricing import Pricing
from hfopt.planner.request import Progress, Request, Subject, workload_of
from hfopt.planner.world import link_of, world_of
from hfopt.schema import Gpu, StepSettings, Workload
from hfopt.speed.device_speed import Speed, speed_of
from hfopt.speed.step_time import Ranks

CPU_CAPABILITY = (8, 0)  # which CUDA kernels stand in for the CPU's in a trace: flash attention, as on the CPU


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    gpu: Gpu | None  # None: the CPU
    name: str
    speed: Speed
    budget_bytes: int
    base: StepSettings
    ranks: Ranks
    offset_bytes: int
    notes: tuple[str, ...]

    def pricing(self, subject: Subject, estimator: Estimator | None, progress: Progress) -> Pricing:
        job = subject.job
        return Pricing(
            workload=subject.workload,
            base=self.base,
            speed=self.speed,
            budget_bytes=self.budget_bytes,
            capacity_bytes=None if self.gpu is None else self.gpu.available_bytes,
            ranks=self.ranks,
            offset_bytes=self.offset_bytes,
            estimator=estimator or estimate,
            with_attention=lambda name: workload_of(replace(job, model=replace(job.model, attn_implementation=name))),
            progress=progress,
        )

    def stored_in(self, workload: Workload) -> str | None:
        from hfopt.model.builder import stored_in

        return stored_in(workload)

    def trained_in(self, workload: Workload) -> str | None:
        from hfopt.model.builder import DTYPE_OPTION

        stated = getattr(getattr(workload.build_model, "config", None), DTYPE_OPTION, None)
        return None if stated is None else str(stated).removeprefix("torch.")


def allocator_conf() -> str | None:
    """What PyTorch's allocator is told in this environment; the first name is that of torch 2.9 and later."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or None


def device_of(subject: Subject, request: Request) -> Device:
    hardware, args = subject.hardware, subject.job.args
    gpu = hardware.smallest
    notes = list(hardware.notes)
    if gpu is None:
        from hfopt.speed.device_speed import cpu_speed

        speed, free = cpu_speed(), hardware.host.ram_free_bytes
        notes.append("speeds are those of this CPU, measured now")
    else:
        known = speed_of(gpu)
        speed, note = (known, None) if known is not None else _stand_in(gpu)
        notes.extend([note] if note else [])
        free = gpu.available_bytes
    capability, multiprocessors = (CPU_CAPABILITY, None) if gpu is None else (gpu.capability or (8, 0), gpu.sms)
    base = step_settings(args, capability=capability, multiprocessors=multiprocessors)
    if gpu is not None and (conf := allocator_conf()):
        base = replace(base, allocator=conf)
        notes.append(f"the allocator as the environment sets it here: {conf}")
    world = world_of(subject)
    if world.ranks.world_size > 1:
        link, words = link_of(hardware, asked=request.link_rate, nodes=request.nodes)
        speed = replace(speed, link_bytes_per_s=link)
        notes.append(f"{world.ranks.world_size} devices over {words}")
    elif request.link is not None:
        notes.append(f"--link {request.link} changes nothing: one device sends nothing to others")
    return Device(
        gpu=gpu,
        name=gpu.name if gpu is not None else "the CPU",
        speed=speed,
        budget_bytes=budget_bytes(free, request.headroom),
        base=replace(base, sharding=world.sharding),
        ranks=world.ranks,
        offset_bytes=0,
        notes=tuple(notes),
    )


def _stand_in(gpu: Gpu) -> tuple[Speed, str]:
    """A card of unknown speed is ordered by the nearest known one of its capability and memory: ratios hold better than rates."""
    alike = [card for card in catalog.cards() if card.capability == (gpu.capability or (8, 6))] or list(catalog.cards())
    nearest = min(alike, key=lambda card: (abs(card.memory_bytes - gpu.memory_bytes), card.name))
    speed = speed_of(nearest)
    assert speed is not None, "every card of the catalog has its peaks"
    return replace(speed, name=gpu.name), f"the speed of {gpu.name} is not known: rates are those of {nearest.name}, for the order only"
