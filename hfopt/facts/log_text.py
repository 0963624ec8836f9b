"""A training log as text that can be searched: escapes, control characters and launchers' prefixes removed, bounded, one stream per rank.

Logs come from terminals, notebooks, schedulers and issue threads: colours, progress bars drawn over each other, timestamps, `[rank3]:`,
`(EngineCore pid=1)`, `vllm-1  |`, boxes of rich, `&gt;` of a web page, JSON objects. What remains is what the program said, in its order.
The text is somebody else's: it is never obeyed, and what is repeated of it goes through `redact`.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from hfopt.redact import HIDDEN, said

MOST_BYTES = 32 << 20  # of the end of a log: an error stands there
_MOST_LINES, _LONGEST_LINE = 400_000, 4_000
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|[@-Z\\-_])|\x9b[0-?]*[ -/]*[@-~]"
)
_LITERAL_ESCAPES = re.compile(r"(?:\\x1b|\\u001b|\\033|␛)\[[0-9;]*m", re.IGNORECASE)  # a log that was itself printed by repr()
_COLAB_LINKS = re.compile(r"\[([^\[\]]{1,400})\]\(https?://localhost[^)]{0,40}\)")  # a notebook's frames, copied
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
_LINES = re.compile(r"\r\n|\n|\r|\u2028|\u2029|\x85")
_RANK = re.compile(
    r"\[rank\s?(?P<a>\d+)\]\s*:?|\[default(?P<b>\d+)\]\s*:|\[Rank (?P<c>\d+)\]|(?:^|\s)rank[ =:](?P<d>\d+)\b"
    r"|\[\d+,(?P<e>\d+)\]<std(?:err|out)>:?"
    r"|^(?P<f>\d{1,4}): (?=\S| )",
    re.IGNORECASE,
)
_PREFIXES = re.compile(
    r"^\s*(?:"
    r"\[rank\s?\d+\]\s*:?|\[default\d+\]\s*:|\[Rank \d+\]\s*:?|\[\d+,\d+\]<std(?:err|out)>:?"
    r"|\d{1,4}: (?=\s|File|Traceback|torch|Runtime|raise|\w)"
    r"|\((?:[\w.-]+ )?(?:pid=\d+(?:, ip=[\d.]+)?|\w+ pid=\d+|rank[ =]\d+)\)"  # ray, vLLM
    r"|\[?\d{4}[-/]\d\d[-/]\d\d[T ,_]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?[ :-]*"
    r"|\[?\d\d?[:/-]\d\d[:/-]\d\d(?:[.,]\d+)?\]?[ :-]*(?=\[|[A-Z]{4,8}\b|File|Traceback)"
    r"|\[?(?:INFO|WARNING|WARN|ERROR|CRITICAL|DEBUG|FATAL|E|W|I)\]?[ :|]+(?=\d\d-\d\d|\[|\d\d\d\d|File|Traceback|torch|Runtime|Value|\s)"
    r"|\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? "
    r"|\[?[\w./-]+\.(?:py|cc|cpp|cu):\d+\]"  # worker.py:335]
    r"|[\w.-]+-\d+\s+\| |\|\s(?=\[|\d{4})|>{1,3}\s|[│┃║|]\s?|\[\d+\.\d+\]\s?"
    r")"
)
_BOX_ENDS = ("│", "┃", "║")
_RECORDS = ("jsonPayload", "record", "fields")  # where some loggers put it all
_MESSAGES = (
    "message",
    "msg",
    "log",
    "text",
    "textPayload",
    "event",
    "line",
    "exc_info",
    "exc_text",
    "exception",
    "stack_trace",
    "traceback",
)
_SECRET_PAIRS = re.compile(r"(?i)\b((?:[\w-]*(?:token|secret|password|passwd|api_?key|access_key|authorization)[\w-]*)\s*[=:]\s*)(\S+)")


_SAMPLE, _MOST_CONTROLS = 1 << 16, 0.05  # bytes of a file's end that are looked at, and their share that no text has
_TEXTLESS = bytes(code for code in range(32) if code not in b"\t\n\v\f\r\b\x1b")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    number: int  # from 1, in the log as it was given
    text: str
    rank: int | None = None


def is_text(raw: bytes) -> bool:
    """Not a checkpoint or an archive: by the control characters at its end."""
    end = raw[-_SAMPLE:].replace(b"\0", b"")  # a log that was cut while it was written has a hole
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return True
    return (not raw or bool(end)) and len(end) - len(end.translate(None, _TEXTLESS)) <= _MOST_CONTROLS * max(len(end), 1000)


def read_lines(raw: bytes) -> tuple[LogLine, ...]:
    """The lines of a log's end; text in any encoding is read, what cannot be is replaced."""
    cut = raw[-MOST_BYTES:]
    text = cut.decode("utf-16") if cut[:2] in (b"\xff\xfe", b"\xfe\xff") and len(cut) == len(raw) else cut.decode("utf-8", "replace")
    return tuple(_lines(text))


def _lines(text: str) -> Iterator[LogLine]:
    pieces = _LINES.split(text)
    start = max(0, len(pieces) - _MOST_LINES)
    for number, piece in enumerate(pieces[start:], start=start + 1):
        said, told = _unwrapped(piece) if piece.startswith('{"') else ((piece,), None)
        for one in said:
            line = plain(one[:_LONGEST_LINE])
            rank = _rank(line)
            yield LogLine(number=number, text=_without_prefixes(line), rank=told if rank is None else rank)


def _unwrapped(piece: str) -> tuple[tuple[str, ...], int | None]:
    """What a logger that writes JSON was told: the lines of its message and of its exception, and the rank."""
    try:
        found = json.loads(piece)
    except (ValueError, RecursionError):
        return (piece,), None
    inner = next((found[name] for name in _RECORDS if isinstance(found.get(name), dict)), found)
    said = [inner[name] for name in _MESSAGES if isinstance(inner.get(name), str)]
    rank = next((value for name in ("rank", "local_rank") if type(value := inner.get(name)) is int), None)
    return (tuple(line for text in said for line in _LINES.split(text.rstrip())) or (piece,)), rank


def plain(text: str) -> str:
    """Without escapes and control characters, and with the signs of a web page as they are meant."""
    text = _LITERAL_ESCAPES.sub("", _ESCAPES.sub("", text))
    text = _COLAB_LINKS.sub(r"\1", text)
    if "&" in text:
        text = html.unescape(text)
    return _CONTROLS.sub("", text.replace("\t", "    ").replace("\x0b", " ")).rstrip()


def shown(text: str, most: int = 300) -> str:
    """A line of the log as it may be repeated."""
    line = _SECRET_PAIRS.sub(lambda match: match[1] + HIDDEN, said(plain(text))).strip()
    return line if len(line) <= most else line[: most - 1] + "…"


def _rank(line: str) -> int | None:
    match = _RANK.search(line[:200])
    return None if match is None else int(next(group for group in match.groups() if group is not None))


def _without_prefixes(line: str) -> str:
    bare = line.rstrip()
    line = bare[:-1].rstrip() if bare.endswith(_BOX_ENDS) else line
    for _ in range(8):
        shorter = _PREFIXES.sub("", line, count=1)
        if shorter == line:
            break
        line = shorter
    return line
