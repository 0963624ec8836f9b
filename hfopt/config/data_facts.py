"""What it is trained on: the dataset and the size of one sample, under the many names configs have for them."""

from __future__ import annotations

from typing import Any

from hfopt.config.facts import Facts
from hfopt.config.model_facts import Trainer
from hfopt.schema import DataSpec

_DATA_SECTIONS = ("data", "dataset", "data_args", "dataset_args", "dataarguments", "data_arguments", "datasets", "train_dataset")
_NOT_TRAINING = ("generation", "generate", "generation_config", "inference", "eval", "evaluation", "generation_kwargs", "test")
_LENGTHS = (
    *("max_seq_length", "cutoff_len", "max_seq_len", "max_sequence_length", "block_size", "max_source_length", "max_input_length"),
    *("max_length", "model_max_length", "sequence_length", "seq_length", "seq_len", "context_length", "max_len", "context_len"),
)


def read_data(facts: Facts, trainer: Trainer) -> DataSpec:
    return DataSpec(
        dataset=_dataset(facts),
        max_length=_length(facts, trainer),
        max_target_length=facts.whole("max_target_length", "max_output_length", "max_label_length", "generation_max_length"),
        packing=facts.true("packing", "neat_packing", "sample_packing") or (trainer == "SFT" and facts.true("padding_free")),
        image_size=facts.whole("image_size", "img_size", "resolution", "input_size") or _first_side(facts.get("image_size")),
        audio_seconds=facts.number("max_duration_in_seconds", "max_audio_seconds", "max_audio_length_s", "audio_seconds", "max_duration_s"),
        samples=facts.whole("max_train_samples", "num_train_samples", "max_samples", "train_samples"),
    )


def _length(facts: Facts, trainer: Trainer) -> int | None:
    """GRPO's sequences are prompt and completion together."""
    if trainer == "GRPO":
        prompt, completion = facts.whole("max_prompt_length"), facts.whole("max_completion_length")
        if prompt is not None or completion is not None:
            return (prompt or 512) + (completion or 256)
    return facts.whole(*_LENGTHS, not_under=_NOT_TRAINING)


def _dataset(facts: Facts) -> str | None:
    mixer = facts.get("dataset_mixer")
    if isinstance(mixer, dict) and mixer:
        return str(next(iter(mixer)))
    name = facts.text("id", under=("dataset_mixture",)) or facts.text(
        *(
            "dataset_name",
            "dataset_id",
            "dataset_id_or_path",
            "dataset_name_or_path",
            "dataset_path",
            "dataset_repo",
            "dataset",
            "train_file",
        ),
        not_under=_NOT_TRAINING,
    )
    if name is None:
        name = facts.text("name", "path", "id", "repo", "train", "train_path", under=_DATA_SECTIONS, not_under=_NOT_TRAINING)
    return None if name is None or "${" in name else name


def _first_side(value: Any) -> int | None:
    """[224, 224] -> 224."""
    return value[0] if isinstance(value, list) and value and isinstance(value[0], int) and not isinstance(value[0], bool) else None
