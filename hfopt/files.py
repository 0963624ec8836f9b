"""Files written whole or not at all, and the folder where hfopt keeps what it need not find out again.

What hfopt writes is written beside its place and renamed onto it, so that no reader ever sees half of it. Answers are kept in one folder
of the user's own, which nobody else can read or write: a folder or a link that somebody else put at its name is refused.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path


def location(name: str) -> Path:
    """`$XDG_CACHE_HOME/hfopt/<name>`, or below ~/.cache; nothing is made. A user without a home gets a place in the temporary folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if Path(base).is_absolute():
        return Path(base) / "hfopt" / name
    try:
        return Path.home() / ".cache" / "hfopt" / name
    except RuntimeError:
        return own_temporary() / name


def own_temporary() -> Path:
    return Path(tempfile.gettempdir()) / f"hfopt-{os.getuid()}"


def make_private(folder: Path) -> Path:
    """The folder, made where it is missing, what is made being for its owner only. Raises OSError."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    for place in reversed(missing):
        place.mkdir(mode=0o700, exist_ok=True)
    check_own(folder)
    return folder


def check_own(path: Path) -> None:
    """Raises PermissionError where another user could have put it there or could change it: by its owner, or through the temporary folder.

    Links are followed; what they lead to must be the user's own. Above the user's own folders root is trusted, as everywhere.
    """
    status = path.stat()
    if status.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
    above = own_temporary()
    if above in (path, *path.parents):
        shared = above.lstat()
        if stat.S_ISLNK(shared.st_mode) or shared.st_uid != os.getuid() or shared.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(errno.EPERM, "somebody else made it or may write to it", str(above))


def write_private(path: Path, text: str) -> None:
    """Whole or not at all, readable by its owner only. Raises OSError."""
    make_private(path.parent)
    write_whole(path, text, mode=0o600)


def write_whole(path: Path, data: str | bytes, *, mode: int | None = None, durable: bool = False) -> None:
    """Whole or not at all, from any thread or process. Raises OSError.

    mode: the permissions, less the umask; by default those of the file that is replaced, else those of any new file.
    durable: on the disk when this returns, for a file of the user's that a crash of the machine must not leave empty.
    """
    kept = stat.S_IMODE(path.stat().st_mode) if mode is None and path.exists() else None
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
            if durable:
                stream.flush()
                os.fsync(descriptor)
        if kept is not None:
            temporary.chmod(kept)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
