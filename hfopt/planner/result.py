"""The plan as a value: facts, and what can be done with them (apply to arguments, write the YAML, print the report)."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hfopt.config.read_job import Loaded
from hfopt.config.yaml_edit import Edited, edit
from hfopt.errors import ConfigError
from hfopt.facts.training_keys import both_spellings
from hfopt.schema import Candidate, Change, Chosen, EvaluationPeak, PlanCharts, PlanFacts, PlannedMemory, Priced
from hfopt.schema.outputs import ChosenOutput, EvaluationOutput, PlanOutput, SettingsOutput, VerifiedOutput
from hfopt.store import plain


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """What `plan()` returns. `alternatives` are the candidates that fit, best first, the chosen one not among them."""

    facts: PlanFacts
    loaded: Loaded | None = None
    charts: PlanCharts = field(default_factory=PlanCharts)
    seconds: dict[str, float] = field(default_factory=dict)  # where the time of planning went
    trial_runs: int = 0  # dry runs it took
    curve: Callable[[], PlannedMemory] | None = field(default=None, repr=False, compare=False)  # makes `memory`, when it is asked for

    def __repr__(self) -> str:
        """One line: a plan holds its config, its curves and its trials, which nobody reads in a debugger."""
        chosen, facts = self.candidate, self.facts
        batch = f"{chosen.per_device_batch} × {chosen.accumulation}"
        return f"<Plan for {device_name(facts)}: {batch} {chosen.precision}, {len(facts.changed_lines)} changes>"

    @property
    def changes(self) -> tuple[Change, ...]:
        """What changes and why, repairs of outdated keys included, in the order of the report."""
        return self.facts.changed_lines

    @property
    def candidate(self) -> Candidate:
        return self.facts.after.candidate

    @property
    def alternatives(self) -> tuple[Priced, ...]:
        return self.facts.alternatives

    @cached_property
    def memory(self) -> PlannedMemory | None:
        """The memory curve by which a fallback chooses smaller pieces: `hfopt.protect(trainer, plan=plan)`."""
        return self.curve() if self.curve is not None else None

    def apply(self, args: Any) -> Any:
        """A copy of a TrainingArguments with the planned values; the one given stays as it is."""
        planned = {change.key: change.after for change in self.facts.changes}
        names = {item.name for item in dataclasses.fields(args) if item.init}
        unknown = sorted(set(planned) - names)
        if unknown:
            raise ConfigError(f"{type(args).__name__} has no {unknown[0]}")
        return dataclasses.replace(args, **both_spellings(planned, args))

    def edited(self) -> Edited:
        if self.loaded is None:
            raise ConfigError("this plan was not made from a YAML file", hint="use apply() on the TrainingArguments instead")
        return edit(self.loaded, self.facts.changes)

    def to_yaml(self) -> str:
        """The config's own text with the planned values; from Python arguments, the changed keys alone."""
        if self.loaded is not None:
            return self.edited().data.decode("utf-8")
        import yaml

        text: str = yaml.safe_dump({change.key: change.after for change in self.facts.changes}, sort_keys=False)
        return text

    def with_deepspeed_file(self, path: str) -> Plan:
        """The same plan whose YAML names a file for the DeepSpeed config instead of holding it; the file is the caller's to write."""
        changes = tuple(replace(c, after=path) if c.key == "deepspeed" and c.after is not None else c for c in self.facts.changes)
        return replace(self, facts=replace(self.facts, changes=changes))

    def started_with(self, config: str) -> Plan:
        """The same plan whose commands end with this config."""
        choice = self.facts.engine
        if choice is None:
            return self
        commands = tuple(shlex.join([*shlex.split(command)[:-1], config]) for command in choice.commands)
        return replace(self, facts=replace(self.facts, engine=replace(choice, commands=commands)))

    def report(self, *, verbose: bool = False) -> str:
        """The words of `hfopt plan`, without colours; `verbose` adds runners-up, rejected settings, the parts of the memory and notes."""
        from hfopt.report.one_screen import plan_text

        return plan_text(self.facts, verbose=verbose)

    def __str__(self) -> str:
        return self.report()

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from hfopt.report.one_screen import plan_html

        return plan_html(self.facts)

    def _repr_markdown_(self) -> str:
        from hfopt.report.one_screen import plan_markdown

        return plan_markdown(self.facts)

    def to_json(self) -> dict[str, Any]:
        """The object of `hfopt plan --json`."""
        made: dict[str, Any] = plain(self.output())
        return made

    def output(self) -> PlanOutput:
        facts = self.facts
        return {
            "assumed": facts.assumed,
            "warnings": facts.warnings,
            "effective_batch": facts.effective_batch,
            "device": device_name(facts),
            "budget_bytes": facts.budget_bytes,
            "changes": facts.changed_lines,
            "before": chosen_output(facts.before),
            "after": chosen_output(facts.after),
            "verified": _verified(facts),
            "alternatives": [
                {
                    **_settings(p.candidate),
                    "samples_per_s": p.time.samples_per_s,
                    "step_s": p.time.step_s,
                    "peak_reserved_bytes": p.memory.reserved_bytes,
                }
                for p in facts.alternatives
            ],
            "rejected": [{**_settings(r.candidate), "reason": r.reason} for r in facts.rejected],
            "advice": facts.advice,
            "notes": facts.notes,
            "weights_dtype": facts.weights_dtype,
            "phases": facts.phases,
            "engine": facts.engine,
        }


def device_name(facts: PlanFacts) -> str:
    gpu = facts.hardware.smallest
    if gpu is None:
        return facts.hardware.host.cpu_name or "CPU"
    count = len(facts.hardware.gpus)
    return gpu.name if count == 1 else f"{count} × {gpu.name}"


def _verified(facts: PlanFacts) -> VerifiedOutput | None:
    """What was measured, and beside it what was predicted for the same candidate; an error is predicted over measured, less one."""
    trial, found = facts.trial, facts.correction
    if trial is None:
        return None
    measured: VerifiedOutput = {
        "device": trial.device,
        "candidate": trial.candidate,
        "outcome": trial.outcome,
        "peak_allocated_bytes": trial.peak_allocated_bytes,
        "peak_reserved_bytes": trial.peak_reserved_bytes,
        "peak_device_bytes": trial.peak_device_bytes,
        "eval_peak_reserved_bytes": trial.eval_peak_reserved_bytes,
        "step_s": trial.step_s,
        "cpu_s": trial.cpu_s,
        "data_wait_s": trial.data_wait_s,
        "message": trial.message,
    }
    if found is None:
        return measured
    return {
        **measured,
        "predicted_reserved_bytes": found.predicted_reserved_bytes,
        "predicted_step_s": found.predicted_step_s,
        "memory_error": found.memory_error,
        "time_error": found.time_error,
    }


def _settings(candidate: Candidate) -> SettingsOutput:
    return {
        "per_device_batch": candidate.per_device_batch,
        "accumulation": candidate.accumulation,
        "precision": candidate.precision,
        "checkpointing_every_n_layers": candidate.checkpointing.every_n_layers,
        "optim": candidate.optim,
        "torch_compile": candidate.torch_compile,
        "use_liger_kernel": candidate.use_liger_kernel,
        "attn_implementation": candidate.attn_implementation,
    }


def chosen_output(chosen: Chosen) -> ChosenOutput:
    return {
        **_settings(chosen.candidate),
        "samples_per_s": chosen.time.samples_per_s,
        "rate_error": chosen.time.rate_error,
        "step_s": chosen.time.step_s,
        "clock_share": chosen.time.clock_share,
        "power_w": chosen.time.power_w,
        "gpu_utilization": chosen.time.gpu_utilization,
        "bound": chosen.time.bound,
        "mfu": chosen.time.mfu,
        "peak_reserved_bytes": chosen.memory.reserved_bytes,
        "peak_allocated_bytes": chosen.memory.allocated_bytes,
        "peak_device_bytes": chosen.memory.device_bytes,
        "breakdown": chosen.memory.breakdown,
        "dataloader_num_workers": chosen.loader.workers,
        "fits": chosen.fits,
        "fault": chosen.fault,
        "evaluation": None if chosen.evaluation is None else _evaluation(chosen.evaluation),
    }


def _evaluation(found: EvaluationPeak) -> EvaluationOutput:
    return {
        "per_device_eval_batch_size": found.batch,
        "eval_accumulation_steps": found.accumulation_steps,
        "keeps_predictions": found.keeps_predictions,
        "kept_bytes_per_sample": found.kept_bytes_per_sample,
        "peak_allocated_bytes": found.memory.allocated_bytes,
        "fits": found.fits,
    }
