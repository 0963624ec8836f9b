"""How fast the device and its host are taken to be: by the tables, as calibrated here, or for a host that the user names.

`--host` takes what is known of the machine the run will be on, separated by commas: its cores (`16cores`), what it needs to launch a
kernel in the forward (`30us`), or the JSON that `hfopt calibrate` wrote there, which says both.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from hfopt.compat.versions import missing_kernels, torch_build
from hfopt.config.settings import sharding_of, step_settings
from hfopt.hardware import catalog
from hfopt.job.request import Progress, Request
from hfopt.job.subject import Subject, workload_of
from hfopt.memory.counted_step import budget_bytes
from hfopt.memory.trace_store import TraceStore
from hfopt.pricing.candidate_prices import Pricing
from hfopt.pricing.compiled import COMPILE, Compiler, compiler_of, run_steps
from hfopt.pricing.forked_traces import Estimator
from hfopt.pricing.grpo import ColocatedVllm, colocated_vllm, room_beside
from hfopt.schema import Assumption, Gpu, Hardware, Host, MemoryPeak, Sharding, StepSettings
from hfopt.speed.calibration import NamedHost, calibrated, for_device, named_host
from hfopt.speed.device_speed import Speed, speed_of
from hfopt.speed.step_time import RankTraffic
from hfopt.store import default_store
from hfopt.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFigures:
    speed: Speed
    launches: str  # whose host the launches were priced for; "" on a CPU, which launches nothing
    notes: tuple[str, ...] = ()
    calibrated: str | None = None  # the day on which this device was measured


def device_figures(gpu: Gpu | None, host: Host, table: Speed, named: NamedHost, *, threads: int | None = None) -> DeviceFigures:
    """The table's figures, replaced by what was measured on this device and by what is known of the host."""
    made, remark = for_device(gpu, host, threads=threads)
    speed = table if made is None else calibrated(table, made)
    notes = [remark] if remark else []
    if made is not None:
        notes.append(f"speeds of {made.device} {made.words}")
    day = None if made is None else made.date
    if gpu is None:
        return DeviceFigures(speed=speed, launches="", notes=tuple(notes), calibrated=day)
    whose = "a server's CPU" if made is None or made.launch_scale is None else "this host as calibrated"
    if named.launch_scale is not None:
        speed, whose = replace(speed, host=table.host.scaled(named.launch_scale)), f"the host of {named.source}"
    elif named.source is not None:
        notes.append(
            f"--host {named.source} holds no cost of a launch (no card was measured there): its cores are used, the launches are not"
        )
    if named.launch_s is not None:
        speed, whose = replace(speed, host=table.host.scaled(named.launch_s / table.host.forward_s)), "the host as named"
    launches = f"{whose} ({speed.host.forward_s * 1e6:.0f} µs each in forward)"
    return DeviceFigures(speed=speed, launches=launches, notes=tuple(notes), calibrated=day)


NETWORK_BYTES_PER_S = 12.5e9  # 100 Gbit/s, assumed where no rate of a network is given
HOST_BYTES_PER_S = 100e9  # of a host's memory, assumed: eight channels of DDR4-3200 have twice that at best
UPDATE_BYTES = 28  # Adam on the host reads weight, gradient and two states and writes three of them, in float32
HOST_PASSES = 3  # torch's Adam on the CPU goes over the states several times; DeepSpeed's goes once


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    sharding: Sharding | None
    ranks: RankTraffic


def world_of(subject: Subject) -> World:
    job = subject.job
    sharding = sharding_of(job.settings.engine, world_size=job.world_size, hidden_size=hidden_size(subject), folder=subject.folder)
    if sharding is None:
        return World(sharding=None, ranks=RankTraffic(world_size=job.world_size))
    return World(sharding=sharding, ranks=traffic_of(subject, sharding))


def hidden_size(subject: Subject) -> int | None:
    return subject.workload.facts.hidden_size


def weight_bytes(subject: Subject) -> int:
    """Of one weight as it is stored while training."""
    return 2 if subject.workload.weights_dtype in ("bfloat16", "float16") else 4


def traffic_of(subject: Subject, sharding: Sharding) -> RankTraffic:
    workload, world = subject.workload, sharding.world_size
    stored = weight_bytes(subject)
    mixed = subject.job.settings.precision in ("bf16", "fp16")
    sent = 2 if mixed and sharding.engine != "ddp" else stored
    share = (world - 1) / world
    weights, gradients = sent * workload.parameters * share, sent * workload.trainable_parameters * share
    if sharding.engine == "ddp":
        return RankTraffic(world_size=world, step_bytes=2 * gradients)
    if sharding.engine == "zero2":
        return RankTraffic(world_size=world, micro_batch_bytes=gradients, step_bytes=gradients, host_s=_host_s(subject, sharding, passes=1))
    gathers = 2 if sharding.reshard_after_forward else 1
    passes = HOST_PASSES if sharding.engine == "fsdp2" else 1
    return RankTraffic(world_size=world, micro_batch_bytes=gathers * weights + gradients, host_s=_host_s(subject, sharding, passes=passes))


def _host_s(subject: Subject, sharding: Sharding, *, passes: int) -> float:
    """The update on the host and the copies there and back; all ranks of a node share its memory."""
    if not (sharding.offload_parameters or sharding.offload_optimizer):
        return 0.0
    gpu = subject.hardware.smallest
    per_node = max(1, len(subject.hardware.gpus))
    updated = subject.workload.trainable_parameters / sharding.world_size
    copied = 2 * 4 * updated + (2 * 2 * subject.workload.parameters / sharding.world_size if sharding.offload_parameters else 0)
    pcie = (gpu.pcie_bytes_per_s if gpu is not None else None) or HOST_BYTES_PER_S
    return passes * UPDATE_BYTES * updated * per_node / HOST_BYTES_PER_S + copied / pcie


def link_of(hardware: Hardware, *, asked: tuple[str, float | None] | None, nodes: int) -> tuple[float | None, str]:
    """The slowest link of the ring in bytes/s, and the words for it. `asked` is the kind given with --link and its rate, if given."""
    gpu = hardware.smallest
    if gpu is None:
        return None, "memory of this machine"
    bridged = not gpu.nvlink_by_bridge or (len(hardware.gpus) == 2 and not hardware.hypothetical)
    inside, words = (gpu.nvlink_bytes_per_s, "NVLink") if gpu.nvlink_bytes_per_s and bridged else (gpu.pcie_bytes_per_s, "PCIe")
    kind, rate = asked or (None, None)
    if kind == "nvlink":
        inside, words = rate or gpu.nvlink_bytes_per_s, "NVLink"
    elif kind == "pcie":
        inside, words = rate or gpu.pcie_bytes_per_s, "PCIe"
    if nodes > 1 or kind == "network":
        network = rate if kind == "network" and rate else NETWORK_BYTES_PER_S
        if inside is None or network < inside or kind == "network":
            assumed = "" if kind == "network" and rate else ", assumed"
            return network, f"network of {network * 8 / 1e9:.0f} Gbit/s{assumed}"
    return inside, words if inside is None else f"{words} with {inside / 1e9:.0f} GB/s"


CPU_CAPABILITY = (8, 0)  # which CUDA kernels stand in for the CPU's in a trace: flash attention, as on the CPU


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetDevice:
    gpu: Gpu | None  # None: the CPU
    name: str
    speed: Speed
    budget_bytes: int
    base: StepSettings
    ranks: RankTraffic
    offset_bytes: int
    notes: tuple[str, ...]
    vllm: ColocatedVllm | None = None  # on the same card; the budget is what it leaves
    launches: str = ""  # whose host the launches were priced for
    calibrated: str | None = None  # the day on which the device was measured
    compiler: Compiler | None = None  # None: nothing is compiled, or cannot be
    warnings: tuple[str, ...] = ()  # why nothing would run on it as things are
    assumed: tuple[Assumption, ...] = ()  # of the job, this device and its host

    def pricing(self, subject: Subject, estimator: Estimator | None, progress: Progress) -> Pricing:
        job = subject.job
        return Pricing(
            workload=subject.workload,
            base=self.base,
            speed=self.speed,
            budget_bytes=self.budget_bytes,
            capacity_bytes=None if self.gpu is None else self.gpu.available_bytes - (self.vllm.resident_bytes if self.vllm else 0),
            ranks=self.ranks,
            offset_bytes=self.offset_bytes,
            estimator=estimator or TraceStore(default_store()),
            compiler=self.compiler,
            run_steps=None if self.compiler is None else run_steps(subject),
            with_attention=lambda name: workload_of(replace(job, model=replace(job.model, attn_implementation=name))),
            progress=progress,
        )

    def first_words(self, memory: MemoryPeak, fits: bool) -> str:
        """What is said first of the config as it is, where its trace was kept."""
        verdict, sought = ("Fits as it is", "faster settings") if fits else ("Does not fit as it is", "what would")
        sizes = f"{format_bytes(memory.device_bytes)} by a kept trace, {format_bytes(self.budget_bytes)} usable"
        return f"{verdict}: {sizes}; looking for {sought}"


def allocator_conf() -> str | None:
    """The allocator's settings in this environment; the first name is that of torch 2.9 and later."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or None


def allocator_note(settings: StepSettings) -> tuple[str, ...]:
    return (f"the allocator as the environment sets it here: {settings.allocator}",) if settings.allocator else ()


def config_step(subject: Subject, world: World) -> StepSettings:
    """The config's own step on the device that is planned for, as one rank of its world takes it."""
    gpu = subject.hardware.smallest
    capability, multiprocessors = (CPU_CAPABILITY, None) if gpu is None else (gpu.capability or CPU_CAPABILITY, gpu.sms)
    job = subject.job
    base = step_settings(job.settings, accumulation=job.accumulation, capability=capability, multiprocessors=multiprocessors)
    return replace(base, sharding=world.sharding, allocator=allocator_conf() if gpu is not None else None)


def memory_pricing(subject: Subject, request: Request, progress: Progress) -> Pricing:
    """What `plan` knows of memory, for a device whose speed nobody asks for."""
    gpu, world = subject.hardware.smallest, world_of(subject)
    free = subject.hardware.host.ram_free_bytes if gpu is None else gpu.available_bytes
    return Pricing(
        workload=subject.workload,
        base=replace(config_step(subject, world), allocator=allocator_conf()),  # without a card too: some CUDA card is meant
        speed=None,
        budget_bytes=budget_bytes(free, request.headroom),
        ranks=world.ranks,
        compiler=compiler_of(subject, gpu) if subject.job.settings.torch_compile else None,
        estimator=TraceStore(default_store()),
        progress=progress,
    )


def device_of(subject: Subject, request: Request) -> TargetDevice:
    hardware = subject.hardware
    gpu = hardware.smallest
    notes = list(hardware.notes)
    if gpu is None:
        from hfopt.speed.device_speed import cpu_speed

        table, free = cpu_speed(), hardware.host.ram_free_bytes
    else:
        known = speed_of(gpu)
        table, note = (known, None) if known is not None else _stand_in(gpu)
        notes.extend([note] if note else [])
        free = gpu.available_bytes
    figures = device_figures(gpu, hardware.host, table, named_host(request.host), threads=None if gpu is not None else _threads())
    speed = figures.speed
    if gpu is None and speed is table:
        notes.append("speeds are those of this CPU, measured now")
    notes.extend(figures.notes)
    world = world_of(subject)
    base = config_step(subject, world)
    notes.extend(allocator_note(base))
    if world.ranks.world_size > 1:
        link, words = link_of(hardware, asked=request.link_rate, nodes=request.nodes)
        speed = replace(speed, link_bytes_per_s=link)
        notes.append(f"{world.ranks.world_size} devices over {words}")
    elif request.link is not None:
        notes.append(f"--link {request.link} changes nothing: one device sends nothing to others")
    vllm = None
    if subject.job.generates:
        vllm = colocated_vllm(subject.job, gpu, runs_already=subject.trainer is not None and not hardware.hypothetical)
    usable, kernels = budget_bytes(free, request.headroom), missing_kernels(gpu, torch_build())
    return TargetDevice(
        gpu=gpu,
        name=gpu.name if gpu is not None else "the CPU",
        speed=speed,
        budget_bytes=usable if vllm is None else room_beside(vllm, usable, gpu),
        base=base,
        ranks=world.ranks,
        offset_bytes=0,
        notes=tuple(notes),
        vllm=vllm,
        launches=figures.launches,
        calibrated=figures.calibrated,
        compiler=compiler_of(subject, gpu) if subject.job.settings.torch_compile or COMPILE in request.allow else None,
        warnings=() if kernels is None else (str(kernels),),
        assumed=subject.assumed,
    )


def _threads() -> int:
    import torch

    return int(torch.get_num_threads())


def _stand_in(gpu: Gpu) -> tuple[Speed, str]:
    """A card of unknown speed is ordered by the nearest known one of its capability and memory: ratios hold better than rates."""
    alike = [card for card in catalog.cards() if card.capability == (gpu.capability or (8, 6))] or list(catalog.cards())
    nearest = min(alike, key=lambda card: (abs(card.memory_bytes - gpu.memory_bytes), card.name))
    speed = speed_of(nearest)
    assert speed is not None, "every card of the catalog has its peaks"
    return replace(speed, name=gpu.name), f"the speed of {gpu.name} is not known: rates are those of {nearest.name}, for the order only"
