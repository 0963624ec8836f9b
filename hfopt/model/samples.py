"""The longest samples of a dataset, a trainer's own collator on them, and batches of trainers that write their samples (GRPO, RLOO).

The longest samples of a dataset, found without using it up and without a trace in the random state. Lengths come from the arrow column of
token ids, all of it, when there is one; else single samples are looked at, evenly spread, until a time limit. Of a stream of `datasets`,
which begins anew for every reader, the first few are read, and trusted only if they are all of one length. Any other dataset that can only
be read in order is left alone.

A batch is what the trainer hands to its `compute_loss` after generating and scoring: token ids and masks of prompts and completions, one
advantage each, and the reference's log-probabilities where a KL term needs them. Generation itself is not in the traced step.
"""

from __future__ import annotations

import copy
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hfopt.errors import WorkloadError
from hfopt.model.builder import unfaked
from hfopt.model.losses import apart
from hfopt.schema import BatchShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Collated:
    collate: Callable[[list[Any]], Any]
    samples: Samples

    def __call__(self, count: int) -> dict[str, Any]:
        if count < 1:
            raise WorkloadError(f"a batch of {count} samples cannot be made", hint="the smallest batch size is 1")
        with same_random_state(), unfaked():
            return dict(self.collate([copy.copy(sample) for sample in self.samples.batch_of(count)]))


def collator_of(trainer: Any) -> Callable[[list[Any]], Any]:
    """What makes a batch of samples in training: its collator, without the columns the model does not take. Draws leave no trace."""
    from transformers import Trainer

    beside = apart(trainer)
    collate = beside.data_collator
    if type(trainer).get_train_dataloader is Trainer.get_train_dataloader:  # one of its own may remove none (sentence-transformers)
        collate = beside._get_collator_with_removed_columns(collate)

    def collated(samples: list[Any]) -> Any:
        with same_random_state():
            return collate(samples)

    return collated


_MOST_SAMPLES = 1024
_TIME_LIMIT_S = 2.0
_FROM_A_STREAM = 16
_SHARES = 64  # lengths that stand for all of them
_TOKEN_COLUMNS = ("length", "input_ids", "prompt_input_ids", "chosen_input_ids", "input_features", "input_values")


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """The longest sample seen, and a shorter one so that a batch has padding where the data makes it so."""

    longest: Any
    shorter: Any | None
    seen: int
    of: int | None
    lengths: tuple[int, ...] = ()  # in tokens, each for the same share of the samples, ascending; () when samples are not tokens
    filled: bool = False  # the shorter one of a batch lacks a token only: a fused head sees no padding, and the fullest batch counts

    def batch_of(self, count: int) -> list[Any]:
        """`count` samples with the longest among them; the second is the shorter one."""
        samples = [self.longest] * count
        if count > 1 and self.shorter is not None:
            samples[1] = (_one_token_less(self.longest) if self.filled else None) or self.shorter
        return samples


@contextmanager
def same_random_state() -> Iterator[None]:
    """Leaves Python's, NumPy's and torch's generators as they were."""
    import numpy

    python, numpy_state, cpu = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numpy_state)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def readable_samples(dataset: Any) -> Sequence[Any]:
    """Samples by index: the dataset itself, the first few of a stream that can be read again, or none."""
    if dataset is None:
        return ()
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return dataset  # type: ignore[no-any-return]
    if type(dataset).__module__.split(".")[0] == "datasets" and hasattr(dataset, "take"):
        return list(dataset.take(_FROM_A_STREAM))
    return ()


def longest_samples(dataset: Any) -> Samples | None:
    """None: there is no dataset, it is empty, or what can be read of it does not tell."""
    found = readable_samples(dataset)
    if len(found) == 0:
        return None
    if found is not dataset:
        one_length = len({sample_size(sample) for sample in found}) == 1
        return Samples(longest=found[0], shorter=None, seen=len(found), of=None) if one_length else None
    column = _column_lengths(dataset)
    if column is not None:
        order = sorted(range(len(column)), key=column.__getitem__)
        ascending = [column[index] for index in order]
        middle = _shorter(ascending)
        shorter = None if middle is None else dataset[order[middle]]
        return Samples(longest=dataset[order[-1]], shorter=shorter, seen=len(column), of=len(dataset), lengths=shares(ascending))
    sized = sorted(((sample_size(sample), index, sample) for index, sample in _spread(dataset)), key=lambda entry: entry[:2])
    middle = _shorter([size for size, _, _ in sized])
    return Samples(
        longest=sized[-1][2],
        shorter=None if middle is None else sized[middle][2],
        seen=len(sized),
        of=len(dataset),
        lengths=shares(sorted(filter(None, (token_count(sample) for _, _, sample in sized)))),
    )


def _shorter(ascending: Sequence[int]) -> int | None:
    """The index of the sample that brings padding: the middle one, or the longest below where more than half were cut to one length."""
    below = bisect_left(ascending, ascending[-1])
    return min(len(ascending) // 2, below - 1) if below else None


def shares(ascending: Sequence[int]) -> tuple[int, ...]:
    """At most so many lengths that stand for all: the middle of each share."""
    count = min(len(ascending), _SHARES)
    return tuple(ascending[(2 * number + 1) * len(ascending) // (2 * count)] for number in range(count))


def _one_token_less(sample: Any) -> dict[str, Any] | None:
    """The sample without the last of its tokens, in every column that is as long; None where it is not one row of tokens."""
    if not isinstance(sample, Mapping) or "seq_lengths" in sample:  # several texts in one row
        return None
    rows = {name: len(value) for name, value in sample.items() if isinstance(value, Sized) and not isinstance(value, str)}
    most = max((length for name, length in rows.items() if name.endswith("_ids")), default=0)
    return {name: value[:-1] if rows.get(name) == most else value for name, value in sample.items()} if most > 1 else None


def token_count(sample: Any) -> int:
    """How many tokens a tokenised sample has; 0 when it is something else."""
    ids = sample.get("input_ids") if isinstance(sample, Mapping) else None
    return len(ids) if isinstance(ids, Sized) else 0


def sample_size(sample: Any) -> int:
    """How many numbers (or characters) a sample holds; only the order matters."""
    if isinstance(sample, Mapping):
        return sum(sample_size(value) for value in sample.values())
    if isinstance(sample, torch.Tensor):
        return int(sample.numel())
    if isinstance(sample, (str, bytes)):
        return len(sample)
    size = getattr(sample, "size", None)
    if isinstance(size, int):  # an array
        return size
    if isinstance(size, tuple) and len(size) == 2:  # an image
        return int(size[0]) * int(size[1])
    if isinstance(sample, Sequence):
        return sum(sample_size(value) for value in sample) if sample and not isinstance(sample[0], (int, float)) else len(sample)
    return 1


def _spread(dataset: Any) -> Iterable[tuple[int, Any]]:
    """Samples evenly spread over the dataset, until there are enough or the time is up; always at least one."""
    began, step = time.monotonic(), max(1, len(dataset) // _MOST_SAMPLES)
    for index in range(0, len(dataset), step):
        yield index, dataset[index]
        if time.monotonic() - began > _TIME_LIMIT_S:
            return


def _column_lengths(dataset: Any) -> list[int] | None:
    """Lengths from the arrow column of a `datasets.Dataset`; its transforms are not run."""
    names = getattr(dataset, "column_names", None)
    column = next((name for name in _TOKEN_COLUMNS if isinstance(names, list) and name in names), None)
    if column is None or not hasattr(dataset, "with_format"):
        return None
    import pyarrow as arrow
    import pyarrow.compute as compute

    lengths: list[int] = []
    for part in dataset.select_columns([column]).with_format("arrow").iter(batch_size=10_000):
        values = part[column]
        if arrow.types.is_integer(values.type):
            lengths += values.to_pylist()
        elif arrow.types.is_list(values.type) or arrow.types.is_large_list(values.type):
            lengths += compute.list_value_length(values).to_pylist()
        else:
            return None
    return [length or 0 for length in lengths]


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
                "old_logps": torch.zeros(count),  # RLOO's
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
