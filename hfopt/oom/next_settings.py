"""From what a Trainer is to what it may do next: its settings as a candidate, the step down, and the record of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfopt.compat.transformers_patches import enable_checkpointing, is_checkpointing
from hfopt.oom import device_memory, record
from hfopt.oom.step_down import Refusal, Situation, next_step
from hfopt.schema import Candidate, Checkpointing, MemoryModel, NextSettings, OomSeen, Precision, ReplanStep, RunFailure


class Fit:
    def __init__(self, trainer: Any, *, memory: MemoryModel | None, log: record.Sink | None, settings: record.Settings | None) -> None:
        self._trainer = trainer
        self.memory = memory
        self._log = log
        self._settings = settings
        self.supervisor: record.Supervisor | None = None
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
        baseline = device_memory.read(self._trainer.args.device).allocated_bytes
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
        drops_out = step.action == "chunk" and self._draws_at_random()
        note = "dropout draws other masks for the pieces" if drops_out else None
        record.tell(record.sentence(seen, step, self.effective_batch, note))
        self.log(record.entry(seen, step, self.effective_batch))
        if step.candidate is None:
            self._end(RunFailure(action="give_up", reason=step.reason, smallest_change=step.smallest_change))
            return
        changes = self._changes(step.candidate)
        why = f"after running out of memory at step {seen.step} ({seen.phase}); the effective batch is still {self.effective_batch}"
        folder = Path(self._trainer.args.output_dir)
        try:
            (self._settings or functools.partial(record.write_settings, folder))(changes, why)
            if self.supervisor is not None:
                self.supervisor.goes_on_with(NextSettings(changes=changes, why=why))
        except OSError as error:  # a full disk must not end the training
            record.tell(f"hfopt: the new settings could not be written: {error}")
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

    def _draws_at_random(self) -> bool:
        import torch

        return any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in self._trainer.model.modules())
