"""Ways to tune that are neither LoRA nor the whole model: honoured where they can be, planned by something close and said where not.

Sources: llamafactory 0.9.5 (hparams/finetuning_args.py, model/adapter.py) and peft 0.21 (PeftType, tuners/oft/config.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from hfopt.config.lookup import Facts
from hfopt.schema import Lora

_OF_PROMPTS = frozenset({"prompt_tuning", "p_tuning", "ptuning", "prefix_tuning", "multitask_prompt_tuning", "adaption_prompt", "cpt"})
_OF_ADAPTERS = frozenset(
    {
        "ia3",
        "adalora",
        "loha",
        "lokr",
        "vera",
        "vblora",
        "fourierft",
        "ln_tuning",
        "hra",
        "poly",
        "bone",
        "miss",
        "randlora",
        "road",
        "shira",
    }
)
_OF_ROTATIONS = frozenset({"oft", "boft"})
_FACTORY_LAYERS, _FACTORY_OFT_BLOCK, _TOKENS = 2, 32, 20  # what the tools take where the file says nothing
_OPTIMIZERS = {
    "use_galore": "GaLore's projected states are not modelled: AdamW's whole ones are planned, which take more",
    "use_apollo": "APOLLO's projected states are not modelled: AdamW's whole ones are planned, which take more",
    "use_badam": "BAdam's blocks are not modelled: every layer is planned with its gradients and states, which take more",
    "use_adam_mini": "Adam-mini's states are not modelled: AdamW's are planned, which take more",
    "use_muon": "Muon's states are not modelled: AdamW's are planned, which take more",
    "use_llama_pro": "LLaMA Pro's new blocks are not modelled: the model is planned as it is published",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningMethod:
    lora: Lora | None = None  # what stands in for an adapter of another kind
    stands_for: str | None = None  # that kind
    virtual_tokens: int = 0  # before each sample
    last_layers: int | None = None  # these alone train; below zero the first ones
    notes: tuple[str, ...] = ()


def tuning_method(facts: Facts, *, factory: bool) -> TuningMethod:
    kind = (facts.text("finetuning_type") or "").lower() if factory else ""
    peft_type = (facts.text("peft_type", "peft_method", "tuner_type") or "").lower().replace("-", "_")
    optimizers = tuple(f"{key}: {words}" for key, words in _OPTIMIZERS.items() if facts.true(key))
    if kind == "freeze":
        return TuningMethod(last_layers=_frozen_layers(facts), notes=(*_frozen_notes(facts), *optimizers))
    if kind == "oft" or peft_type in _OF_ROTATIONS:
        block = facts.whole("oft_block_size") or _FACTORY_OFT_BLOCK
        rank = max(1, block // 4)  # a rotation of blocks of b has d(b-1)/2 weights, an adapter of rank r has 2dr
        note = f"OFT is planned as LoRA of rank {rank}, which trains about as many weights: close, not exact"
        return TuningMethod(lora=Lora(r=rank, alpha=float(rank), target_modules="all-linear"), stands_for="OFT", notes=(note, *optimizers))
    if peft_type in _OF_PROMPTS or facts.whole("num_virtual_tokens") is not None:
        tokens = facts.whole("num_virtual_tokens") or _TOKENS
        name = peft_type.replace("_", " ") or "prompt tuning"
        note = f"{name} is planned as LoRA of rank 1 on a frozen model, with its {tokens} tokens before each sample: close, not exact"
        return TuningMethod(lora=Lora(r=1, alpha=1.0), stands_for=name, virtual_tokens=tokens, notes=(note, *optimizers))
    if peft_type in _OF_ADAPTERS:
        rank = facts.whole("r", "rank", "lora_r", "init_r", "target_r") or 8
        note = f"{peft_type} is planned as LoRA of rank {rank} on a frozen model: close, not exact"
        return TuningMethod(lora=Lora(r=rank, alpha=2.0 * rank), stands_for=peft_type, notes=(note, *optimizers))
    return TuningMethod(notes=optimizers)


def _frozen_layers(facts: Facts) -> int:
    said = facts.get("freeze_trainable_layers")
    return said if isinstance(said, int) and not isinstance(said, bool) and said != 0 else _FACTORY_LAYERS


def _frozen_notes(facts: Facts) -> tuple[str, ...]:
    modules, extra = facts.text("freeze_trainable_modules") or "all", facts.text("freeze_extra_modules")
    notes = []
    if modules != "all":
        notes.append(f"freeze_trainable_modules: {modules}: whole layers are planned to train, which take more")
    if extra is not None:
        notes.append(f"freeze_extra_modules: {extra}: not planned to train, which takes less")
    return tuple(notes)
