"""A few real optimizer steps of one candidate in a child process, with arguments that write nothing.

The TrainingArguments of a dry run: what the job and the candidate say about a step, and nothing that writes, reports or lasts. Pure: takes
the names of the installed TrainingArguments' fields, so that it fits every version of transformers.

The device is the real card, the CPU, or the virtual GPU for a card that is not here. The child cannot hurt the caller: it has a time
limit, its own memory, and a guard that ends it with everything it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

from hfopt.errors import DryRunError
from hfopt.facts.training_keys import as_spelled
from hfopt.process import child_process
from hfopt.redact import said
from hfopt.schema import Candidate, EvaluationPeak, Gpu, TrainJob, Trial
from hfopt.units import format_seconds
from hfopt.virtual.environment import environment

Device = Literal["cuda", "cpu", "virtual"]
TOLD = "trial.json"  # what came of a dry run; whole once it is there
COMPILE_ORDER = "order.pickle"  # where it lies in its folder, a child compiles steps and looks at them (compiled_worker.py)


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """How much of a run a dry run is."""

    steps: int = 3  # the first has no optimizer state yet, the others have
    micro_batches: int | None = None  # that are run of each step, with the inputs of all on the device; None: all
    enough_s: float | None = None  # no further step is begun after so many seconds of a few; None: all steps


_KEPT = frozenset(
    {
        "adafactor",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "average_tokens_across_devices",
        "bf16_full_eval",
        "dataloader_pin_memory",
        "eval_accumulation_steps",
        "fp16_full_eval",
        "gradient_checkpointing_kwargs",
        "label_smoothing_factor",
        "learning_rate",
        "liger_kernel_config",
        "lr_scheduler_kwargs",
        "lr_scheduler_type",
        "max_grad_norm",
        "neftune_noise_alpha",
        "optim",
        "optim_args",
        "optim_target_modules",
        "per_device_eval_batch_size",
        "prediction_loss_only",
        "seed",
        "torch_empty_cache_steps",
        "warmup_steps",
        "weight_decay",
    }
)
"""Keys of the config that change what a step allocates or computes."""

_QUIET = {
    "dataloader_num_workers": 0,
    "disable_tqdm": True,
    "eval_strategy": "no",
    "logging_strategy": "no",
    "push_to_hub": False,
    "remove_unused_columns": False,
    "report_to": [],
    "save_strategy": "no",
}


def training_arguments(
    job: TrainJob,
    candidate: Candidate,
    *,
    device: Device,
    steps: int,
    output_dir: str,
    fields: Collection[str],
    evaluation: EvaluationPeak | None = None,
) -> dict[str, Any]:
    """Keyword arguments for TrainingArguments; keys this version does not have are left out. evaluation: instead of the job's own."""
    chosen = {key: value for key, value in job.raw.items() if key in _KEPT} | _QUIET | _precision(candidate, device)
    chosen |= {
        "output_dir": output_dir,
        "max_steps": steps,
        "per_device_train_batch_size": candidate.per_device_batch,
        "gradient_accumulation_steps": candidate.accumulation,
        "gradient_checkpointing": candidate.checkpointing.on,
        "torch_compile": candidate.torch_compile,
        **_compiler(job, candidate),
        "use_liger_kernel": candidate.use_liger_kernel,
        "use_cpu": device == "cpu",
    }
    if evaluation is not None:
        chosen |= {"per_device_eval_batch_size": evaluation.batch, "eval_accumulation_steps": evaluation.accumulation_steps}
    if candidate.optim is not None:
        chosen["optim"] = candidate.optim
    if candidate.checkpointing.on:
        chosen["gradient_checkpointing_kwargs"] = _checkpointing(job, candidate)
    return {key: value for key, value in as_spelled(chosen, fields).items() if key in fields}


def _precision(candidate: Candidate, device: Device) -> dict[str, Any]:
    tf32: bool | None = candidate.precision == "tf32"
    if device == "cpu":
        tf32 = None  # TrainingArguments refuses to hear of it without a card
    return {"bf16": candidate.precision == "bf16", "fp16": candidate.precision == "fp16", "tf32": tf32 or None}


def _compiler(job: TrainJob, candidate: Candidate) -> dict[str, Any]:
    """A backend or a mode would switch it on by itself."""
    return {key: job.raw.get(key) for key in ("torch_compile_backend", "torch_compile_mode")} if candidate.torch_compile else {}


def _checkpointing(job: TrainJob, candidate: Candidate) -> dict[str, Any]:
    options = dict(job.raw.get("gradient_checkpointing_kwargs") or {})
    options.pop("every_n_layers", None)
    options["use_reentrant"] = candidate.checkpointing.use_reentrant
    if candidate.checkpointing.every_n_layers > 1:
        options["every_n_layers"] = candidate.checkpointing.every_n_layers
    return options


_LONGEST_S = 3600.0  # a child nobody tells anything ends by itself
_PACKAGE_PARENT = Path(__file__).parents[2]


class Prepared:
    """A child that imports, reads the model and builds it on the device while the caller still thinks; then it is sent the candidate.

    It serves one candidate. `close` ends it and leaves nothing, used or not.
    """

    def __init__(
        self,
        job: TrainJob,
        *,
        device: Device,
        gpu: Gpu | None = None,
        context_bytes: int = 0,
        extent: Extent | None = None,
        eager: bool = False,
    ) -> None:
        """gpu: the card to stand in for, with device 'virtual'. context_bytes: what the CUDA context takes there. eager: nothing will be
        compiled, so that the compiler need not be imported."""
        self._device: Device = device
        with contextlib.ExitStack() as stack:
            self._folder = stack.enter_context(child_process.scratch_folder())
            env = child_environment(device, gpu, context_bytes, self._folder)
            self._order = stack.enter_context(write_order(job, device, extent or Extent(), self._folder, eager=eager))
            self._log = self._folder / "log"
            with self._log.open("wb") as output:
                command = [sys.executable, "-m", "hfopt.probe.dry_run_worker", str(self._folder)]
                self._running = child_process.start(command, folder=self._folder, timeout_s=_LONGEST_S, env=env, output=output)
            stack.callback(self._running.end)
            self._stack = stack.pop_all()

    def run(
        self,
        candidate: Candidate,
        *,
        evaluation: EvaluationPeak | None = None,
        timeout_s: float = 300.0,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> Trial:
        """Real optimizer steps with full accumulation windows of the longest batch, then an evaluation where the job evaluates.

        evaluation: what it evaluates with, when it is not the job's own. meanwhile: called while it runs.
        """
        self._order.write(pickle.dumps((candidate, evaluation)))
        end_s = time.monotonic() + timeout_s
        meanwhile()
        told = (self._folder / TOLD).exists if self._device == "virtual" else None  # what a card holds is free once its process is gone
        ended = self._running.wait(max(0.0, end_s - time.monotonic()), told)
        return Trial(device=self._device, candidate=candidate, **_facts(self._folder, ended, self._log, timeout_s))

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Prepared:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def dry_run(
    job: TrainJob,
    candidate: Candidate,
    *,
    device: Device,
    gpu: Gpu | None = None,
    context_bytes: int = 0,
    timeout_s: float = 300.0,
    steps: int = 3,
) -> Trial:
    """One candidate, now; the arguments are those of `Prepared`."""
    with Prepared(job, device=device, gpu=gpu, context_bytes=context_bytes, extent=Extent(steps=steps)) as prepared:
        return prepared.run(candidate, timeout_s=timeout_s)


def child_environment(device: Device, gpu: Gpu | None, context_bytes: int, folder: Path) -> dict[str, str]:
    env = dict(os.environ)
    if device == "virtual":
        if gpu is None:
            raise DryRunError("a dry run on the virtual GPU needs to know which card it stands in for")
        env = environment(gpu, context_bytes=context_bytes, state=folder / "board")
    elif device == "cuda":
        env["CUDA_VISIBLE_DEVICES"] = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # several would be a DataParallel run
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # the child is a run of its own
        env.pop(name, None)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(_PACKAGE_PARENT))))
    return env | {"PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false", "TMPDIR": str(folder)}


def write_order(job: TrainJob, device: Device, extent: Extent, folder: Path, *, eager: bool) -> IO[bytes]:
    """Writes what is known already, and returns where the candidate goes: a named pipe, open on both ends so that writing never blocks."""
    plain = replace(job, raw=dict(job.raw), model=replace(job.model, overrides=dict(job.model.overrides)))  # read-only views do not travel
    (folder / "job.pickle").write_bytes(pickle.dumps({"job": plain, "device": device, "extent": extent, "eager": eager}))
    pipe = folder / "candidate"
    os.mkfifo(pipe)
    return os.fdopen(os.open(pipe, os.O_RDWR), "wb", buffering=0)


def _facts(folder: Path, ended: child_process.Ended, log: Path, timeout_s: float) -> Mapping[str, Any]:
    if ended.reason == "timeout":
        return {"outcome": "timeout", "message": f"its time limit is {format_seconds(timeout_s)}"}
    try:
        facts: Mapping[str, Any] = json.loads((folder / TOLD).read_text())
    except (OSError, ValueError):
        facts = {"outcome": "error", "message": _how_it_died(ended, log)}
    message = facts.get("message")
    return {**facts, "message": said(message)} if message else facts


def _how_it_died(ended: child_process.Ended, log: Path) -> str:
    if ended.returncode == -9:
        return "the dry run was killed (signal 9); if nobody did that, the kernel did, because the machine ran out of memory"
    if ended.returncode < 0:
        return f"the dry run was ended by signal {-ended.returncode}"
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    return f"the dry run ended with exit code {ended.returncode}" + (f": {last[0]}" if last else "")
