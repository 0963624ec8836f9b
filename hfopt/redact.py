"""Text from others, made safe to show: no credential (known by its key or its form), nothing that steers a terminal."""

from __future__ import annotations

import math
import os
import re
from typing import Any

_NAMES = re.compile(r"(?:^|_)(?:token|secret|password|passwd|api_?key|access_key|private_key|credentials?)$", re.IGNORECASE)
_OF_A_TOKENIZER = re.compile(r"(?:^|_)(?:pad|eos|bos|unk|mask|sep|cls|image|audio|video|stop|start|special)_token$", re.IGNORECASE)
_FORMS = re.compile(r"(?<![A-Za-z0-9])(?:(?:hf|api_org|ghp)[_-][A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{20,}|github_pat_\w{20,})")
_STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""C0 and C1 controls but tab and line feed, line separators, and signs that turn the direction of writing (trojansource.codes)."""
HIDDEN = "(hidden)"
_LEAST = 8
"""Characters of an environment's credential that is looked for: a shorter one would be found in ordinary words."""


def is_secret(key: str, value: Any) -> bool:
    """A non-empty string under a credential's name, or one that looks like a token wherever it stands."""
    if not isinstance(value, str) or not value:
        return False
    named = _NAMES.search(key) is not None and _OF_A_TOKENIZER.search(key) is None
    return named or _FORMS.search(value) is not None


def shown(key: str, value: Any) -> str:
    """A value as a message may show it: as YAML would say it, shortened, and never a credential."""
    if is_secret(key, value):
        return HIDDEN
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = _FORMS.sub(HIDDEN, repr(value) if isinstance(value, str) else str(value))
    return text if len(text) <= 60 else text[:57] + "..."


def said(text: str) -> str:
    """Somebody else's words (a script's error, a library's message), as they may be repeated: without tokens and the environment's own."""
    for name, value in os.environ.items():
        if len(value) >= _LEAST and is_secret(name, value):
            text = text.replace(value, HIDDEN)
    return printable(_FORMS.sub(HIDDEN, text))


def printable(text: str) -> str:
    """The text as a terminal or a page may show it: a sign that would move the cursor, colour or hide words becomes a replacement sign."""
    return _STEERS.sub("\ufffd", text)


def json_words(text: str) -> str:
    """JSON as a terminal may show it: the same text, those signs written by their numbers (json itself writes only the C0 ones so)."""
    return _STEERS.sub(lambda sign: f"\\u{ord(sign[0]):04x}", text)


def scrub(value: Any, key: str = "") -> Any:
    """The same value as JSON can say it, with every credential in it replaced."""
    if isinstance(value, dict):
        return {str(name): scrub(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [scrub(inner, key) for inner in value]
    if isinstance(value, bool | None) or (isinstance(value, int) and value.bit_length() <= 128):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return HIDDEN if is_secret(key, value) else value if isinstance(value, str) else shown(key, value)
