"""In which phase of a run memory ran out, by the frames of a traceback or, where there is none, by the log's last lines.

Frames are read in all forms that Python, IPython, pytest and rich print; `oom_signs` says what their names mean.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile, zip_longest

from hfopt.facts.log_text import LogLine
from hfopt.facts.oom_forms import form_of
from hfopt.facts.oom_signs import KNOWN, LINES, SCRIPTS
from hfopt.schema import OomPhase

_FRAMES = (
    re.compile(r'File "(?P<file>[^"]+)", line \d+, in (?P<function>[\w<>.]+)'),
    re.compile(r"File (?P<file>\S+?\.py):\d+, in (?P<function>[\w<>.]+)"),  # IPython
    re.compile(r"(?<!\S)(?P<file>\S+\.py) in (?P<function>[\w<>.]+)\("),  # older IPython
    re.compile(r"(?<!\S)(?P<file>\S+\.py):\d+:? in\s*(?P<function>[\w<>.]*)"),  # rich, pytest
    re.compile(r"(?<![\w./\\-])(?P<file>[\w./\\-]+\.py):\d+ (?P<function>[\w<>.]+) ?(?:->|$)"),
    re.compile(r"^(?P<file>(?:Cell In|Input In|In) ?\[\d+\])(?:, line \d+, in (?P<function>[\w<>.]+))?"),
    re.compile(r"^(?P<file>[^\s\"]*)(?:\", | *)line \d+, in (?P<function>[\w<>.]+)$"),  # pasted from its middle on
    re.compile(r"^\s*(?:→|->) (?P<file>)(?P<function>[\w<>.]+)"),  # told in arrows
    re.compile(r"“(?P<file>[^”]{1,300}\.py)”[,，] ?第 ?\d+ ?行[,，] ?在 ?(?P<function>[\w<>.]+)"),  # translated by a browser
)
_NATIVE_BACKWARD = re.compile(r"frame #\d+: .*(?:torch::autograd::Engine|_backward\w*\()")  # C++ frames behind a message
_CODE = re.compile(r"^(?!\s*\d+%)\s+\S|^[❱╰╭]|^-+> ?\d|^`?(?:return |[\w., ]+ = )[\w.]+\(")
_COMPILER = re.compile(r"torch/_(?:inductor|dynamo)/\S*\|(?!\w*(?:forward|backward))")  # its functions' names say nothing of the phase
_TYPED = re.compile(r"^(?:In \[\d+\]:|>>>) (?P<code>\S.*)")  # at a prompt
_ENDED = re.compile(r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Interrupt)(?:: .*)?$")
_CHAINED = re.compile(r"During handling of the above|direct cause of the following")
_CALL = re.compile(r"[\w\])]\(|\) ?[@*+] ?\w")
_ASSIGNS = re.compile(r"(?:^|: )\s*[\w.,\[\]]+ = [\w.\[\]]+(?:\(| [-+*/@%])")
_BROKEN_PATH = re.compile(r"^\s*(?:/|[A-Z]:\\)\S*\.py(?::\d*)?\s*$")  # rich breaks a long path anywhere
_NOTHING = LogLine(number=0, text="")
_CARETS = frozenset("^~ ─╭╮╰╯│")
_ENTRY = re.compile(r"\.(?:train|fit)\(")  # what called the training says nothing of the phase
_START = re.compile(r"Traceback \(most recent call last\)|^-{20,}$")
_CONTEXT = re.compile(r"^\s*[│|]?\s*\d+(?:\s|$)")  # a numbered line that IPython or rich prints around the one that ran
_LONGEST = 240  # characters of a file's end, of a function and of a line of code: what is longer says no more, and costs its square
_FAR = 400  # lines before an error that may belong to its traceback
_NEAR = 40  # without a traceback's beginning
_REDRAWN = 3  # lines behind an error, in which a progress bar is drawn once more
_AFTER = 80  # lines behind an error, in which the traceback of another process may tell the phase

_IN_FORWARD = re.compile(
    r"\|\w*forward\w*|_call_impl|attention|nn/(?:modules|functional)|/modeling_|training_step|compute_loss", re.IGNORECASE
)
_LAYERS = re.compile(r"(?:modeling_\w+|attention|transformer|mlp)\w*\.py\||(?:self_attn|attention|decoder_layer|layers?)\(", re.IGNORECASE)
_MODULE = re.compile(r"\|_(?:wrapped_)?call_impl\b")
_CALLED = re.compile(r"\.(\w+)\(")
_DEEPER: Mapping[OomPhase, re.Pattern[str]] = {  # what counts where it stands below a sign of that phase
    "backward": dict(KNOWN)["optimizer"],  # optimizers that step while gradients come
    "saving": re.compile(r"[|.]from_pretrained\b"),  # a script that merges loads first
    "generation": re.compile(r"\|\w*(?:logps|log_?probs?)\w*|\|_?(?:calculate|compute|get)_rewards?\b"),  # what was generated is scored
}
_IN_STEP: frozenset[OomPhase] = frozenset({"loading", "setup"})  # overruled where the Trainer is already in a step
_CLOSURE = re.compile(r"\|(?:\w*closure\w*|training_step)\b")  # Lightning calls the step from inside the optimizer
_STARTS_ENGINE = re.compile(r"Engine core initialization failed|EngineCore failed to start|engine process failed to start", re.IGNORECASE)
_TRAINS = re.compile(r"\|\w*(?:train|fit)\w*|trainer", re.IGNORECASE)
_ENGINE = re.compile(r"(?:vllm|sglang)\w*/\S*\|", re.IGNORECASE)
_ENGINE_WARMS_UP = re.compile(r"Capturing (?:cudagraph|CUDA graph)|profile run|Memory profiling|warm(?:ing)? up", re.IGNORECASE)
_BAR = re.compile(r"(\d+)/(\d+) \[\d+:\d\d")

_DONE = re.compile(r"\b(?:finished|completed|loaded)\b", re.IGNORECASE)
STEP = re.compile(r"(\d+)/\d+ \[[\d:]+<")


def phase_before(lines: Sequence[LogLine], index: int) -> tuple[OomPhase, str | None]:
    """The phase of the error at `lines[index]`, and the line that tells it."""
    rank = lines[index].rank
    own = [line for line in lines[max(0, index - 6 * _FAR) : index + 1] if line.rank in (rank, None) or rank is None][-_FAR:]
    after = [line for line in lines[index + 1 : index + _AFTER] if line.rank in (rank, None) or rank is None]
    found = _by_frames(_traceback(own)) or _by_frames(_traceback([*after, lines[index]]))  # streams mix: frames may follow the message
    if found is None or found[0] == "forward":
        native = next((line.text for line in reversed([*own, *after]) if _NATIVE_BACKWARD.search(line.text)), None)
        if native is not None:  # `train()` alone says less than the autograd engine
            return "backward", native
    started = next((line.text for line in after if _STARTS_ENGINE.search(line.text)), None)
    if started is not None and (found is None or found[0] in ("forward", "loading")):
        return "vllm_start", started
    if found is None:
        return _by_lines(own, [line for line in after[:_REDRAWN] if STEP.search(line.text)])
    return _whose_forward(own, found[1]) if found[0] == "forward" else found


def _whose_forward(own: Sequence[LogLine], evidence: str | None) -> tuple[OomPhase, str | None]:
    """A forward is a part of training, of an evaluation, or of an inference engine: by its frames and by what the log said last."""
    text = "\n".join(_traceback(own))
    if _ENGINE.search(text):
        warms_up = next((line.text for line in reversed(own[:-1]) if _ENGINE_WARMS_UP.search(line.text)), None)
        return ("generation", evidence) if warms_up is None else ("vllm_start", warms_up)
    if not _TRAINS.search(text):
        return next((phase for phase, script in SCRIPTS if script.search(text)), "forward"), evidence
    if not _IN_FORWARD.search(text):  # `train()` alone
        start = next((at for at in range(len(own) - 1, -1, -1) if _START.search(own[at].text)), len(own) - 1)
        around = _by_lines([*own[: start + 1], own[-1]], ())
        return ("forward", evidence) if around[0] in ("unknown", "loading", "data") else around
    return "forward", evidence


def _traceback(lines: Sequence[LogLine]) -> list[str]:
    """`file|function` of each frame and the code below it, from the last traceback's beginning; cut ones begin where they begin."""
    start = next((at for at in range(len(lines) - 1, -1, -1) if _START.search(lines[at].text) and _has_frame(lines[at:])), None)
    if start is not None:
        return [] if _anothers(lines[start:-1]) else _signs(lines[start:])
    nearby = lines[-_NEAR:]
    return _signs(nearby) if _has_frame(nearby) else _broken(nearby) or _code_above(nearby)


def _anothers(lines: Sequence[LogLine]) -> bool:
    """A traceback that ended in another error before the message, which was not raised from it."""
    end = next((at for at in range(len(lines) - 1, 0, -1) if _ENDED.search(lines[at].text) and form_of(lines[at].text) is None), None)
    return end is not None and not any(_frame(line.text) or _CHAINED.search(line.text) for line in lines[end + 1 :])


def _broken(lines: Sequence[LogLine]) -> list[str]:
    """Frames whose lines a terminal broke in the middle of words."""
    joined = "".join(line.text for line in lines[:-1])
    frames = [f"{match['file']}|{match['function']}" for match in _FRAMES[0].finditer(joined)]
    return [*frames, joined] if frames else []


def _code_above(lines: Sequence[LogLine]) -> list[str]:
    """The indented lines right above the message: the code of a frame whose own line was not pasted."""
    above = list(takewhile(lambda line: _CODE.search(line.text) or not line.text.strip(), reversed(lines[:-1])))
    ran = [line.text for line in lines[:-1] if line.text.strip() and not set(line.text) <= _CARETS][-1:]
    beside = [text for text in ran if _ASSIGNS.search(text)] + [_begun(lines[-1].text)]
    return [*_signs([*reversed(above), lines[-1]]), *(text.strip() for text in beside if _CALL.search(text) or _ASSIGNS.search(text))]


def _begun(text: str) -> str:
    """What stands before the message on its own line."""
    form = form_of(text)
    said = None if form is None else form.sign.search(text)
    return text[: 0 if said is None else said.start()]


def _has_frame(lines: Sequence[LogLine]) -> bool:
    return any(_frame(line.text, following.text) is not None for line, following in zip_longest(lines, lines[1:], fillvalue=_NOTHING))


def _frame(text: str, following: str = "") -> str | None:
    """`file|function` of a line, with the one after it where a terminal broke a long path."""
    if not any(sign in text for sign in (".py", "line ", "In [", "In[", "→", "->")):  # a long line without any costs as much as its square
        return None
    for form in _FRAMES:
        match = form.search(text)
        if match is not None:
            return f"{match['file'][-_LONGEST:]}|{(match['function'] or '').rsplit('.', 1)[-1][:_LONGEST]}".replace("\\\\", "/").replace(
                "\\", "/"
            )
    if not following or not _BROKEN_PATH.search(text):
        return None
    return _frame(text.strip() + following.strip()) or _frame(f"{text.strip()} {following.strip()}")


def _signs(lines: Sequence[LogLine]) -> list[str]:
    """Frames, and of the code shown with them only what ran."""
    signs: list[str] = []
    for line, following in pairwise(lines):  # the last one is the message itself
        frame = _frame(line.text, following.text)
        if signs and signs[-1].endswith(".py|") and re.fullmatch(r"\s*[\w<>.]+\s*", line.text):
            signs[-1] += line.text.strip()  # rich breaks the line before a long function's name
            continue
        if frame is None and _CONTEXT.search(line.text):
            continue
        code = re.sub(r"^[\s❱>-]*(?:-+> ?)?\d* ?[│|]?\s*", "", line.text)
        typed = _TYPED.match(line.text)
        if typed is not None:
            signs.append(typed["code"])
        elif frame is not None:
            signs.append(frame if _COMPILER.search(frame) is None else frame.split("|")[0] + "|")
        elif code.strip() and not set(code) <= _CARETS and (signs or "(" in code):
            signs.append(code.strip()[:_LONGEST])
    return signs


def _by_frames(signs: list[str]) -> tuple[OomPhase, str | None] | None:
    if not signs:
        return None
    signs = signs[next((at for at, sign in enumerate(signs) if _ENTRY.search(sign)), 0) :]
    text = "\n".join(signs)
    called = () if "|" in signs[-1] else _CALLED.findall(signs[-1])  # the innermost line calls the frame that would follow
    known = _known(text) or (_known("\n".join((text, *(f"|{name}" for name in called)))) if called else None)
    return None if known is None else (known[0], _evidence(signs, known[1]))


def _known(text: str) -> tuple[OomPhase, re.Pattern[str]] | None:
    """The first row of signs that counts in these frames."""
    in_step = re.search(r"\|(?:training_step|compute_loss|_inner_training_loop|inner_training_loop)\b", text) is not None
    closure = max((match.end() for match in _CLOSURE.finditer(text)), default=0)
    for phase, known in KNOWN:
        match = known.search(text, closure if phase == "optimizer" else 0)
        if match is None or (phase in _IN_STEP and in_step and not _late_loading(text)):
            continue
        if phase == "loss" and _goes_deeper(text, list(known.finditer(text))[-1]):
            continue
        if phase in _DEEPER and _last(_DEEPER[phase], text) > _last(known, text):
            continue
        return phase, known
    return None


def _last(known: re.Pattern[str], text: str) -> int:
    return max((match.end() for match in known.finditer(text)), default=-1)


def _late_loading(text: str) -> bool:
    """Within train(), weights are only loaded before the first step or after the last."""
    return re.search(
        r"[|.](?:_load_best_model|_load_from_checkpoint|_load_optimizer_and_scheduler|prepare|prepare_model|_move_model_to_device)\b", text
    ) is not None and not re.search(r"\|(?:training_step|compute_loss)\b", text)


def _goes_deeper(text: str, last: re.Match[str]) -> bool:
    """Frames of a model's own layers after the last that names the loss, or a module that a loss function calls: a forward."""
    after = text[last.end() :]
    return _LAYERS.search(after) is not None or ("|" in last[0] and _MODULE.search(after) is not None)


def _evidence(signs: list[str], known: re.Pattern[str]) -> str:
    """The innermost frame or line that says so."""
    found = next((sign for sign in reversed(signs) if known.search(sign)), signs[-1])
    return found.replace("|", ", in ", 1)


def _by_lines(own: Sequence[LogLine], after: Sequence[LogLine]) -> tuple[OomPhase, str | None]:
    """By the last line before the message that shows it, what stands before the message on its own line first."""
    for text in (_begun(own[-1].text), *(line.text for line in reversed(own[:-1])), *(line.text for line in after)):
        for phase, sign in LINES:
            if sign.search(text):
                return ("unknown", None) if (phase in ("forward", "generation") or _DONE.search(text)) and _is_over(text) else (phase, text)
    return "unknown", None


def _is_over(text: str) -> bool:
    """A bar at its end, or a program that says so: it was done."""
    if _DONE.search(text):
        return True
    bars = _BAR.findall(text)
    return bool(bars) and bars[-1][0] == bars[-1][1] and "loss" not in text
