"""Memory and kernels of a step under `torch_compile`, from compiling it: on the virtual GPU, in children, with fewer layers.

The Trainer's own steps are compiled with 2 and with 3 layers (the whole model where it cannot be built so), each at two batch sizes, for
the card that is planned for. The shapes are compiled as the Trainer compiles them, without dynamic dimensions; what the allocator noted is
carried on to the model's depth and along the batch (`memory.phase_curve`). Inductor says how many bytes each of its kernels moves, the
products between them are priced like eager ones, and the update is not compiled at all.

The allocator numbers nothing, but it counts: after so many blocks taken and so many freed, a moment of the run is a place in its history.
What lives when the first of the two steps begins (weights, optimizer states, workspaces) is put before them, so that a trace of two
later steps looks like one that began with the model's move to the card: weights and states in their order, then the rest by size, because
a workspace of cuBLAS may be older than the run.

Known limits: the first steps, which compile, are not in the trace, nor what Triton's autotuner takes in them; a batch so large that
Inductor splits other reductions than at the compiled sizes is not on the line; the seconds of a compile are those of a core of this
machine, without Triton's work on the kernels, which a run does beside it on all cores.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hfopt.compat.torch_patches import ENVIRONMENT
from hfopt.errors import DryRunError, VirtualGpuError
from hfopt.memory.layer_extrapolation import deeper_ops, share_of, traced_depths
from hfopt.memory.phase_curve import CompiledRun, phase_curve, uncollected
from hfopt.memory.step_memory import Estimate, context_bytes
from hfopt.probe.dry_run import COMPILE_ORDER, child_environment
from hfopt.process import child_process
from hfopt.redact import said
from hfopt.schema import Candidate, Checkpointing, CompiledStep, Gpu, OpCost, StepSettings, TrainJob, Workload
from hfopt.trace.events import FREED, Category, Phase, Trace, Where
from hfopt.units import GIB, format_seconds
from hfopt.virtual import build
from hfopt.virtual.build import find_toolchain

LEAST_DEPTH = 2
BATCHES = (8, 16)
CAPTURED = "reduce-overhead"  # with CUDA graphs
STEPS = {"default": 4, CAPTURED: 5}
PLANNED_AS = {"default": "default", CAPTURED: CAPTURED, "max-autotune": CAPTURED, "max-autotune-no-cudagraphs": "default"}
FIRST_MEASURED = {"default": 2, CAPTURED: 1}  # behind an eager step and one that compiles; a graph's memory is taken while it is recorded
_ROOM_BYTES = 512 * GIB  # of the card in the child: what is compiled for must not run out of memory while it is looked at
_LONGEST_S = 1800.0


Runs = tuple[tuple[int | None, int], ...]  # each a number of layers (None: the model's own) and a batch size


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileOrder:
    """What the parent asks for."""

    job: TrainJob
    candidate: Candidate
    runs: Runs
    steps: int  # of each run
    first_measured: int  # from which step on kernels count
    counts_compilations: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Depth:
    """One number of layers, compiled at both batch sizes."""

    compiled: tuple[CompiledRun, ...]
    ops: tuple[OpCost, ...]
    runs: Sequence[Mapping[str, Any]]
    graphs: int = 0  # of a run, where they were counted
    graph_breaks: int = 0

    @property
    def compile_s(self) -> float:
        """Of one graph, forward and backward."""
        return min(float(run["compile_s"]) for run in self.runs)


def why_not(gpu: Gpu | None) -> str | None:
    """None where a compiled step can be looked at here, else the sentence that says what is missing. Builds nothing."""
    if gpu is None or gpu.vendor != "nvidia" or gpu.capability is None:
        return "torch.compile is looked at for NVIDIA cards only"
    try:
        return build.missing(find_toolchain().torch)
    except VirtualGpuError as error:
        return str(error)


def compiled_depths(workload: Workload, checkpointing: Checkpointing) -> tuple[int, int] | None:
    """Two shallow models that end where the whole one does in the pattern of checkpointed layers, one pattern apart; None: as it is."""
    pattern = max(1, checkpointing.every_n_layers)
    ends = (workload.layers or 0) % pattern
    shallow = next(depth for depth in range(LEAST_DEPTH, LEAST_DEPTH + pattern) if depth % pattern == ends)
    depths = shallow, shallow + pattern
    return None if traced_depths(workload, depths, least_layers=depths[1] + 1) is None else depths


def compiled_step(job: TrainJob, gpu: Gpu, workload: Workload, settings: StepSettings, eager: Estimate) -> Estimate:
    """Raises DryRunError where the model cannot be compiled, in one sentence."""
    began = time.perf_counter()
    depths = compiled_depths(workload, settings.checkpointing)
    orders = [tuple((depth, batch) for batch in BATCHES) for depth in depths or (None,)]
    found = [_measured(one, settings) for one in compiled_runs(job, gpu, settings, orders)]
    share = 0.0 if depths is None else share_of(workload.layers or 0, depths)
    context = context_bytes(settings.capability, multiprocessors=settings.multiprocessors)
    captured = settings.compile_mode == CAPTURED
    curve = phase_curve([depth.compiled for depth in found], share, context, captured=captured)
    ops = deeper_ops(found[0].ops, found[1].ops, share) if depths is not None else found[0].ops
    update = tuple(op for op in eager.ops if op.phase == "optimizer")
    made = _compiled(found, ops, share, settings, eager)
    return Estimate(
        curve=curve,
        ops=(*ops, *update),
        seconds=time.perf_counter() - began,
        notes=(*eager.notes, _words(made, workload, depths)),
        compiled=made,
    )


def _compiled(found: Sequence[_Depth], ops: Sequence[OpCost], share: float, settings: StepSettings, eager: Estimate) -> CompiledStep:
    graphs, breaks = found[0].graphs, found[0].graph_breaks
    kernels = {name for depth in found for run in depth.runs[:1] for _, name, one in run["costs"] if "::" not in name and one}
    seconds = found[0].compile_s + (found[-1].compile_s - found[0].compile_s) * share
    return CompiledStep(
        compile_s=seconds * (1 if breaks else max(1, graphs)),  # pieces of a cut graph are no repetitions
        graphs=graphs,
        graph_breaks=breaks,
        kernels=len(kernels),
        launches=sum(op.count for op in ops),
        eager_launches=sum(op.count for op in eager.ops if op.phase != "optimizer"),
        mode=settings.compile_mode,
        uncollected=uncollected([depth.compiled for depth in found], share),
    )


def _words(made: CompiledStep, workload: Workload, depths: tuple[int, int] | None) -> str:
    where = "as it is" if depths is None else f"with {depths[0]} and {depths[1]} of its {workload.layers} layers"
    broken = "" if not made.graph_breaks else f", cut at {made.graph_breaks} place{'s' * (made.graph_breaks > 1)}"
    again = "" if made.graphs < 2 or made.graph_breaks else f" {made.graphs} times, because its first forward changes what was compiled"
    return (
        f"torch_compile: memory and kernels are those of the model {where}, compiled on the virtual GPU at batch {BATCHES[0]} and "
        f"{BATCHES[1]}{broken}: {made.launches:.0f} launches in a forward and backward instead of {made.eager_launches:.0f}; a run "
        f"compiles it{again} in about {format_seconds(made.compile_s)} of one core, beside Triton's work on {made.kernels} kernels"
    )


# ------------------------------------------------------------------------------------------------- the children


def compiled_runs(job: TrainJob, gpu: Gpu, settings: StepSettings, orders: Sequence[Runs]) -> list[Mapping[str, Any]]:
    """What the allocator noted of each, and what was compiled: a child for each order, beside each other."""
    roomy = replace(gpu, memory_bytes=_ROOM_BYTES, usable_bytes=None, free_bytes=None)
    with contextlib.ExitStack() as stack:
        running = []
        for number, runs in enumerate(orders):
            folder = stack.enter_context(child_process.scratch_folder())
            env = child_environment("virtual", roomy, 0, folder) | ENVIRONMENT | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
            (folder / COMPILE_ORDER).write_bytes(_order(job, settings, runs, first=number == 0))
            output = stack.enter_context((folder / "log").open("wb"))
            command = [sys.executable, "-m", "hfopt.probe.dry_run_worker", str(folder)]
            child = child_process.start(command, folder=folder, timeout_s=_LONGEST_S, env=env, output=output)
            stack.callback(child.end)
            running.append((child, folder))
        return [_answer(child, folder) for child, folder in running]


def _order(job: TrainJob, settings: StepSettings, runs: Runs, *, first: bool) -> bytes:
    raw = {**job.raw, "torch_compile_mode": None if settings.compile_mode == "default" else settings.compile_mode}
    plain = replace(job, raw=raw, model=replace(job.model, overrides=dict(job.model.overrides)))  # read-only views do not travel
    candidate = Candidate(
        per_device_batch=BATCHES[0],
        accumulation=settings.accumulation,
        precision=settings.precision,
        checkpointing=settings.checkpointing,
        optim=settings.optim,
        attn_implementation=settings.attn_implementation,
        torch_compile=True,
        use_liger_kernel=settings.fused_loss,
    )
    steps, measured = STEPS[settings.compile_mode], FIRST_MEASURED[settings.compile_mode]
    return pickle.dumps(
        CompileOrder(job=plain, candidate=candidate, runs=runs, steps=steps, first_measured=measured, counts_compilations=first)
    )


def _answer(child: child_process.Running, folder: Path) -> Mapping[str, Any]:
    ended = child.wait(_LONGEST_S)
    if ended.reason == "timeout":
        raise DryRunError(f"compiling took more than {format_seconds(_LONGEST_S)}")
    try:
        facts: Mapping[str, Any] = json.loads((folder / "steps.json").read_text())
    except (OSError, ValueError) as error:
        last = (folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
        raise DryRunError(f"the compile ended with exit code {ended.returncode}" + (f": {said(last[0])}" if last else "")) from error
    if "error" in facts:
        raise DryRunError(said(str(facts["error"])))
    return facts


# ------------------------------------------------------------------------------------------------- what they say


def _measured(facts: Mapping[str, Any], settings: StepSettings) -> _Depth:
    from hfopt.trace.op_cost import grouped, proportional

    events = [(int(address), int(size)) for address, size in facts["events"]]
    found = []
    for run in facts["runs"]:
        measured = FIRST_MEASURED[settings.compile_mode]
        trace = _trace(events, run, measured)
        allocated, reserved = (max(counted) for counted in zip(*run["peaks"][measured:], strict=True))
        found.append(
            CompiledRun(trace=trace, allocated_bytes=allocated, reserved_bytes=reserved, uncollected_bytes=int(run["uncollected_bytes"]))
        )
    first, second = (run.trace for run in found)
    alike = [(phase, name) for phase, name, _ in first.costs] == [(phase, name) for phase, name, _ in second.costs]
    ops = grouped(first, second) if alike else proportional(second)
    counted = {name: int(facts.get(name, 0)) for name in ("graphs", "graph_breaks")}
    return _Depth(compiled=tuple(found), ops=ops, runs=facts["runs"], **counted)


def _trace(events: Sequence[tuple[int, int]], run: Mapping[str, Any], skipped_steps: int) -> Trace:
    from hfopt.trace.op_cost import Cost

    moments = [Moment(begins=name, event=event) for name, event in run["moments"]]
    trace = trace_of(events, moments, run["batch"], skipped_steps=skipped_steps)
    for phase, name, (kind, flops, moved, dtype, shape, launches) in run["costs"]:
        trace.costs.append((phase, name, Cost(kind, flops, moved, dtype, None if shape is None else tuple(shape), launches)))
    return trace


# ------------------------------------------------------------------------------------------------- the allocator's history as a trace

_PLACES: tuple[Phase, ...] = ("load", "forward", "backward", "optimizer")
_PHASES: dict[str, Phase] = {"backward": "backward", "optimizer": "optimizer"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Where a run was: what begins there, after so many events of the allocator."""

    begins: str  # "run", "built", "step", "forward", "backward", "optimizer", "end"
    event: int


@dataclass(frozen=True, slots=True)
class _Block:
    number: int
    size: int
    born: int  # the event that took it


def trace_of(events: Sequence[tuple[int, int]], moments: Sequence[Moment], batch: int, *, skipped_steps: int) -> Trace:
    """`events` are (address, bytes or FREED) since the process began; `moments` those of one run; two steps follow the skipped."""
    steps = [moment.event for moment in moments if moment.begins == "step"]
    begin, middle, end = steps[skipped_steps], steps[skipped_steps + 1], moments[-1].event
    trace = Trace(batch, places=[Where(phase, "", "") for phase in _PLACES])
    live = _live(events[:begin])
    kept = {address: _kept(born, moments) for address, (_, born) in live.items()}
    order = {"weights": 0, "optimizer": 1, None: 2}
    first = sorted(live, key=lambda address: (order[kept[address]], live[address][kept[address] is not None]))
    numbers = {address: number for number, address in enumerate(first)}
    trace.events = [(numbers[address], live[address][0], 0) for address in first]
    trace.categories = {numbers[address]: kind for address, kind in kept.items() if kind is not None}
    offset = len(trace.events) - begin
    trace.marks = {"step_0": begin + offset, "step_1": middle + offset, "end": end + offset}
    phases = _phases(moments, begin, end)
    blocks: list[_Block] = []
    for index in range(begin, end):
        address, size = events[index]
        place = _PLACES.index(phases[index - begin])
        if size == FREED:
            trace.events.append((numbers.pop(address), FREED, place))
            continue
        number = len(live) + len(blocks)
        numbers[address] = number
        blocks.append(_Block(number, size, index))
        trace.events.append((number, size, place))
    trace.categories |= _categories(blocks, trace.events, moments, offset)
    trace.sort_frees()
    return trace


def _live(events: Sequence[tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """By address, in the order they were taken: bytes and the event that took it."""
    live: dict[int, tuple[int, int]] = {}
    for index, (address, size) in enumerate(events):
        if size == FREED:
            live.pop(address, None)  # taken before the history began
        else:
            live[address] = size, index
    return live


def _phases(moments: Sequence[Moment], begin: int, end: int) -> list[Phase]:
    """Of each event between the two; what is done between steps belongs to the next forward."""
    found: list[Phase] = ["forward"] * (end - begin)
    for moment, following in itertools.pairwise(moments):
        phase = _PHASES.get(moment.begins)
        if phase is not None:
            for index in range(max(moment.event, begin), min(following.event, end)):
                found[index - begin] = phase
    return found


def _kept(born: int, moments: Sequence[Moment]) -> Literal["weights", "optimizer"] | None:
    """Of what lives when the steps begin: weights are built, states are taken by the optimizer."""
    begin, built = (next(moment.event for moment in moments if moment.begins == name) for name in ("run", "built"))
    if begin <= born < built:
        return "weights"
    return "optimizer" if any(start <= born < stop for start, stop in _spans(moments, "optimizer")) else None


def _spans(moments: Sequence[Moment], name: str) -> Iterator[tuple[int, int]]:
    for moment, following in itertools.pairwise(moments):
        if moment.begins == name:
            yield moment.event, following.event


def _categories(
    blocks: Sequence[_Block], events: Sequence[tuple[int, int, int]], moments: Sequence[Moment], offset: int
) -> dict[int, Category]:
    """What the forward takes and the backward finds are activations, what the backward takes and the optimizer finds gradients."""
    freed = {number: index - offset for index, (number, size, _) in enumerate(events) if size == FREED}
    found: dict[int, Category] = {}
    kinds: tuple[tuple[str, Category], ...] = (("step", "inputs"), ("forward", "activations"), ("backward", "gradients"))
    for name, kind in kinds:
        for start, stop in _spans(moments, name):
            for block in blocks:
                if start <= block.born < stop and freed.get(block.number, stop) >= stop:
                    found[block.number] = kind
    return found
