"""Several devices: the cheapest engine that fits, with the reason each other one was not taken, and the command that starts the result.

Each engine is a plan of its own (same search, memory from its own sharded trace). DDP is taken when it fits. Else FSDP2, which comes with
torch; what sends less (kept weights, ZeRO-2) is tried where communication holds it back, and an installed DeepSpeed's ZeRO-3 where it
does not fit. Offloading is tried only when nothing else fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from hfopt.errors import ConfigError, NothingFits, TraceError
from hfopt.planner.device import device_of
from hfopt.planner.engines import ENGINE_KEYS, ENGINES, Engine, engine_args, engine_of, named_engine
from hfopt.planner.launch_words import commands
from hfopt.planner.request import Request, Subject
from hfopt.planner.result import Plan
from hfopt.planner.world import weight_bytes
from hfopt.schema import Change, Chosen, EngineChoice, MemoryPeak
from hfopt.units import format_bytes, format_percent

PlanOne = Callable[[Subject], Plan]
TIE = 0.02  # engines this close are equal; the earlier one in the list asks less of the installation


def plan_devices(subject: Subject, request: Request, plan_one: PlanOne) -> Plan:
    """The plan with the engine that suits; with one device, or for a process group that is already up, the config's own."""
    if subject.job.world_size < 2 or subject.loaded is None:
        if request.engine is not None and subject.job.world_size < 2:
            raise ConfigError(f"--engine {request.engine} is for several devices", hint="say how many with --num-gpus")
        return plan_one(subject)
    contest = _Contest(subject=subject, request=request, plan_one=plan_one)
    if request.engine is not None:
        return contest.only(named_engine(request.engine))
    own = engine_of(subject.job.args)
    if own is None and subject.job.kept.intersection(("fsdp", "fsdp_config", "deepspeed")):
        own = ENGINES[0]
    if own is not None:
        return contest.as_configured(own)
    return contest.best()


@dataclass(kw_only=True)
class _Contest:
    subject: Subject
    request: Request
    plan_one: PlanOne
    rejected: list[tuple[str, str]] = field(default_factory=list)
    plans: dict[str, Plan] = field(default_factory=dict)
    last: NothingFits | None = None

    # ------------------------------------------------------------------------------------------ the rules

    def best(self) -> Plan:
        by_key = {engine.key: engine for engine in ENGINES}
        if self._try(by_key["ddp"]):
            return self._made(by_key["ddp"], "the model fits on each device, and nothing but gradients is exchanged")
        for engine in (engine for engine in ENGINES[1:] if not engine.offloads):
            if engine.key != "fsdp2-keep" or self._communicates():
                self._try(engine)
        if not self.plans:
            for engine in (engine for engine in ENGINES if engine.offloads):
                self._try(engine)
        if not self.plans:
            raise self._nothing()
        chosen = self._fastest()
        others = [key for key in self.plans if key != chosen]
        for key in others:
            slower = self.plans[key].facts.after.time.step_s / self.plans[chosen].facts.after.time.step_s - 1
            how = f"{format_percent(slower)} slower" if slower > TIE else "as fast, but asks more of the installation"
            self.rejected.append((by_key[key].words, how))
        return self._made(by_key[chosen], _why(by_key[chosen], bool(others)))

    def only(self, engine: Engine) -> Plan:
        if not self._try(engine, asked=True):
            raise self._nothing()
        return self._made(engine, f"asked for with --engine {engine.key}")

    def as_configured(self, own: Engine) -> Plan:
        plan = self.plan_one(self.subject)
        choice = EngineChoice(name=own.words, reason="the config says so", commands=commands(self.subject, self.request))
        return replace(plan, facts=replace(plan.facts, engine=choice))

    # ------------------------------------------------------------------------------------------ one engine

    def _try(self, engine: Engine, *, asked: bool = False) -> bool:
        why_not = self._refused(engine, asked=asked)
        if why_not is not None:
            self.rejected.append((engine.words, why_not))
            return False
        try:
            self.plans[engine.key] = self.plan_one(self._with(engine))
        except NothingFits as error:
            self.last = error
            self.rejected.append((engine.words, str(error).removeprefix("nothing fits: ")))
            return False
        except TraceError as error:
            if asked:
                raise
            self.rejected.append((engine.words, str(error)))
            return False
        return True

    def _refused(self, engine: Engine, *, asked: bool) -> str | None:
        if engine.family == "deepspeed" and not asked and find_spec("deepspeed") is None:
            return f"DeepSpeed is not installed here; --engine {engine.key} plans for it all the same"
        if engine.family == "ddp":
            return self._too_large(least_state_bytes(self.subject), "weights, gradients and optimizer states")
        if "fsdp2" in self.plans and engine.zero_stage == 3:
            return "gathers and keeps no less than FSDP2, which fits: not traced"
        if "fsdp2" in self.plans and engine.zero_stage == 2 and not self._communicates():
            return "sends less than FSDP2 but keeps whole weights, and it is not communication that holds FSDP2 back: not traced"
        spec = self.subject.job.model
        if engine.zero_stage == 2:
            bits = 16 if spec.quantization is None else spec.quantization.bits
            return self._too_large(self.subject.workload.parameters * bits // 8, "whole weights")
        if spec.quantization is not None and (engine.family == "fsdp" or engine.zero_stage == 3):
            return f"{spec.quantization.bits}-bit weights are not sharded: their bytes are no numbers that could be gathered in parts"
        return None

    def _too_large(self, least_bytes: int, what: str) -> str | None:
        """Without a single activation: known without a trace."""
        budget = device_of(self.subject, self.request).budget_bytes
        if least_bytes <= budget:
            return None
        return f"{what} alone take {format_bytes(least_bytes)} on each device, {format_bytes(budget)} may be used"

    def _with(self, engine: Engine) -> Subject:
        job = self.subject.job
        args = engine_args(engine, job, block_classes(self.subject) if engine.family == "fsdp" else (), adapters=job.model.lora is not None)
        return replace(self.subject, job=replace(job, args=args))

    def _communicates(self) -> bool:
        """Is it communication that holds FSDP2 back? Else sending less gains nothing."""
        plan = self.plans.get("fsdp2")
        return plan is not None and plan.facts.after.time.bound == "communication"

    # ------------------------------------------------------------------------------------------ the answer

    def _fastest(self) -> str:
        best_s = min(plan.facts.after.time.step_s for plan in self.plans.values())
        return next(key for key, plan in self.plans.items() if plan.facts.after.time.step_s <= best_s * (1 + TIE))

    def _made(self, engine: Engine, reason: str) -> Plan:
        plan = self.plans[engine.key]
        own, planned = self.subject.job, self._with(engine).job
        alone = plan.facts.after.candidate.accumulation == 1  # nothing is accumulated, so nothing needs to be reduced early
        changes = tuple(c for c in _changes(own.args, planned.args, engine, reason) if not (alone and c.key == "accelerator_config"))
        choice = EngineChoice(
            name=engine.words,
            reason=reason,
            rejected=tuple(self.rejected),
            commands=commands(self.subject, self.request),
            deepspeed=planned.args.get("deepspeed"),
        )
        facts = replace(plan.facts, job=own, changes=(*changes, *plan.facts.changes), engine=choice)
        if engine.key != "ddp" and "ddp" not in self.plans and self.request.engine is None:
            facts = replace(facts, before=self._before(facts.before))
        return replace(plan, facts=facts)

    def _before(self, sharded: Chosen) -> Chosen:
        """The config as it was runs under DDP, where at least its states do not fit."""
        memory = sharded.memory
        states = max(least_state_bytes(self.subject), memory.allocated_bytes)
        peak = MemoryPeak(batch=memory.batch, allocated_bytes=states, reserved_bytes=states, context_bytes=memory.context_bytes)
        return replace(sharded, memory=peak, fits=False)

    def _nothing(self) -> NothingFits:
        lines = "\n".join(f"    {words}: {why}" for words, why in self.rejected)
        hint = self.last.hint if self.last is not None else None
        return NothingFits(f"nothing fits on {self.subject.job.world_size} devices:\n{lines}", hint=hint)


def _why(engine: Engine, others: bool) -> str:
    if engine.offloads:
        return "nothing fits without the host's memory"
    return "DDP does not fit; the fastest engine that does" if others else "DDP does not fit; this does"


def _changes(before: Any, after: Any, engine: Engine, reason: str) -> Iterator[Change]:
    whys = {
        "fsdp": f"{engine.words}: {reason}",
        "fsdp_config": "what the prediction rests on: each block is sharded and gathered on its own",
        "deepspeed": f"{engine.words}: {reason}",
        "accelerator_config": "gradients are reduced after each micro-batch: whole ones through the accumulation would undo the sharding",
        "ddp_backend": "gradients on the host are summed there for clipping, which NCCL alone cannot do",
    }
    for key in ENGINE_KEYS:
        if before.get(key) != after.get(key):
            yield Change(key=key, before=before.get(key), after=after.get(key), reason=whys[key])


def least_state_bytes(subject: Subject) -> int:
    """What each device holds under DDP at the least: weights, gradients, their buckets, and the states of an optimizer that is known."""
    workload, stored = subject.workload, weight_bytes(subject)
    optim = str(subject.job.args.get("optim") or "adamw_torch")
    states = 2 * stored if optim in ("adamw_torch", "adamw_torch_fused", "adamw_hf") else 0
    packed = subject.job.model.quantization
    weights = workload.parameters * stored if packed is None else workload.parameters * packed.bits // 8
    return weights + workload.trainable_parameters * (2 * stored + states)


def block_classes(subject: Subject) -> tuple[str, ...]:
    """The classes of the repeated blocks: what FSDP wraps one by one."""
    import torch

    from hfopt.model.builder import Recipe

    build = subject.workload.build_model
    if isinstance(build, Recipe):
        build = replace(build, spec=replace(build.spec, lora=None, quantization=None))
    with torch.device("meta"):
        model = build()
    names: dict[str, None] = {}
    outer: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{prefix}.") for prefix in outer) or not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
            continue
        if len(module) > 1 and len({type(block) for block in module}) == 1 and _is_block(module[0]):
            outer.append(name)
            names[type(module[0]).__name__] = None
    return tuple(names) or tuple(getattr(model, "_no_split_modules", None) or ())


def _is_block(module: Any) -> bool:
    """A layer with parts of its own, not a bare projection in a list."""
    return any(True for _ in module.children()) and any(True for _ in module.parameters())
