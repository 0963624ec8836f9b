"""Where words go: people read stderr (colours only on a terminal, NO_COLOR honoured), machines read stdout."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hfopt.errors import ConfigError, HfoptError
from hfopt.files import write_whole
from hfopt.redact import said

if TYPE_CHECKING:
    from rich.console import Console


NO_PLACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO})
"""What a write fails with that the user can do something about: a full disk, a quota, a limit, no rights."""


def say_what_the_terminal_can() -> None:
    """A sign that the terminal's encoding does not have (× in ASCII) becomes a question mark, not an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def give_up_stdout() -> None:
    """What is still buffered cannot be written; without this the interpreter would try again and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def people(*, quiet: bool = False) -> Console:
    """The console for people, on stderr."""
    from rich.console import Console

    return Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=not sys.stderr.isatty())


def print_error(error: HfoptError) -> None:
    sys.stderr.write(f"hfopt: {said(str(error))}\n")
    if error.hint:
        sys.stderr.write(f"  {error.hint}\n")


def write_out(data: bytes, target: Path | None, *, like: Path | None = None) -> None:
    """To stdout, or atomically to a file: there is never half a file.

    like: what the data was made from; a new file is not open to more people than that one.
    """
    if target is None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    try:
        allowed = _mode(like) if like is not None and like.exists() else 0o666
        write_whole(target, data, mode=None if target.exists() else 0o666 & allowed, durable=True)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from error


def _mode(file: Path) -> int:
    return file.stat().st_mode & 0o777
