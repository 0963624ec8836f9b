"""Where hfopt keeps what it need not find out twice: one folder of the user's own, which nobody else can read or write."""

from __future__ import annotations

import os
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
    return folder


def write_private(path: Path, text: str) -> None:
    """Whole or not at all, readable by its owner only. Raises OSError."""
    make_private(path.parent)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
