"""What planning reads of a model besides its traces: plain facts, so that a plan from kept traces needs neither torch nor transformers."""

from __future__ import annotations

from typing import Any

from hfopt.schema import ConfigFacts, Workload


def facts_of(workload: Workload) -> ConfigFacts:
    return workload.facts or read_facts(workload)


def whole(workload: Workload) -> Workload:
    """The workload with its model: built now where only its facts were kept."""
    return workload if workload.remake is None else workload.remake()


def read_facts(workload: Workload) -> ConfigFacts:
    """Off the model's configuration, where it has one. Of a sample nothing is said: `sample_facts` does."""
    config = workload.config
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    inner: Any = getattr(config, "text_config", None) or config
    hidden = getattr(inner, "hidden_size", None) or max(getattr(inner, "hidden_sizes", None) or [0])
    model_type = getattr(config, "model_type", None)
    return ConfigFacts(
        model_type=model_type if isinstance(model_type, str) else None,
        hidden_size=int(hidden) or None,
        layers=_whole_number(text, "num_hidden_layers"),
        heads=_whole_number(text, "num_attention_heads"),
        key_value_heads=_whole_number(text, "num_key_value_heads"),
        head_size=_whole_number(text, "head_dim"),
        width=_whole_number(text, "hidden_size"),
        vocabulary=_whole_number(text, "vocab_size"),
        tied_head=bool(getattr(text, "tie_word_embeddings", False)),
    )


def _whole_number(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None


def sample_of(workload: Workload) -> tuple[int, bool]:
    """The same as `sample_facts`, kept or read off a batch of one."""
    facts = workload.facts
    if facts is not None and facts.sample_bytes is not None:
        return facts.sample_bytes, facts.spectrogram
    return sample_facts(workload.make_batch(1))


def sample_facts(sample: dict[str, Any]) -> tuple[int, bool]:
    """The bytes of a sample's tensors, and whether sound comes as a spectrogram."""
    size = sum(value.numel() * value.element_size() for value in sample.values() if hasattr(value, "element_size"))
    return size, "input_features" in sample or any(getattr(value, "dim", int)() > 2 for value in sample.values())
