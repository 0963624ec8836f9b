"""Samples of every kind TRL trains on, of a stated length, and a tokenizer that makes one token of each word.

They are text, so that TRL's own preparation (its end of sequence, its truncation, its packing) turns them into what its collator takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
