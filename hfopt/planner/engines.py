"""Several devices: the engines that share one model, the cheapest that fits, and the command that starts it.

The exact command that starts a planned config on several devices; the script's name is the user's. The engines that let several devices
share one model: what each writes into the config, in the order they are tried. DDP repeats the model on each device, so it is tried first
and taken when it fits. FSDP2 shards weights, gradients and optimizer states; it comes with torch. ZeRO-2 shards gradients and states,
ZeRO-3 weights too; they need DeepSpeed. Offloading to the host's memory is slow and comes last.

Each engine is a plan of its own (same search, memory from its own sharded trace). DDP is taken when it fits. Else FSDP2, which comes with
torch; what sends less (kept weights, ZeRO-2) is tried where communication holds it back, and an installed DeepSpeed's ZeRO-3 where it
does not fit. Offloading is tried only when nothing else fits.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hfopt.compat.versions import release
from hfopt.config.settings import step_settings, with_raw
from hfopt.errors import ConfigError, NothingFits, TraceError
from hfopt.facts.training_keys import installed
from hfopt.job.request import Request
from hfopt.job.subject import Subject
from hfopt.memory.step_memory import state_bytes
from hfopt.memory.trace_store import kept_count, kept_names
from hfopt.planner.block_recompute import OWN, WHY, as_chosen, with_own_checkpointing
from hfopt.planner.result import Plan
from hfopt.pricing.target_device import device_of, weight_bytes
from hfopt.schema import Change, Chosen, EngineChoice, EngineSettings, MemoryPeak, TrainJob, Workload
from hfopt.units import format_bytes, format_percent

PORT = 29500  # torchrun's own


def commands(subject: Subject, request: Request) -> tuple[str, ...]:
    """With accelerate and with torchrun; both read FSDP and DeepSpeed settings from the TrainingArguments."""
    per_node = max(1, len(subject.hardware.gpus))
    config = shlex.quote(Path(subject.job.path).name) if subject.job.path else "config.yaml"
    if request.nodes == 1:
        return (
            f"accelerate launch --multi_gpu --num_processes {per_node} train.py {config}",
            f"torchrun --nproc_per_node {per_node} train.py {config}",
        )
    machines = f"--num_machines {request.nodes} --machine_rank RANK --main_process_ip HOST --main_process_port {PORT}"
    meeting = f"--rdzv_backend c10d --rdzv_endpoint HOST:{PORT}"
    return (
        f"accelerate launch --multi_gpu --num_processes {per_node * request.nodes} {machines} train.py {config}",
        f"torchrun --nnodes {request.nodes} --nproc_per_node {per_node} {meeting} train.py {config}",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    key: str  # as --engine names it
    words: str
    offloads: bool = False
    zero_stage: int | None = None
    reshard: bool = True

    @property
    def family(self) -> str:
        return "deepspeed" if self.zero_stage else "fsdp" if self.key.startswith("fsdp") else "ddp"


ENGINES: tuple[Engine, ...] = (
    Engine(key="ddp", words="DDP"),
    Engine(key="fsdp2", words="FSDP2"),
    Engine(key="fsdp2-keep", words="FSDP2 that keeps gathered weights until the backward", reshard=False),
    Engine(key="zero2", words="ZeRO-2", zero_stage=2),
    Engine(key="zero3", words="ZeRO-3", zero_stage=3),
    Engine(key="fsdp2-offload", words="FSDP2 with CPU offload", offloads=True),
    Engine(key="zero2-offload", words="ZeRO-2 with CPU offload", offloads=True, zero_stage=2),
    Engine(key="zero3-offload", words="ZeRO-3 with CPU offload", offloads=True, zero_stage=3),
)
ENGINE_KEYS = ("fsdp", "fsdp_config", "deepspeed", "accelerator_config", "ddp_backend")
OFFLOADED_BYTES = 16  # of a trained weight: itself, its gradient and Adam's two states in float32
BOTH_BACKENDS = "cuda:nccl,cpu:gloo"


def named_engine(key: str) -> Engine:
    found = next((engine for engine in ENGINES if engine.key == key), None)
    if found is None:
        raise ConfigError(f"--engine {key} is not known", hint=f"one of {', '.join(engine.key for engine in ENGINES)}")
    return found


def engine_of(settings: EngineSettings) -> Engine | None:
    """The family the config asks for; None: it leaves the choice open."""
    if settings.deepspeed is not None:
        return Engine(key="deepspeed", words="DeepSpeed as configured", zero_stage=1)
    if settings.fsdp is not None:
        return Engine(key="fsdp", words="FSDP as configured")
    return None


def engine_args(engine: Engine, job: TrainJob, wrap: tuple[str, ...], *, adapters: bool) -> dict[str, Any]:
    """The arguments with this engine's keys in place of others' (None: not set)."""
    keys: dict[str, Any] = dict.fromkeys(("fsdp", "fsdp_config", "deepspeed"))
    if engine.family == "fsdp":
        keys.update(_fsdp(engine, wrap, job.for_transformers))
        if keys["fsdp_config"].get("cpu_offload") and job.settings.engine.ddp_backend is None:
            keys["ddp_backend"] = BOTH_BACKENDS  # the norm of gradients on the host is summed there
        if not adapters:  # whole gradients through the accumulation would undo the sharding; an adapter's are small
            keys["accelerator_config"] = _synced(job.raw.get("accelerator_config"))
    elif engine.family == "deepspeed":
        keys["deepspeed"] = deepspeed_config(engine)
    kept = {key: value for key, value in job.raw.items() if key not in ENGINE_KEYS or key not in keys}
    return kept | {key: value for key, value in keys.items() if value is not None}


def _fsdp(engine: Engine, wrap: tuple[str, ...], for_transformers: str | None) -> dict[str, Any]:
    if release(for_transformers or installed().version) < (5, 0):  # FSDP1 there; its shards are FSDP2's
        words = ("full_shard" if engine.reshard else "shard_grad_op") + (" offload" if engine.offloads else "") + " auto_wrap"
        return {"fsdp": words, "fsdp_config": {"transformer_layer_cls_to_wrap": list(wrap), "use_orig_params": True}}
    config: dict[str, Any] = {"version": 2, "reshard_after_forward": engine.reshard, "transformer_layer_cls_to_wrap": list(wrap)}
    if engine.offloads:
        config["cpu_offload"] = True
    return {"fsdp": True, "fsdp_config": config}


def _synced(accelerator_config: Any) -> dict[str, Any]:
    config = dict(accelerator_config) if isinstance(accelerator_config, Mapping) else {}
    kwargs = config.get("gradient_accumulation_kwargs")
    config["gradient_accumulation_kwargs"] = {**(kwargs if isinstance(kwargs, Mapping) else {}), "sync_each_batch": True}
    return config


def deepspeed_config(engine: Engine) -> dict[str, Any]:
    """What follows from TrainingArguments stays `auto`, so that the two cannot disagree."""
    zero: dict[str, Any] = {"stage": engine.zero_stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto"}
    if engine.zero_stage == 3:
        zero.update(
            stage3_prefetch_bucket_size="auto",
            stage3_param_persistence_threshold="auto",
            stage3_gather_16bit_weights_on_model_save=True,
        )
    if engine.offloads:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if engine.zero_stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    automatic = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {
        "zero_optimization": zero,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **dict.fromkeys(automatic, "auto"),
    }


PlanOne = Callable[[Subject], Plan]
TIE = 0.02  # engines this close are equal; the earlier one in the list asks less of the installation


def plan_devices(subject: Subject, request: Request, plan_one: PlanOne) -> Plan:
    """The plan with the engine that suits several devices: the one asked for, the config's own, or the cheapest that fits."""
    contest = _Contest(subject=subject, request=request, plan_one=plan_one)
    if request.engine is not None:
        return contest.only(named_engine(request.engine))
    own = engine_of(subject.job.settings.engine)
    if own is None and subject.job.fixed.intersection(("fsdp", "fsdp_config", "deepspeed")):
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
        subject = with_own_checkpointing(self.subject) if own.family == "fsdp" else self.subject
        plan = self.plan_one(subject)
        job = self.subject.job
        changes = tuple(_changes(job.raw, as_chosen(job.raw, subject.job.raw, plan.facts.after.candidate), own, WHY))
        choice = EngineChoice(name=own.words, reason="the config says so", commands=commands(self.subject, self.request))
        return replace(plan, facts=replace(plan.facts, job=job, changes=(*changes, *plan.facts.changes), engine=choice))

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
            return f"DeepSpeed is not installed here; --engine {engine.key} plans for it anyway"
        if engine.family == "ddp":
            return self._too_large(least_state_bytes(self.subject), "weights, gradients and optimizer states")
        if "fsdp2" in self.plans and engine.zero_stage == 3:
            return "gathers and keeps no less than FSDP2, which fits: not traced"
        if "fsdp2" in self.plans and engine.zero_stage == 2 and not self._communicates():
            return "sends less than FSDP2 but keeps whole weights, and it is not communication that holds FSDP2 back: not traced"
        if engine.offloads and (short := self._host_short(engine)) is not None:
            return short
        spec = self.subject.job.model
        if engine.zero_stage == 2:
            bits = 16 if spec.quantization is None else spec.quantization.bits
            return self._too_large(self.subject.workload.parameters * bits // 8, "whole weights")
        if spec.quantization is not None and (engine.family == "fsdp" or engine.zero_stage == 3):
            return f"{spec.quantization.bits}-bit weights are not sharded: their bytes are no numbers that could be gathered in parts"
        return None

    def _host_short(self, engine: Engine) -> str | None:
        """Offloaded states are one copy for all ranks of a machine: what of it does not fit into the host's free memory."""
        hardware, workload = self.subject.hardware, self.subject.workload
        needed = OFFLOADED_BYTES * workload.trainable_parameters
        if engine.zero_stage != 2:
            needed += weight_bytes(self.subject) * workload.parameters
        needed //= self.request.nodes
        if hardware.hypothetical or needed <= hardware.host.ram_free_bytes:
            return None
        return f"offloads {format_bytes(needed)} to the host, which has {format_bytes(hardware.host.ram_free_bytes)} free"

    def _too_large(self, least_bytes: int, what: str) -> str | None:
        """Without a single activation: known without a trace."""
        budget = device_of(self.subject, self.request).budget_bytes
        if least_bytes <= budget:
            return None
        return f"{what} alone take {format_bytes(least_bytes)} on each device, {format_bytes(budget)} may be used"

    def _with(self, engine: Engine) -> Subject:
        return subject_on(engine, self.subject)

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
        args = as_chosen(own.raw, planned.raw, plan.facts.after.candidate)
        changes = tuple(c for c in _changes(own.raw, args, engine, reason) if not (alone and c.key == "accelerator_config"))
        choice = EngineChoice(
            name=engine.words,
            reason=reason,
            rejected=tuple(self.rejected),
            commands=commands(self.subject, self.request),
            deepspeed=planned.raw.get("deepspeed"),
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


def subject_on(engine: Engine, subject: Subject) -> Subject:
    """The same job with this engine's keys."""
    job = subject.job
    args = engine_args(engine, job, block_classes(subject) if engine.family == "fsdp" else (), adapters=job.model.lora is not None)
    made = replace(subject, job=with_raw(job, args))
    return with_own_checkpointing(made) if engine.family == "fsdp" else made


def _why(engine: Engine, others: bool) -> str:
    if engine.offloads:
        return "nothing fits without the host's memory"
    return "DDP does not fit; the fastest engine that does" if others else "DDP does not fit; this does"


def _changes(before: Any, after: Any, engine: Engine, reason: str) -> Iterator[Change]:
    config = after.get("fsdp_config")
    recomputed = isinstance(config, Mapping) and OWN in config
    whys = {
        "fsdp": f"{engine.words}: {reason}",
        "fsdp_config": "what the prediction rests on: each block is sharded and gathered on its own" + (f"; {WHY}" if recomputed else ""),
        "deepspeed": f"{engine.words}: {reason}",
        "accelerator_config": "gradients are reduced after each micro-batch: whole ones through the accumulation would undo the sharding",
        "ddp_backend": "gradients on the host are summed there for clipping, which NCCL alone cannot do",
    }
    for key in ENGINE_KEYS:
        if before.get(key) != after.get(key):
            yield Change(key=key, before=before.get(key), after=after.get(key), reason=whys[key])


def least_state_bytes(subject: Subject) -> int:
    """What each device holds under DDP at the least: weights, gradients, their buckets, and the states of an optimizer that is known."""
    count = kept_count(subject.workload)
    held = state_bytes(count, replace(step_settings(subject.job.settings, accumulation=subject.job.accumulation), sharding=None))
    return held.total_bytes + count.trained_bytes


def block_classes(subject: Subject) -> tuple[str, ...]:
    """The classes of the repeated blocks: what FSDP wraps one by one."""
    return kept_names("block classes", subject.workload, _block_classes)


def _block_classes(workload: Workload) -> tuple[str, ...]:
    import torch

    from hfopt.model.builder import Recipe

    build = workload.build_model
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
