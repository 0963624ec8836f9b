"""Which parts of a model a config trains and how: frozen towers, its images, and ways to tune that are neither LoRA nor the whole model.

Sources: llamafactory 0.9.5 (hparams/finetuning_args.py, model/adapter.py) and peft 0.21 (PeftType, tuners/oft/config.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hfopt.config.lookup import Facts, model_name, whole_number
from hfopt.config.other_tools import is_llama_factory, is_unsloth, unsaid_mix
from hfopt.schema import Lora, ModelPart

_EDGES = frozenset({"height", "width", "shortest_edge", "longest_edge", "max_height", "max_width"})
_FACTORY_PIXELS = 768 * 768  # llamafactory 0.9.5, hparams/model_args.py: image_max_pixels, to which larger images are shrunk first
_PART_KEYS: dict[ModelPart, tuple[tuple[str, ...], tuple[str, ...]]] = {  # keys that freeze it, keys that train it
    "vision": (
        ("freeze_vision_tower", "freeze_vision", "freeze_vision_encoder", "freeze_vision_model", "freeze_vit", "freeze_image_encoder"),
        ("tune_mm_vision", "unfreeze_vision_tower", "train_vision_tower", "unfreeze_vision"),
    ),
    "projector": (
        (
            "freeze_multi_modal_projector",
            "freeze_mm_mlp_adapter",
            "freeze_projector",
            "freeze_aligner",
            "freeze_merger",
            "freeze_connector",
        ),
        ("tune_mm_mlp", "tune_mm_mlp_adapter", "train_projector", "tune_merger", "train_merger"),
    ),
    "language": (("freeze_language_model", "freeze_llm", "freeze_text_model", "freeze_backbone_llm"), ("tune_mm_llm", "train_llm")),
}
"""LLaMA-Factory, LLaVA, Qwen's own finetuning scripts and ms-swift name the parts of a vision-language model so."""
_FACTORY_FREEZES: tuple[ModelPart, ...] = ("vision", "projector")  # llamafactory 0.9.5, hparams/finetuning_args.py


def frozen_parts(facts: Facts, *, is_factory: bool) -> tuple[ModelPart, ...]:
    found: list[ModelPart] = []
    for part, (freezing, training) in _PART_KEYS.items():
        frozen = facts.true(*freezing) or facts.false(*training)
        trained = facts.false(*freezing) or facts.true(*training)
        if frozen or (is_factory and part in _FACTORY_FREEZES and not trained):
            found.append(part)
    return tuple(found)


_SEES = re.compile(
    r"(^|[-_/.])vl(m\d?)?([-_.]|\d|$)|vision|llava|paligemma|idefics|smolvlm|pixtral|internvl|florence|moondream", re.IGNORECASE
)
_MAY_SEE = re.compile(r"gemma-?[34]|mistral-small-3|ministral-3|llama-4|qwen3\.[5-9]", re.IGNORECASE)
_PICTURES = re.compile(r"llava|vsft|vqa|cauldron|image|visual|vision|picture|chartqa|[-_]ocr|coco|flickr|clevr|geometry3k", re.IGNORECASE)


def has_images(facts: Facts, *, by_name: bool) -> bool:
    """The file speaks of images, or the model's name says that it takes them; one that may also be tuned on text: if the dataset does."""
    name, data = model_name(facts) or "", facts.text("dataset_name", "dataset", "dataset_id", "dataset_path") or ""
    if by_name and not facts.true("text_only") and (_SEES.search(name) or (_MAY_SEE.search(name) and _PICTURES.search(data))):
        return True
    return facts.has(
        *(
            "max_pixels",
            "min_pixels",
            "image_max_pixels",
            "image_min_pixels",
            "images_per_sample",
            "max_images",
            "num_images",
            "image_size",
        ),
        *("image_resolution", "freeze_vision_tower", "image_column", "image_folder", "media_dir", "image_dir"),
    )


def is_tuned_on_text(facts: Facts) -> bool:
    """A model that takes images too, in a file that speaks of none."""
    return _MAY_SEE.search(model_name(facts) or "") is not None and not has_images(facts, by_name=True)


def image_facts(facts: Facts) -> dict[str, Any]:
    """The fields of a DataSpec that are about images and videos."""
    return {
        "image_size": _side(facts, "image_size", "img_size", "image_resolution", "image_square_size", "resolution", "input_size"),
        "images_per_sample": _count(
            facts, "images_per_sample", "num_images_per_sample", "max_images_per_sample", "num_images", "max_images"
        ),
        "min_pixels": _count(facts, "min_pixels", "image_min_pixels"),
        "max_pixels": _count(facts, "max_pixels", "image_max_pixels") or (_FACTORY_PIXELS if is_llama_factory(facts) else None),
        "edges": _edges(facts),
        "frames": _count(facts, "num_frames", "frames_per_clip", "max_frames", "num_video_frames"),
    }


def _side(facts: Facts, *names: str) -> int | None:
    """224, or the largest of [3, 224, 448], for images are planned square and must not be planned too small; what cannot be an image's
    side is kept, so that it is refused and not overlooked."""
    for _, value in facts.all(*names):
        found = [number for one in (value if isinstance(value, list) else [value]) if (number := whole_number(one)) is not None]
        if found:
            return max(found)
    return None


def _count(facts: Facts, *names: str) -> int | None:
    return next((number for _, value in facts.all(*names) if (number := whole_number(value)) is not None), None)


def _edges(facts: Facts) -> dict[str, int] | None:
    """An image processor's size, as {shortest_edge: 800, longest_edge: 1333} or {height: 640, width: 640}."""
    for _, value in facts.all("size", "image_size", "processor_size"):
        if isinstance(value, dict) and value and set(value) <= _EDGES:
            found = {name: number for name, edge in value.items() if (number := whole_number(edge)) is not None}
            if len(found) == len(value):
                return found
    return None


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


_UNSLOTH = "unsloth's own kernels and checkpointing are not modelled: those of transformers are planned, which take more"


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
    peft_type = next((word for word in (peft_type, *_method_words(facts)) if word in _OF_PROMPTS | _OF_ADAPTERS | _OF_ROTATIONS), peft_type)
    if not peft_type:
        peft_type = next((word for word in sorted(_OF_PROMPTS | _OF_ADAPTERS | _OF_ROTATIONS) if facts.true(f"use_{word}")), "")
    optimizers = tuple(f"{key}: {words}" for key, words in _OPTIMIZERS.items() if facts.true(key))
    if is_unsloth(facts) and not facts.true("use_unsloth", "unsloth"):  # those keys have a sentence of their own
        optimizers = (*optimizers, _UNSLOTH)
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


def lora_of(facts: Facts, factory: bool) -> Lora | None:
    if facts.false("use_peft", "use_lora", "lora_enabled", "lora_enable", "enable_lora") or any(
        value is False for _, value in facts.all("enabled", under=LORA_SECTIONS)
    ):
        return None
    kind, swift = facts.text("finetuning_type"), (facts.text("train_type", "sft_type", "tuner_type") or "").lower()
    word = swift or method_word(facts)
    if factory:
        if (kind or "lora") != "lora":
            return None
        rank = facts.whole("lora_rank") or 8
        alpha, dropout = facts.number("lora_alpha") or 2 * rank, facts.number("lora_dropout") or 0.0
        target = facts.get("lora_target") or "all"
    else:
        nested = facts.whole("r", "rank", "lora_r", under=LORA_SECTIONS)
        flat = facts.whole(*_RANKS) or (facts.whole("r") if facts.has("lora_alpha", "lora_dropout") else None)
        asked = word in _LORA_WORDS or facts.true(
            "use_peft", "use_lora", "use_qlora", "lora", "peft", "qlora", "lora_enable", "enable_lora"
        )
        asked = asked or any(value is True for _, value in facts.all("enabled", under=LORA_SECTIONS))
        if word in _FULL_WORDS or (nested is None and flat is None and not asked):
            return None
        rank = flat or nested or (8 if swift == "lora" else 16)
        alpha = first_number(
            facts.number("lora_alpha", "peft_lora_alpha"), facts.get("alpha", under=LORA_SECTIONS), 32 if nested is None else 8
        )
        dropout = first_number(
            facts.number("lora_dropout", "peft_lora_dropout"), facts.get("dropout", under=LORA_SECTIONS), 0.05 if nested is None else 0.0
        )
        target = facts.get("lora_target_modules", "lora_target", "target_modules", "lora_targets", "lora_modules", "peft_lora_modules")
        target = (
            target or facts.get("target", "targets", "modules", "keys", under=LORA_SECTIONS) or ("all-linear" if swift == "lora" else None)
        )
    return Lora(
        r=rank,
        alpha=float(alpha),
        dropout=float(dropout),
        target_modules=_target(target),
        modules_to_save=strings(facts.get("lora_modules_to_save", "modules_to_save", "additional_target")),
        use_dora=facts.true("use_dora"),
        use_rslora=facts.true("use_rslora"),
    )


_STARTS = (
    "sft",
    "init",
    "initial",
    "base",
    "start",
    "starting",
    "resume",
    "resume_from",
    "warm_start",
    "stage1",
    "previous",
    "prev",
    "pretrained",
)
_GIVEN_ADAPTERS = (
    *(f"{word}_{kind}{end}" for word in _STARTS for kind in ("adapter", "lora") for end in ("_path", "_dir", "", "_name_or_path")),
    *(
        "adapter_init_path",
        "peft_model_name_or_path",
        "peft_model_path",
        "peft_model_id",
        "init_from_adapter",
        "load_adapter",
        "lora_checkpoint",
    ),
)


def continued_adapter(facts: Facts) -> str | None:
    """The adapter that a script loads and trains on, where nothing says that the whole model trains."""
    if facts.false("use_peft", "use_lora") or method_word(facts) in _FULL_WORDS:
        return None
    return facts.text(*_GIVEN_ADAPTERS, *(path[-1] for path, _ in facts.leaves() if _EARLIER_ADAPTER.fullmatch(path[-1].lower())))


_EARLIER_ADAPTER = re.compile(
    r"(?!out|save|final|merged|export|target|new|best|result|trained|eval|test|infer)\w+_(?:lora|adapter)_(?:path|dir|checkpoint|ckpt)"
)
"""`dapt_lora_path`: that of a stage before."""


def states_rank(facts: Facts) -> bool:
    return any(facts.whole(*names, under=under) for names, under in ((_RANKS, ()), (("r", "rank"), LORA_SECTIONS))) or (
        facts.whole("r") is not None and facts.has("lora_alpha", "lora_dropout")
    )


_RANKS = ("lora_r", "lora_rank", "peft_lora_r", "peft_lora_rank", "peft_r")  # peft_*: zephyr's first recipes
_LORA_WORDS, _FULL_WORDS = (
    frozenset({"lora", "qlora", "dora", "rslora"}),
    frozenset({"full", "full_finetune", "full_finetuning", "full_ft", "fft", "full_fine_tuning", "full_fine_tune", "full_parameter"}),
)


def method_word(facts: Facts) -> str:
    """`method: qlora`, `training_type: full`: how a script's file says what trains."""
    return next((word for word in _method_words(facts) if word in _LORA_WORDS | _FULL_WORDS), "")


def _method_words(facts: Facts) -> Iterator[str]:
    keys = ("peft_method", "peft_type", "training_type", "tuning_method", "finetuning_method", "finetune_type", "method", "adapter")
    for _, value in facts.all(*keys, "adapter_type", "train_method", "training_method", "technique"):
        if isinstance(value, str):
            yield re.sub(r"[-\s]", "_", value.lower())


LORA_SECTIONS = ("lora", "lora_config", "peft", "peft_config", "lora_args", "loraarguments", "adapter", "qlora")


def first_number(*values: Any) -> float:
    numbers = (value for value in values if isinstance(value, int | float) and not isinstance(value, bool))
    return next(float(value) for value in numbers if isinstance(value, float) or value.bit_length() < 64)


def _target(target: Any) -> tuple[str, ...] | str | None:
    if isinstance(target, list) and len(target) == 1 and isinstance(target[0], str):
        target = target[0]  # TRL and axolotl hand a single text to peft, which takes it for a pattern
    if target in ("all", "all-linear"):
        return "all-linear"
    if isinstance(target, str) and re.search(r"[\\()*|\[$^]", target):
        return target
    return strings(target) or None


def strings(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(str(part) for part in value) if isinstance(value, list) else ()


_PACKED = re.compile(r"(?:^|[-_./])(aqlm|gptq|awq|hqq|eetq|exl2|w[48]a(?:8|16)|int[48])(?=$|[-_./])", re.IGNORECASE)


def unsaid_notes(facts: Facts, args: dict[str, Any], *, own_reader: bool) -> Iterator[str]:
    """A precision that a script's file asks for without saying which, and a checkpoint in a form that is not modelled."""
    key = None if own_reader or facts.has("fp16", "bf16") else unsaid_mix(facts)
    kind = next((name for name in ("bf16", "fp16") if args.get(name) is True), None)
    if key is not None and kind is not None:
        yield f"{key}: true does not say in which type: {kind} is planned (bf16: true or fp16: true says it)"
    if (packed := _PACKED.search(model_name(facts) or "")) is not None:
        yield f"the weights are {packed[1]}'s by the model's name, which are not modelled: whole ones are planned, which take more"
