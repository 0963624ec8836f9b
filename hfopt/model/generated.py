"""Batches of trainers that write their own samples (GRPO, RLOO): prompts of the data, completions of the longest length asked for.

A batch is what the trainer hands to its `compute_loss` after generating and scoring: token ids and masks of prompts and completions, one
advantage each, and the reference's log-probabilities where a KL term needs them. Generation itself is not in the traced step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hfopt.errors import WorkloadError
from hfopt.model.build import unfaked
from hfopt.model.samples import readable_samples, sample_size
from hfopt.schema import BatchShape

_KINDS = frozenset({"GRPOTrainer", "RLOOTrainer"})
_LOOKED_AT = 256
_COMPLETION = 256  # TRL's default of max_completion_length


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    prompt: int
    completion: int
    with_reference: bool

    def __call__(self, count: int) -> dict[str, Any]:
        if count < 1:
            raise WorkloadError(f"a batch of {count} completions cannot be made", hint="the smallest batch size is 1")
        with unfaked():
            batch = {
                "prompt_ids": torch.ones(count, self.prompt, dtype=torch.long),
                "prompt_mask": torch.ones(count, self.prompt, dtype=torch.long),
                "completion_ids": torch.ones(count, self.completion, dtype=torch.long),
                "completion_mask": torch.ones(count, self.completion, dtype=torch.long),
                "advantages": torch.ones(count),
                "num_items_in_batch": torch.tensor(count * self.completion),
            }
            batch["prompt_mask"][-1, : self.prompt // 4] = 0  # prompts are padded on the left
            if self.with_reference:
                batch["ref_per_token_logps"] = torch.zeros(count, self.completion)
        return batch


def generates(trainer: Any) -> bool:
    return any(base.__name__ in _KINDS for base in type(trainer).__mro__)


def generated_batches(trainer: Any) -> tuple[Generated, BatchShape, tuple[str, ...]]:
    completion = int(getattr(trainer.args, "max_completion_length", None) or _COMPLETION)
    prompt = _longest_prompt(trainer)
    made = Generated(prompt=prompt, completion=completion, with_reference=bool(getattr(trainer, "beta", 0.0)))
    note = f"batches are completions of {completion} tokens after prompts of at most {prompt}; generation is not in the estimate"
    return made, BatchShape(kind="text", length=prompt + completion), (note,)


def _longest_prompt(trainer: Any) -> int:
    found = readable_samples(trainer.train_dataset)
    if len(found) == 0:
        raise WorkloadError(
            "the prompts cannot be looked at", hint="give a dataset with __len__ and __getitem__, or a stream of `datasets`"
        )
    step = max(1, len(found) // _LOOKED_AT)
    prompts = [found[row]["prompt"] for row in range(0, len(found), step)]
    longest = max(prompts, key=sample_size)
    tokens = len(trainer.processing_class(text=_text(longest))["input_ids"])
    limit = getattr(trainer.args, "max_prompt_length", None)
    return max(1, min(tokens, limit) if isinstance(limit, int) else tokens)


def _text(prompt: Any) -> str:
    """A conversation's messages one after the other; its template adds a few tokens that do not count here."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence):
        return " ".join(str(message.get("content", "")) if isinstance(message, Mapping) else str(message) for message in prompt)
    return str(prompt)
