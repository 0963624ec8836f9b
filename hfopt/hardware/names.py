"""What a card is called, forgivingly: a name becomes a set of words in which spelling, order and vendor prefixes do not matter.

'NVIDIA GeForce RTX 4060 Laptop GPU', 'rtx 4060 laptop' and '4060-Mobile' are all {4060, laptop}; 'A100-SXM4-80GB' is {a100, sxm, 80gb}.
"""

from __future__ import annotations

import re
from functools import lru_cache

_NOISE = frozenset(
    {"nvidia", "geforce", "rtx", "gtx", "tesla", "gpu", "graphics", "card", "generation", "gen", "edition", "design", "with"}
    | {"hbm2", "hbm2e", "hbm3e"}  # but not hbm3: it tells the H100 SXM from the H100 PCIe
)
_SYNONYMS = {"mobile": "laptop", "notebook": "laptop", "ws": "workstation"}
_REWRITES = (
    (r"(\d[a-z]*(?:[\s_-]+[a-z]+)?)[\s_-]+(\d{1,3})$", r"\1 \2gb"),  # 'A100-80', but not 'GTX 980'
    (r"titan[\s_-]*(rtx|xp|x|v)\b", r"titan\1"),  # here 'rtx' is the name
    (r"max[\s_-]*q", "maxq"),
    (r"(?<![.\d])(\d+)\s*gi?b\b", r" \1gb "),  # but not in the MIG profile 1g.5gb
    (r"\bsxm\d?\b", "sxm"),
    (r"\bpci-?e\b", "pcie"),
    (r"\b(rtx|gtx)(?=[a\d])", r"\1 "),
    (r"\b(\d{4})(ti|super|tisuper|m|d|s)\b", r"\1 \2"),
    (r"\b(\d{4})\s*(ti)?\s*m\b", r"\1 \2 laptop"),
    (r"\b(\d{4}(?:\s*ti)?)\s*s\b", r"\1 super"),
    (r"\btisuper\b", "ti super"),
)
_SIZE = r"(\d+)gb"


@lru_cache(maxsize=1024)
def words(name: str) -> frozenset[str]:
    """The words of a name that tell cards apart."""
    return frozenset(_in_order(name))


def shorthand(name: str) -> str:
    """The same as one word, to be typed: 'GeForce RTX 3070 Laptop' -> '3070-laptop'."""
    return "-".join(_in_order(name))


def _in_order(name: str) -> list[str]:
    text = name.lower()
    for pattern, replacement in _REWRITES:
        text = re.sub(pattern, replacement, text)
    found = re.findall(r"\d+g\.\d+gb|[a-z]*\d+[a-z]*|[a-z]+", text)
    return [_SYNONYMS.get(word, word) for word in found if word not in _NOISE]


def is_mig(found: frozenset[str]) -> bool:
    """Whether the words name a MIG instance ('mig', '1g.5gb') and not a whole card."""
    return "mig" in found or any(re.fullmatch(r"\d+g\.\d+gb", word) for word in found)


def size_gb(found: frozenset[str]) -> int | None:
    """The memory size among the words ('80gb' -> 80), if there is one."""
    return next((int(match[1]) for word in found if (match := re.fullmatch(_SIZE, word))), None)


def without_size(found: frozenset[str]) -> frozenset[str]:
    return frozenset(word for word in found if not re.fullmatch(_SIZE, word))


def plain(name: str) -> str:
    """A product name as a key: lower case, one space, no vendor prefix (drivers before 465 left 'NVIDIA' out) and no trailing 'GPU'."""
    text = " ".join(name.lower().replace("(tm)", "").split())
    return text.removeprefix("nvidia ").removesuffix(" gpu")
