"""Samples of every kind TRL trains on, of a stated length, and a tokenizer without a vocabulary that makes one token of each word.

A model's processor needs a tokenizer to turn images into placeholder tokens, and a config.json comes without one. How many placeholders
there are does not depend on the words. `ids_for` says which of the model's own ids the tags stand for.

They are text, so that TRL's own preparation (its end of sequence, its truncation, its packing) turns them into what its collator takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import BatchEncoding, PreTrainedTokenizerBase

WORD = 1
_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
_FIRST_TAG = 1_000_000_000  # no vocabulary is so large


class _Encoding(BatchEncoding):  # type: ignore[misc]
    """With the places of characters, which processors of tiled images ask for."""

    spans: list[list[tuple[int, int]]]

    def char_to_token(self, batch_or_char_index: int, char_index: int | None = None, sequence_index: int = 0) -> int | None:
        row, char = (0, batch_or_char_index) if char_index is None else (batch_or_char_index, char_index)
        return next((place for place, (start, end) in enumerate(self.spans[row]) if start <= char < end), None)


class WordTokenizer(PreTrainedTokenizerBase):  # type: ignore[misc]
    """Any `x_token` a processor asks it for exists, and is the tag `<x_token>`."""

    vocab_files_names: Mapping[str, str] = {}
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self) -> None:
        self._tags: dict[str, int] = {}
        super().__init__()

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_token_id"):
            return self.convert_tokens_to_ids(f"<{name.removesuffix('_id')}>")
        if name.endswith("_token"):
            return f"<{name}>"
        raise AttributeError(name)

    def __len__(self) -> int:
        return _FIRST_TAG

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, (list, tuple)):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        return None if tokens is None else self._tags.setdefault(str(tokens), _FIRST_TAG + len(self._tags))

    def add_special_tokens(self, *_: Any, **__: Any) -> int:
        return 0

    def add_tokens(self, *_: Any, **__: Any) -> int:
        return 0

    def get_vocab(self) -> dict[str, int]:
        return dict(self._tags)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [token for token, _ in self._split(text)]

    def __call__(self, text: Any = None, return_tensors: str | None = None, **_: Any) -> BatchEncoding:
        rows = [self._split(row) for row in ([text] if isinstance(text, str) else text)]
        ids = [[token for token, _ in row] for row in rows]
        masks = [[1] * len(row) for row in rows]
        data = {"input_ids": ids[0], "attention_mask": masks[0]} if isinstance(text, str) else {"input_ids": ids, "attention_mask": masks}
        encoding = _Encoding(data, tensor_type=return_tensors)
        encoding.spans = [[span for _, span in row] for row in rows]
        return encoding

    def _split(self, text: str) -> list[tuple[int, tuple[int, int]]]:
        found = []
        for match in re.finditer(rf"{_TAG.pattern}|[^\s<\[]+|\S", text):
            token = self.convert_tokens_to_ids(match.group()) if _TAG.fullmatch(match.group()) else WORD
            found.append((token, match.span()))
        return found

    def ids_for(self, processor: Any, config: Any) -> dict[int, int]:
        """Tag → id: a tag that the tokenizer or the processor calls `image_token` is the config's `image_token_id`; others are words."""
        names = {tag: [tag.strip("<>")] for tag in self._tags}
        for name, tag in vars(processor).items():
            if name.endswith("_token") and isinstance(tag, str) and tag in names:  # InternVL's is its tokenizer's `context_image_token`
                names[tag].append(name)
        return {number: _id_of(config, names[tag]) for tag, number in self._tags.items()}


def _id_of(config: Any, names: Sequence[str]) -> int:
    """`image_token_id`, or `image_token_index` as older configs call it."""
    keys = [f"{name}{end}" for name in names if name.endswith("_token") for end in ("_id", "_index")]
    return next((value for key in keys if isinstance(value := getattr(config, key, None), int)), WORD)


_WORD = "a"
_WORDS = ("<pad>", "<eos>", "<unk>", _WORD)
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSize:
    """In tokens. `shorter` is the other sample of a batch, None where all are alike."""

    length: int
    prompt: int = 1
    shorter: int | None = None


def rows(kind: str, size: SampleSize) -> list[Row]:
    """The longest sample and, where there is one, the shorter; repeated, for trainers that look at their neighbours."""
    make = _MAKERS[kind]
    lengths = [size.length, size.length if size.shorter is None else size.shorter]
    return [make(max(length - 1, 1), min(size.prompt, length - 1), first) for first, length in enumerate(lengths)] * 2


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({word: index for index, word in enumerate(_WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _text(tokens: int) -> str:
    return " ".join([_WORD] * tokens)


def _whole(tokens: int, _: int, __: int) -> Row:
    return {"text": _text(tokens)}


def _pair(tokens: int, prompt: int, _: int) -> Row:
    answer = _text(tokens - prompt)
    return {"prompt": f"{_text(prompt)} ", "chosen": answer, "rejected": answer}


def _judged(tokens: int, prompt: int, number: int) -> Row:
    return {"prompt": f"{_text(prompt)} ", "completion": _text(tokens - prompt), "label": number == 0}


def _prompt(tokens: int, prompt: int, _: int) -> Row:
    return {"prompt": _text(prompt)}


_MAKERS: Mapping[str, Callable[[int, int, int], Row]] = {
    "SFT": _whole,
    "DPO": _pair,
    "KTO": _judged,
    "Reward": _pair,
    "GRPO": _prompt,
    "RLOO": _prompt,
    "ORPO": _pair,
    "CPO": _pair,
}
