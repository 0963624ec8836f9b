"""What may be chosen for this job on this device: kernels and candidates.

Other kernels for the same computation, tried only where the user allows it: attention implementations, and liger's fused loss. What is
offered is what can run on the card and be written into the config. flash_attention_2 is priced as PyTorch's own flash kernel on unpadded
samples; liger's kernels are modelled by rule (`trace.liger`). Both are estimates, and the reason says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hfopt.compat.transformers_patches import default_optim
from hfopt.compat.versions import release, source_folder
from hfopt.config.training_arguments import ATTENTION
from hfopt.facts.training_keys import CHECKPOINTING_KEYS, PRECISION_KEYS, installed
from hfopt.job.request import Request
from hfopt.job.subject import Subject
from hfopt.planner.search import NumericFacts, Precisions, Space, checkpointing_choices, precisions
from hfopt.pricing.compiled import COMPILE, why_not_compiled
from hfopt.pricing.grpo import BatchRule, batch_rule, check_groups
from hfopt.pricing.target_device import TargetDevice
from hfopt.schema import Candidate, Checkpointing, Gpu

LIGER_TYPES = frozenset(
    ("gemma", "gemma2", "gemma3_text", "glm4", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3")
)
"""Text models whose loss liger-kernel 0.8.5 fuses (transformers/monkey_patch.py); where the package is installed, its own table is read."""
_EXPERTS = ("mixtral", "qwen3_moe")
LIGER = "use_liger_kernel"


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The values to try, and what to tell about those that are not."""

    values: tuple[Any, ...]
    note: str | None = None


def attention_choices(subject: Subject, allowed: frozenset[str], gpu: Gpu | None) -> Offer:
    """As it is, and what is faster: sdpa instead of eager, flash_attention_2 where package and card have it."""
    if ATTENTION not in allowed or ATTENTION in subject.job.fixed:
        return Offer(values=(None,))
    if subject.loaded is None or ATTENTION not in subject.loaded.homes:
        note = f"--allow {ATTENTION}: the config does not state it, so there is no value to change; it is an argument of from_pretrained"
        return Offer(values=(None,), note=note)
    now = subject.job.model.attn_implementation
    found: list[str | None] = [None]
    if now == "eager":
        found.append("sdpa")
    flash = "flash_attention_2"
    if now == flash or gpu is None or gpu.capability is None or gpu.capability < (8, 0):
        return Offer(values=tuple(found))
    if find_spec("flash_attn") is None:
        return Offer(values=tuple(found), note=f"{flash} was not tried: the package flash-attn is not installed here")
    return Offer(values=(*found, flash))


def attention_note(subject: Subject, gpu: Gpu | None) -> tuple[str, ...]:
    """Where the config's own attention does not run on this card or in this dtype: the packages raise an error there."""
    name = subject.job.model.attn_implementation or ""
    if "flash" not in name or gpu is None or gpu.capability is None:
        return ()
    least = (9, 0) if re.search(r"flash[-_]att(ention|n)[-_]?3", name) else (8, 0)
    said = f"{ATTENTION}: {name} does not run"
    if gpu.capability < least:
        return (f"{said} on {gpu.name}: it needs compute capability {least[0]}.{least[1]}; {ATTENTION}: sdpa does",)
    if subject.job.settings.precision == "fp32" and subject.workload.weights_dtype == "float32":
        return (f"{said} in float32: set bf16: true, or dtype: bfloat16",)
    return ()


def liger_choices(subject: Subject, allowed: frozenset[str]) -> Offer:
    if LIGER not in allowed or LIGER in subject.job.fixed:
        return Offer(values=(False,))
    why_not = why_no_liger(subject)
    if why_not is not None:
        return Offer(values=(False,), note=f"{LIGER} was not tried: {why_not}")
    missing = f"{LIGER} needs the package liger-kernel, which is not installed here" if _liger_folder() is None else None
    if missing and not subject.hardware.hypothetical:
        return Offer(values=(False,), note=f"{missing}: pip install liger-kernel, and it can be planned with")
    return Offer(values=(False, True), note=missing)


def compile_choices(subject: Subject, allowed: frozenset[str], gpu: Gpu | None) -> Offer:
    if COMPILE not in allowed or COMPILE in subject.job.fixed or subject.job.settings.torch_compile:
        return Offer(values=(False,))
    reason = why_not_compiled(subject, gpu)
    return Offer(values=(False, True)) if reason is None else Offer(values=(False,), note=f"{COMPILE} was not tried: {reason}")


def why_no_liger(subject: Subject) -> str | None:
    workload = subject.workload
    model_type = workload.facts.model_type
    if workload.task != "causal_lm" or workload.compute_loss is not None:
        return "its fused loss is for causal language models with their own loss"
    if model_type not in _liger_types():
        return f"liger-kernel does not know {model_type}"
    if subject.job.settings.label_smoothing:
        return "the Trainer's label smoothing needs the logits that it leaves out"
    return None


def _liger_folder() -> Path | None:
    return source_folder("liger_kernel")


def _liger_types() -> frozenset[str]:
    """Of the installed package, read from its source (importing it needs triton and a card), else the known ones."""
    folder = _liger_folder()
    source = folder / "transformers" / "monkey_patch.py" if folder is not None else None
    if source is None or not source.exists():
        return LIGER_TYPES
    table = re.search(r"^MODEL_TYPE_TO_APPLY_LIGER_FN = \{(.*?)^\}", source.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return frozenset(re.findall(r'"(\w+)":', table[1])) & LIGER_TYPES if table else LIGER_TYPES


FUSED = "adamw_torch_fused"


def current_candidate(subject: Subject) -> Candidate:
    job = subject.job
    return Candidate(
        per_device_batch=job.per_device_batch,
        accumulation=job.accumulation,
        precision=job.settings.precision,
        checkpointing=job.settings.checkpointing,
        torch_compile=job.settings.torch_compile,
        use_liger_kernel=runs_liger(subject),
    )


def runs_liger(subject: Subject) -> bool:
    """The config sets it, and its fused loss is one that can be traced; the package need not be here for that."""
    return subject.job.settings.liger and why_no_liger(subject) is None


def liger_note(subject: Subject) -> tuple[str, ...]:
    """What is made of a `use_liger_kernel: true` of the config."""
    if not subject.job.settings.liger or subject.trainer is not None:  # of a live one its own rules speak
        return ()
    if (why_not := why_no_liger(subject)) is not None:
        return (f"{LIGER}: true is set; what it saves is not in the figures ({why_not}), so there is more room than they say",)
    experts = ", not of its experts" if (subject.workload.facts.model_type or "") in _EXPERTS else ""
    return (f"{LIGER}: true is in the figures: its fused loss, norms, rotary embedding and gated units{experts}",)


def precisions_of(subject: Subject, device: TargetDevice, current: Candidate) -> Precisions:
    stored = subject.workload.weights_dtype
    facts = NumericFacts(
        family=subject.workload.model_class,
        weights_dtype=stored,
        trained_in=subject.workload.checkpoint_dtype,
        gradients_in=_gradients_in(subject, stored),
    )
    return precisions(device.gpu, current.precision, facts, keep=bool(subject.job.fixed.intersection(PRECISION_KEYS)))


def _gradients_in(subject: Subject, stored: str | None) -> str | None:
    """Of what trains: adapters are float32 on any model; DeepSpeed scales in a way of its own."""
    if subject.job.settings.engine.deepspeed is not None:
        return None
    if subject.trainer is None:
        return None if subject.job.model.lora is not None else stored
    types = {str(one.dtype).removeprefix("torch.") for one in subject.trainer.model.parameters() if one.requires_grad}
    return next((kind for kind in ("bfloat16", "float16") if kind in types), None)


def space_of(subject: Subject, request: Request, device: TargetDevice, allowed: Precisions, current: Candidate) -> Space:
    job, workload = subject.job, subject.workload
    kept = job.fixed
    effective = request.effective_batch or job.effective_batch
    trades = "accumulation" in request.allow or effective != job.effective_batch
    rule = BatchRule()
    if job.generates:
        check_groups(job, effective)
        rule = batch_rule(job)
    pinned = not trades and (workload.batch_dependent_loss is not None or rule.keeps_pair)
    fused = "optim" in request.allow and "optim" not in kept and job.settings.optim == "adamw_torch"
    return Space(
        effective_batch=effective,
        world_size=job.world_size,
        precisions=allowed.allowed,
        checkpointings=_checkpointings(subject, current),
        batch=job.per_device_batch if "per_device_train_batch_size" in kept else None,
        accumulation=job.accumulation if pinned or "gradient_accumulation_steps" in kept else None,
        batch_multiple=rule.multiple,
        batch_divides=rule.divides,
        optims=(None, FUSED) if fused else (None,),
        attention=attention_choices(subject, request.allow, device.gpu).values,
        compiled=compile_choices(subject, request.allow, device.gpu).values if not current.torch_compile else (True,),
        liger=liger_choices(subject, request.allow).values if not current.use_liger_kernel else (True,),
    )


def likely(pool: Sequence[Candidate], device: TargetDevice, current: Candidate) -> tuple[Candidate, ...]:
    """Which traces the search will ask for first: the largest batch, unchecked, in the fastest precision; who checkpoints all layers mostly
    has to check some, and who accumulates mostly has to."""
    rate = device.speed.matmul_flops
    accumulates = current.accumulation > 1

    def rank(c: Candidate) -> tuple[object, ...]:
        as_now = (c.accumulation > 1) == accumulates
        return not c.checkpointing.on, rate.get(c.precision, 0.0), as_now, c.per_device_batch, -c.torch_compile, not c.use_liger_kernel

    graded = [c for c in pool if c.checkpointing.every_n_layers > 1] if current.checkpointing.on else []
    return tuple(max(some, key=rank) for some in (pool, graded) if some)


def defaults() -> dict[str, Any]:
    """The Trainer's, with those that it decides while its class is made and when it reads them."""
    found = {name: item.default for name, item in installed().fields.items()}
    return found | {"optim": default_optim(), "gradient_checkpointing": False}


def _checkpointings(subject: Subject, current: Candidate) -> tuple[Checkpointing, ...]:
    job, workload = subject.job, subject.workload
    if job.fixed.intersection(CHECKPOINTING_KEYS):
        return (current.checkpointing,)
    graded = _graded(job.for_transformers) and not tool_checkpoints(subject)
    return checkpointing_choices(current.checkpointing, possible=workload.checkpointable, graded=graded, layers=workload.layers)


def tool_checkpoints(subject: Subject) -> bool:
    """The file's tool (LLaMA-Factory, axolotl) switches checkpointing itself and never reads `every_n_layers`."""
    return subject.job.tool is not None


def _graded(for_transformers: str | None) -> bool:
    """every_n_layers is known to transformers from 5.22 on: to the one that is traced, and to the one that reads the file."""
    return all(release(version) >= (5, 22) for version in (installed().version, for_transformers) if version is not None)
