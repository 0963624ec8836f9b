"""torchtune's recipes: recognised, with what could be planned of them; its training loop is its own, so no plan is made.

Source: torchtune 0.7 (recipes/configs): the builder's name says model, size and adapter, such as `lora_llama3_1_8b`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hfopt.config.lookup import whole_number

_FAMILIES: tuple[tuple[str, str], ...] = (  # builder -> hub id; {} is the size as the Hub writes it
    (r"llama2_(\d+b)", "meta-llama/Llama-2-{}-hf"),
    (r"llama3_1_(\d+b)", "meta-llama/Llama-3.1-{}"),
    (r"llama3_2_vision_(\d+b)", "meta-llama/Llama-3.2-{}-Vision-Instruct"),
    (r"llama3_2_(\d+b)", "meta-llama/Llama-3.2-{}"),
    (r"llama3_3_(\d+b)", "meta-llama/Llama-3.3-{}-Instruct"),
    (r"llama3_(\d+b)", "meta-llama/Meta-Llama-3-{}"),
    (r"mistral_(7b)", "mistralai/Mistral-{}-v0.1"),
    (r"gemma2_(\d+b)", "google/gemma-2-{}"),
    (r"gemma_(\d+b)", "google/gemma-{}"),
    (r"qwen2_5_(\d+(?:_\d+)?b)(?:_instruct|_base)?", "Qwen/Qwen2.5-{}"),
    (r"qwen2_(\d+(?:_\d+)?b)", "Qwen/Qwen2-{}"),
    (r"qwen3_(\d+(?:_\d+)?b)(?:_instruct|_base)?", "Qwen/Qwen3-{}"),
    (r"phi3_(mini)", "microsoft/Phi-3-{}-4k-instruct"),
    (r"phi4_(14b)", "microsoft/phi-4"),
)
_BUILDER = re.compile(r"torchtune\.models\.[\w.]*?(?P<adapter>q?lora_)?(?P<model>(?:llama|mistral|gemma|qwen|phi)\w*)$")
_SMALL_SIZES = ("llama-2", "gemma", "phi-3")  # families whose ids write the size in small letters


def torchtune_words(data: Mapping[Any, Any]) -> tuple[str, str]:
    """What it is, and what hfopt can say of it."""
    model = data.get("model")
    builder = str(model.get("_component_") or "") if isinstance(model, dict) else ""
    match = _BUILDER.search(builder)
    name = None if match is None else hub_id(match["model"])
    batch, steps = (whole_number(data.get(key)) for key in ("batch_size", "gradient_accumulation_steps"))
    trains = "" if not builder else f" that trains {builder.rsplit('.', 1)[-1]}" + (f" with batch {batch} × {steps or 1}" if batch else "")
    what = f"a config of torchtune{trains}, whose training loop is its own: it is not planned"
    if name is None:
        return what, "hfopt plans configs of the HuggingFace Trainer, TRL, LLaMA-Factory and axolotl"
    tokenizer = data.get("tokenizer")
    length = whole_number(tokenizer.get("max_seq_len")) if isinstance(tokenizer, dict) else None
    return what, f"the same model under the HuggingFace Trainer: hfopt estimate {name} --seq-len {length or 2048} --precision bf16"


def hub_id(builder: str) -> str | None:
    for pattern, name in _FAMILIES:
        found = re.fullmatch(pattern, builder)
        if found is not None:
            size = found[1].replace("_", ".")
            return name.format(size if name.split("/")[1].lower().startswith(_SMALL_SIZES) else size.upper())
    return None
