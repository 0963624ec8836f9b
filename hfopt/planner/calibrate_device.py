"""`hfopt calibrate`: kernels and a Trainer's steps measured on the device that is here, put together into one calibration.

The steps are those of a small Llama with random weights, which on a card wait for their launches: with the kernels' own rates known, the
time of a step says what the host needs for each launch. The factor is found by halving, since host and device overlap. On the CPU both
are one, and the whole step is scaled.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from hfopt.compat.versions import package_version
from hfopt.errors import HardwareError
from hfopt.hardware.detect import detect
from hfopt.job.request import Progress, Request
from hfopt.job.subject import Subject, from_file
from hfopt.pricing.target_device import config_step, world_of
from hfopt.schema import Candidate, Gpu, Hardware, OpCost
from hfopt.speed.calibration import CPU, Calibration, calibrated
from hfopt.speed.device_speed import Speed, cpu_speed, speed_of
from hfopt.speed.kernel_rates import KernelRates, kernel_rates
from hfopt.speed.step_time import StepTimer

BATCH, TOKENS, STEPS = 8, 128, 4
LEAST, MOST, HALVINGS = 0.05, 50.0, 40
_MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": TOKENS,
}
STEP_WORDS = f"Llama of 8 layers of 256, {BATCH} × {TOKENS} tokens, float32"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """A Trainer's step, and its kernels as traced."""

    step_s: float
    ops: Sequence[OpCost]


def calibrate_device(*, trainer_steps: bool = True, progress: Progress = lambda text: None) -> tuple[Calibration, str | None]:
    """(what was measured, why the Trainer's steps were not, where they were not). Some seconds to a minute."""
    import torch

    hardware = detect()
    gpu = _card(hardware)
    progress("kernels: matrix products, a copy, a reduction, tiny operations")
    rates = kernel_rates(torch.device("cuda" if gpu is not None else "cpu"))
    made = _from_rates(hardware, gpu, rates, threads=torch.get_num_threads() if gpu is None else None)
    if not trainer_steps:
        return made, "not asked for"
    progress(f"steps of a real Trainer: {STEP_WORDS}")
    step, why_not = measured_step(gpu)
    if step is None:
        return made, why_not
    return with_step(made, _table_speed(gpu), step), None


def _card(hardware: Hardware) -> Gpu | None:
    """The card to measure, or None for the CPU; a card that torch cannot use is said."""
    import torch

    if not hardware.gpus:
        return None
    if not torch.cuda.is_available():
        raise HardwareError(f"{hardware.gpus[0].name} is here, but this torch cannot use it", hint="`hfopt doctor` says why")
    return hardware.gpus[0]


def _from_rates(hardware: Hardware, gpu: Gpu | None, rates: KernelRates, *, threads: int | None) -> Calibration:
    host = hardware.host
    return Calibration(
        device=(gpu.catalog_name or gpu.name) if gpu is not None else host.cpu_name or CPU,
        kind="cpu" if gpu is None else "cuda",
        torch=package_version("torch") or "unknown",
        transformers=package_version("transformers"),
        cpu_name=host.cpu_name,
        cores=host.cores,
        threads=threads,
        date=date.today().isoformat(),
        matmul_flops=rates.matmul_flops,
        memory_bytes_per_s=rates.memory_bytes_per_s,
        reduction_bytes_per_s=rates.reduction_bytes_per_s,
        op_s=rates.op_s,
        power_limit_w=None if gpu is None else gpu.power_limit_w,
        driver=hardware.driver_version,
    )


def measured_step(gpu: Gpu | None) -> tuple[MeasuredStep | None, str | None]:
    """Real steps in a child process, and the same step traced."""
    from hfopt.memory.step_memory import estimate
    from hfopt.probe.dry_run import dry_run

    with tempfile.TemporaryDirectory(prefix="hfopt-calibrate-") as folder:
        subject = _subject(Path(folder), gpu)
        candidate = Candidate(per_device_batch=BATCH, accumulation=1, precision="fp32")
        trial = dry_run(subject.job, candidate, device="cpu" if gpu is None else "cuda", steps=STEPS)
        if trial.outcome != "ok" or trial.step_s is None:
            return None, f"the Trainer's steps ended with {trial.outcome}: {trial.message or 'no message'}"
        traced = estimate(subject.workload, config_step(subject, world_of(subject)))
    return MeasuredStep(step_s=trial.step_s, ops=traced.ops), None


def _subject(folder: Path, gpu: Gpu | None) -> Subject:
    (folder / "config.json").write_text(json.dumps(_MODEL))
    config = folder / "calibrate.yaml"
    lines = [f"model_name_or_path: {folder}", f"max_length: {TOKENS}", "output_dir: out", f"per_device_train_batch_size: {BATCH}"]
    config.write_text("\n".join([*lines, f"use_cpu: {'true' if gpu is None else 'false'}"]) + "\n")
    return from_file(config, Request(dry_run=False, task="causal_lm", seq_len=TOKENS, samples=1000))


def _table_speed(gpu: Gpu | None) -> Speed:
    known = cpu_speed() if gpu is None else speed_of(gpu)
    if known is None:
        raise HardwareError(f"{gpu.name if gpu else 'the CPU'} is not in the catalog", hint="its bandwidth and peaks are needed first")
    return known


def with_step(made: Calibration, table: Speed, step: MeasuredStep) -> Calibration:
    """The same with the factor at which the step is predicted as it was measured: on the host's costs, or on all of a CPU's.

    A card that is never waited for by its host says nothing about launches: then there is no factor."""
    alone = calibrated(table, replace(made, launch_scale=None, step_scale=None))

    def predicted_s(factor: float) -> float:
        return StepTimer(step.ops, replace(alone, host=alone.host.scaled(factor)), "fp32").at(BATCH).step_s

    before_s = predicted_s(1.0)
    seen = replace(made, trainer_step_s=step.step_s, predicted_step_s=before_s, measured_step=STEP_WORDS)
    if not table.asynchronous:
        return replace(seen, step_scale=step.step_s / before_s)
    if not predicted_s(LEAST) < step.step_s < predicted_s(MOST):
        return seen
    low, high = LEAST, MOST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted_s(middle) < step.step_s else (low, middle)
    return replace(seen, launch_scale=(low + high) / 2)
