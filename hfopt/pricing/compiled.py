"""`torch_compile` in a plan: whether its step can be looked at here, what it takes, and what compiling it costs over the whole run.

Compiled steps come from a compile on the virtual GPU (`probe.compiled_step`), kept on disk like traces. Compiling is paid once, so its
seconds are spread over the steps of the run: a short run is not compiled. Where nothing can be compiled the config's own `torch_compile` is
planned with the eager step's memory and with a rule for the time (`speed.step_time`), and a sentence says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hfopt.errors import DryRunError, VirtualGpuError
from hfopt.job.subject import Subject
from hfopt.memory.step_memory import Estimate
from hfopt.memory.trace_store import kept_compiled
from hfopt.probe.compiled_step import PLANNED_AS, compiled_step, why_not
from hfopt.schema import Assumption, CompiledStep, Gpu, MemoryPeak, StepSettings, StepTime, Workload
from hfopt.units import format_bytes, format_seconds

COMPILE = "torch_compile"
UNCOMPILED = f"{COMPILE}: the step could not be compiled on the virtual GPU, so the figures are those of the eager step"
Compiler = Callable[[Workload, StepSettings, Estimate], Estimate]


def why_not_compiled(subject: Subject, gpu: Gpu | None) -> str | None:
    """None where the compiled step of this job can be looked at, else why not."""
    settings = subject.job.settings
    if subject.trainer is not None:
        return "a live model is not compiled for a plan"
    if subject.job.world_size > 1:
        return "a step on several devices is not compiled for a plan"
    if settings.compile_backend != "inductor":
        return f"torch_compile_backend: {settings.compile_backend} is not Inductor"
    return why_not(gpu)


def compiler_of(subject: Subject, gpu: Gpu | None) -> Compiler | None:
    """What makes a compiled estimate of an eager one; None where nothing can be compiled."""
    if gpu is None or why_not_compiled(subject, gpu) is not None:
        return None
    card, job = gpu, subject.job

    def compiled(workload: Workload, settings: StepSettings, eager: Estimate) -> Estimate:
        try:
            return kept_compiled(workload, settings, lambda whole: compiled_step(job, card, whole, settings, eager))
        except (DryRunError, VirtualGpuError) as error:
            return replace(eager, notes=(*eager.notes, f"{UNCOMPILED} ({error})"))

    return compiled


def compile_note(subject: Subject, gpu: Gpu | None) -> tuple[str, ...]:
    """What is made of a `torch_compile: true` of the config, where it is not simply looked at."""
    settings = subject.job.settings
    if (reason := why_not_compiled(subject, gpu)) is not None:
        return (f"{COMPILE}: true is in the time by a rule and not in the memory, which is the eager step's: {reason}",)
    planned = PLANNED_AS.get(settings.compile_mode, "default")
    if planned != settings.compile_mode:
        return (f"torch_compile_mode: {settings.compile_mode} is planned as {planned}: no kernel can be timed without the card",)
    return ()


def uncollected_note(compiled: CompiledStep | None, batch: int, peak: MemoryPeak) -> tuple[str, ...]:
    """What of a compiled step's memory a run may be without, where it is more than a hundredth."""
    held = 0 if compiled is None else compiled.uncollected_bytes(batch)
    if held <= peak.allocated_bytes / 100:
        return ()
    return (
        f"{COMPILE}: {format_bytes(held)} of the memory are tensors of the first compiled step, which Python's garbage collector gives "
        "back at a moment that nobody can tell: a run may take so much less",
    )


def compile_assumed(compiled: CompiledStep | None) -> Assumption:
    """What the figures of a compiled step rest on."""
    if compiled is None:
        return Assumption(what=COMPILE, value="with the eager step's memory", guessed=True)
    return Assumption(what=COMPILE, value=f"({compiled.mode}) as compiled on the virtual GPU, not compared with a card")


def run_steps(subject: Subject) -> float | None:
    """The optimizer steps of the whole run: max_steps, or the epochs over the samples; None where the config says neither."""
    job = subject.job
    if job.settings.max_steps is not None:
        return float(job.settings.max_steps)
    return None if job.data.samples is None else job.settings.epochs * job.data.samples / job.effective_batch


def over_the_run(time: StepTime, compiled: CompiledStep, steps: float | None) -> StepTime:
    """With the compile spread over the steps; as it is where their number is not known."""
    if not steps:
        return time
    share = time.step_s / (time.step_s + compiled.compile_s / steps)
    return replace(
        time,
        step_s=time.step_s / share,
        samples_per_s=time.samples_per_s * share,
        tokens_per_s=None if time.tokens_per_s is None else time.tokens_per_s * share,
        mfu=None if time.mfu is None else time.mfu * share,
    )


def compile_reason(compiled: CompiledStep | None, eager: StepTime, chosen: StepTime, steps: float | None) -> str:
    """Why it was chosen: what is saved, and when the compile has paid for itself."""
    if compiled is None:
        return f"fuses the memory-bound kernels, allowed by --allow {COMPILE}"
    seconds = format_seconds(compiled.compile_s)
    counted = f"the {seconds} to compile are {'in it' if steps else 'not in it, the length of the run is unknown'}"
    own_s = chosen.step_s - (compiled.compile_s / steps if steps else 0.0)
    saved_s = eager.step_s - own_s
    pays = f", and paid for after {compiled.compile_s / saved_s:.0f} steps" if saved_s > 0 else ""
    took = f"{format_seconds(chosen.step_s)} a step instead of {format_seconds(eager.step_s)}"
    return f"fuses the memory-bound kernels: {took}; {counted}{pays}; allowed by --allow {COMPILE}"
