"""What a Trainer may do after an out-of-memory error: its settings, the step down, memory given back, and the record of it."""

from __future__ import annotations

import functools
import gc
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from hfopt.compat.transformers_patches import enable_checkpointing, is_checkpointing
from hfopt.facts.oom_errors import Oom
from hfopt.files import write_whole
from hfopt.oom.step_down import Refusal, Situation, next_step
from hfopt.redact import said
from hfopt.schema import Candidate, Checkpointing, MemoryModel, NextSettings, OomSeen, Precision, ReplanStep, RunFailure
from hfopt.units import format_bytes

Phase = Literal["forward", "backward", "optimizer", "evaluation", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNow:
    """All None on a device whose allocator keeps no books (the CPU)."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    capacity_bytes: int | None = None  # what this process could have at most: reserved and free together


def memory_now(device: torch.device) -> MemoryNow:
    if device.type == "cuda":
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        free, total = torch.cuda.mem_get_info(device)
        limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
        return MemoryNow(allocated_bytes=allocated, reserved_bytes=reserved, capacity_bytes=min(reserved + free, limit))
    if device.type == "mps":
        allocated, reserved = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
        return MemoryNow(allocated_bytes=allocated, reserved_bytes=reserved, capacity_bytes=torch.mps.recommended_max_memory())
    return MemoryNow()


def oom_seen(trainer: Any, known: Oom, phase: Phase, micro_batch: int, inputs: Any = None) -> OomSeen:
    """What can be read of a failure while its step is still alive."""
    now = memory_now(trainer.args.device)
    ids = inputs.get("input_ids") if hasattr(inputs, "get") else None
    return OomSeen(
        phase=phase,
        step=trainer.state.global_step,
        micro_batch=micro_batch,
        length=int(ids.shape[1]) if isinstance(ids, torch.Tensor) and ids.dim() == 2 else None,
        allocated_bytes=now.allocated_bytes,
        reserved_bytes=now.reserved_bytes,
        requested_bytes=known.requested_bytes,
        capacity_bytes=now.capacity_bytes,
    )


def give_memory_back(device: torch.device) -> None:
    """Frees what nobody holds: cycles, autocast's copies of the weights, cached blocks. A broken device shows here."""
    torch.clear_autocast_cache()
    gc.collect()
    module: Any = getattr(torch, device.type, None)
    if device.type != "cpu" and module is not None:
        module.synchronize()
        module.empty_cache()


Sink = Callable[[Mapping[str, Any]], None]
"""Takes one entry of the run's log."""
Settings = Callable[[Mapping[str, Any], str], None]
"""Takes the settings to start from next time, and why; the CLI puts them into the user's own YAML."""


class Supervisor(Protocol):
    """Who starts the run again when a process of it cannot go on."""

    def start_again_with(self, settings: NextSettings) -> None: ...

    def failed(self, failure: RunFailure) -> None: ...


REPLANNED = "config_replanned.yaml"

_DID: dict[str, str] = {
    "retry_after_clearing": "the step runs again after clearing the cache",
    "chunk": "the step runs again in pieces of {size}",
    "checkpointing": "the step runs again with gradient checkpointing, {size} at a time",
    "restart": "this process cannot go on; resume from the last checkpoint with {size} × {accumulation}{checkpointing}",
    "give_up": "nothing is left to try; what would fit: {smallest}",
}


def replan_sentence(seen: OomSeen, step: ReplanStep, effective_batch: int) -> str:
    """'hfopt: out of memory at step 7 (forward, 16 samples of 512 tokens): the step runs again in pieces of 8; effective batch still 64'"""
    samples = f"{seen.micro_batch} sample{'s' if seen.micro_batch != 1 else ''}" + (f" of {seen.length} tokens" if seen.length else "")
    asked = f", {format_bytes(seen.requested_bytes)} more asked for" if seen.requested_bytes else ""
    size = step.candidate.per_device_batch if step.candidate else None
    accumulation = step.candidate.accumulation if step.candidate else None
    checkpointing = " and gradient checkpointing" if step.candidate and step.candidate.checkpointing.on else ""
    did = _DID[step.action].format(size=size, accumulation=accumulation, checkpointing=checkpointing, smallest=step.smallest_change)
    kept = "" if step.action == "give_up" else f"; effective batch still {effective_batch}"
    return f"hfopt: out of memory at step {seen.step} ({seen.phase}, {samples}{asked}): {did}{kept}"


def say(line: str) -> None:
    sys.stderr.write(f"{said(line)}\n")
    sys.stderr.flush()


def log_entry(seen: OomSeen, step: ReplanStep, effective_batch: int) -> dict[str, Any]:
    """The log's entry, plain data."""
    return {"seen": asdict(seen), "step": asdict(step), "effective_batch": effective_batch}


def write_settings(folder: Path, changes: Mapping[str, Any], why: str) -> None:
    """The settings that went through, as a small YAML beside the run's own output."""
    lines = [f"# {why}", *(f"{key}: {json.dumps(value)}" for key, value in changes.items())]
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / REPLANNED, "\n".join(lines) + "\n")


class Fit:
    def __init__(self, trainer: Any, *, memory: MemoryModel | None, log: Sink | None, settings: Settings | None) -> None:
        self._trainer = trainer
        self.memory = memory
        self._log = log
        self._settings = settings
        self.supervisor: Supervisor | None = None
        self._smallest: int | None = None

    @property
    def effective_batch(self) -> int:
        args = self._trainer.args
        return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)

    def candidate(self, size: int) -> Candidate:
        """What runs now, as if its pieces were the micro-batches: the effective batch is the same."""
        args = self._trainer.args
        product = args.per_device_train_batch_size * args.gradient_accumulation_steps
        precision: Precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
        on = is_checkpointing(self._trainer.model) is True
        return Candidate(
            per_device_batch=size,
            accumulation=max(1, product // size),
            precision=precision,
            checkpointing=Checkpointing(every_n_layers=int(on)),
        )

    def step_down(self, seen: OomSeen, *, refusal: Refusal | None, lost: str | None, cleared: bool) -> ReplanStep:
        """Decides, tells the user, writes it down."""
        baseline = memory_now(self._trainer.args.device).allocated_bytes
        seen = OomSeen(**{**{name: getattr(seen, name) for name in OomSeen.__dataclass_fields__}, "baseline_bytes": baseline})
        step = next_step(
            Situation(
                failed=self.candidate(seen.micro_batch),
                seen=seen,
                memory=self.memory,
                cleared=cleared,
                can_checkpoint=self._can_checkpoint(),
                refusal=refusal,
                process_lost=lost,
            )
        )
        self._record(seen, step)
        return step

    def process_lost(self) -> str | None:
        """Ways of training whose processes exchange weights within a step, so that none can repeat it alone."""
        trainer = self._trainer
        if getattr(trainer, "is_deepspeed_enabled", False):
            return "DeepSpeed's ranks exchange weights within the step"
        if getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_fsdp_xla_enabled", False):
            return "FSDP's ranks exchange weights within the step"
        if getattr(trainer, "is_tp_enabled", False) or getattr(trainer.accelerator, "parallelism_config", None) is not None:
            return "the ranks share each sample's work"
        return None

    def enable_checkpointing(self) -> None:
        enable_checkpointing(self._trainer.model, {"use_reentrant": False})

    def _can_checkpoint(self) -> bool:
        return bool(getattr(self._trainer.model, "supports_gradient_checkpointing", False)) and not self._trainer.args.torch_compile

    def _record(self, seen: OomSeen, step: ReplanStep) -> None:
        say(replan_sentence(seen, step, self.effective_batch))
        self.log(log_entry(seen, step, self.effective_batch))
        if step.candidate is None:
            self._end(RunFailure(action="give_up", reason=step.reason, smallest_change=step.smallest_change))
            return
        changes = self._changes(step.candidate)
        why = f"after running out of memory at step {seen.step} ({seen.phase}); the effective batch is still {self.effective_batch}"
        folder = Path(self._trainer.args.output_dir)
        try:
            (self._settings or functools.partial(write_settings, folder))(changes, why)
            if self.supervisor is not None:
                self.supervisor.start_again_with(NextSettings(changes=changes, why=why))
        except OSError as error:  # a full disk must not end the training
            say(f"hfopt: the new settings could not be written: {error}")
        if step.action == "restart":
            self._end(RunFailure(action="restart", reason=step.reason, output_dir=str(folder.resolve()), changes=changes))

    def _end(self, failure: RunFailure) -> None:
        if self.supervisor is not None:
            self.supervisor.failed(failure)

    def log(self, entry: Mapping[str, Any]) -> None:
        """To the given sink, else to the monitor among the Trainer's callbacks."""
        from hfopt.monitor.callback import HFGpuMonitor

        if self._log is not None:
            self._log(entry)
            return
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, HFGpuMonitor):
                callback.write("fallback", **entry)

    def _changes(self, candidate: Candidate) -> dict[str, Any]:
        """The settings for the next run: the smallest size that was needed, as an exact divisor."""
        args = self._trainer.args
        product = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self._smallest = min(self._smallest or candidate.per_device_batch, candidate.per_device_batch)
        size = max(divisor for divisor in range(1, self._smallest + 1) if product % divisor == 0)
        changes: dict[str, Any] = {"per_device_train_batch_size": size, "gradient_accumulation_steps": product // size}
        if candidate.checkpointing.on:
            changes["gradient_checkpointing"] = True
        return changes
