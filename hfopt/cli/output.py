"""Where words go: people read stderr (colours only on a terminal, NO_COLOR honoured), machines read stdout."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from hfopt.errors import ConfigError, HfoptError
from hfopt.redact import printable, said

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status


NO_PLACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO})
"""What a write fails with that the user can do something about: a full disk, a quota, a limit, no rights."""


def say_what_the_terminal_can() -> None:
    """A sign that the terminal's encoding does not have (× in ASCII) becomes a question mark, not an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


_reserved: TextIO | None = None


def _stdout() -> TextIO:
    return _reserved or sys.stdout


@contextmanager
def reserved_stdout() -> Iterator[None]:
    """Within it only answers reach stdout. What other packages print goes to stderr, whether from Python or from below it: DeepSpeed logs
    to stdout when it is imported, a model's own file may print, and neither may stand in the YAML."""
    global _reserved
    theirs = sys.stdout
    theirs.flush()
    with ExitStack() as after:
        ours = theirs
        if isinstance(theirs, io.TextIOWrapper) and theirs is sys.__stdout__ and theirs.fileno() == 1:
            kept = os.dup(1)
            ours = after.enter_context(open(kept, "w", encoding=theirs.encoding, errors="replace"))  # noqa: PTH123 - a descriptor
            after.callback(os.dup2, kept, 1)
            os.dup2(2, 1)
        after.enter_context(redirect_stdout(sys.stderr))
        _reserved = ours
        try:
            yield
        finally:
            _reserved = None


def give_up_stdout() -> None:
    """What is still buffered cannot be written; without this the interpreter would try again and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def people(*, quiet: bool = False) -> Console:
    """The console for people, on stderr. Names of models and folders are words to it: neither markup nor escape sequences."""
    return _console()(stderr=True, quiet=quiet, highlight=False, markup=False, soft_wrap=not sys.stderr.isatty())


def tables() -> Console:
    """The console for a table that is the answer itself, on stdout."""
    out = _stdout()
    return _console()(file=out, soft_wrap=False, highlight=False, markup=False, width=None if out.isatty() else 160)


@cache
def _console() -> type[Console]:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Cautious(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

    return Cautious


def progress_on(status: Status) -> Callable[[str], None]:
    """Lines of progress beside a spinner, with the seconds since it began; a plain string would be read as markup."""
    from rich.text import Text

    began_s = time.monotonic()

    class Line:
        def __init__(self, text: str) -> None:
            self.text = text

        def __rich__(self) -> Text:
            return Text(f"{self.text} ({time.monotonic() - began_s:.0f} s)")

    return lambda text: status.update(Line(text))


def answer(text: str) -> None:
    """Text that was asked for, on stdout."""
    _stdout().write(printable(text))


def remark(text: str) -> None:
    """Text for people on stderr, where no console is needed for it."""
    sys.stderr.write(printable(text))


def print_error(error: HfoptError) -> None:
    """The sentence first: the hint may be worked out only now, in seconds, and whoever does not wait for it has the answer."""
    remark(f"hfopt: {said(str(error))}\n")
    sys.stderr.flush()
    try:
        hint = error.hint
    except KeyboardInterrupt:
        hint = "interrupted before it was known what would help"
    if hint:
        remark(f"  {said(hint)}\n")


def check_writable(file: Path | None) -> None:
    """Before the seconds that an answer takes, not after them."""
    if file is None:
        return
    if file.is_dir():
        raise ConfigError(f"{file} is a folder", hint="name a file in it")
    if not file.parent.is_dir():
        raise ConfigError(f"{file} cannot be written: there is no folder {file.parent}", hint="make it first, or name another file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{file} cannot be written: no permission", hint="name a file that is yours")


def redirected() -> Path | None:
    """The file that stdout is redirected to, as the user would name it; None: a terminal, a pipe, or not to be found out."""
    try:
        descriptor = _stdout().fileno()
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        target = Path(f"/proc/self/fd/{descriptor}").readlink()
    except (OSError, ValueError):
        return None
    return target.relative_to(Path.cwd()) if target.is_relative_to(Path.cwd()) else target


def write_out(data: bytes, target: Path | None, *, like: Path | None = None) -> None:
    """To stdout, or atomically to a file: there is never half a file.

    like: what the data was made from; a new file is not open to more people than that one.
    """
    if target is None:
        out = _stdout()
        out.flush()  # what was written as text stands before it
        out.buffer.write(data)
        out.buffer.flush()
        return
    from hfopt.files import write_whole

    try:
        allowed = _mode(like) if like is not None and like.exists() else 0o666
        write_whole(target, data, mode=None if target.exists() else 0o666 & allowed, durable=True)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from error


def _mode(file: Path) -> int:
    return file.stat().st_mode & 0o777
