"""Which versions of other packages are installed, and where their source lies: read from files, nothing is imported.

Versions are compared as `packaging.version` does, so that 2.10 comes after 2.9 and a development build (2.9.0a0+git) is a 2.9.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_RECORD = re.compile(r"(?P<name>.+?)(-(?P<version>[^-]+))?(-py[\d.]+)?\.(?P<kind>dist-info|egg-info|egg|egg-link)$")


def package_version(name: str) -> str | None:
    """As its metadata says; None where it is not installed. The name of its folder says it too, in a tenth of the time that
    `importlib.metadata` takes to be imported; records of other kinds than pip's are left to that."""
    wanted = _normal(name)
    for folder in sys.path:
        for record, version in _records(folder).get(wanted, ()):
            if version is None:
                return _stated_version(name)
            if (record / "METADATA").is_file():
                return version
    return None


@cache
def _records(folder: str) -> dict[str, list[tuple[Path, str | None]]]:
    """What is installed there, by name; without a version where the folder's name is not enough."""
    found: dict[str, list[tuple[Path, str | None]]] = {}
    place = Path(folder or ".")
    for entry in sorted(place.iterdir()) if place.is_dir() else ():
        if (read := _RECORD.match(entry.name)) is not None:
            version = read["version"] if read["kind"] == "dist-info" else None
            found.setdefault(_normal(read["name"]), []).append((entry, version))
    return found


def _normal(name: str) -> str:
    """As PEP 503 compares them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _stated_version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, int]:
    """Major and minor: (2, 9) for 2.9.0+cu128. Raises ValueError where the text is no version."""
    from packaging.version import Version

    parsed = Version(version)
    return parsed.major, parsed.minor


def is_at_least(package: str, oldest: str) -> bool:
    """Whether the installed package is of that version or later; development builds of it count. False where it is not installed."""
    found = package_version(package)
    return found is not None and release(found) >= release(oldest)


@cache
def installed_torch() -> tuple[int, int]:
    """The torch that the run will use: its allocator and its workspaces have changed over the versions."""
    found = package_version("torch")
    assert found is not None, "torch is a dependency"
    return release(found)


def source_folder(package: str) -> Path | None:
    """Where the installed package's source lies; None where it is not installed."""
    spec = find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


@cache
def training_arguments_source() -> str:
    """Read, not imported: importing TrainingArguments brings accelerate and costs a second."""
    folder = source_folder("transformers")
    assert folder is not None, "transformers is a dependency"
    return (folder / "training_args.py").read_text(encoding="utf-8")


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchBuild:
    """torch/version.py, read and not run. A build for neither CUDA nor ROCm is for the CPU."""

    version: str
    cuda: str | None = None
    hip: str | None = None

    @property
    def cpu_only(self) -> bool:
        return self.cuda is None and self.hip is None


def torch_build(folder: Path | None = None) -> TorchBuild | None:
    """The build in `folder` (by default the one that `import torch` would give); None where there is none."""
    folder = folder or source_folder("torch")
    if folder is None:
        return None
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    return parse_build(text)


def parse_build(text: str) -> TorchBuild | None:
    """`__version__ = '2.9.0+cu128'` and `cuda: Optional[str] = '12.8'` are all there is to read."""
    found: dict[str, str] = {}
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
        else:
            continue
        if isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
            found[name] = statement.value.value
    if "__version__" not in found:
        return None
    return TorchBuild(version=found["__version__"], cuda=found.get("cuda"), hip=found.get("hip"))
