"""Which versions of other packages are installed, read from files without importing them, and which torch has kernels for a card."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from hfopt.schema import Gpu


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


@cache
def attention_names() -> frozenset[str]:
    """What `attn_implementation` may be in the installed transformers, read from its source; empty where that says nothing."""
    folder = source_folder("transformers")
    source = folder / "modeling_utils.py" if folder is not None else None
    text = source.read_text(encoding="utf-8") if source is not None and source.is_file() else ""
    table = re.search(r"^class AttentionInterface\b.*?^    _global_mapping = \{$(.*?)^    \}", text, re.MULTILINE | re.DOTALL)
    return frozenset() if table is None else frozenset({"eager", *re.findall(r'^ +"([^"]+)":', table[1], re.MULTILINE)})


@cache
def module_names(model_type: str) -> frozenset[str]:
    """The names that a model's modules have in transformers' source of it; empty where there is none."""
    folder = source_folder("transformers")
    place = None if folder is None else folder / "models" / model_type.replace("-", "_")
    texts = [path.read_text(encoding="utf-8") for path in place.glob("modeling_*.py")] if place is not None else []
    return frozenset(name for text in texts for name in re.findall(r"self\.(\w+) = (?!config\b)", text))


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


FIRST_CUDA_FOR = {(8, 0): (11, 0), (8, 6): (11, 1), (8, 7): (11, 4), (8, 9): (11, 8), (9, 0): (11, 8), (10, 0): (12, 8), (12, 0): (12, 8)}
"""The CUDA version that first compiles for a capability: CUDA Toolkit release notes, new architectures."""

_TURING, _VOLTA, _MAXWELL = (7, 5), (7, 0), (5, 0)
_LAST_FOR_OLD_CARDS = "2.14"
"""The last torch with CUDA 12.6 wheels, the only ones that kept Maxwell, Pascal and Volta (pytorch/pytorch#190385,
pytorch/test-infra#8739)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MissingKernels:
    code: Literal["card_too_old", "build_too_old"]
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.message}; {self.fix}"


def missing_kernels(gpu: Gpu | None, build: TorchBuild | None) -> MissingKernels | None:
    """Why the build cannot run anything on the card, and which one can; None where it can, or where it is not known."""
    if gpu is None or gpu.vendor != "nvidia" or gpu.capability is None or build is None or build.cuda is None:
        return None
    cuda = numbers(build.cuda)
    without = f"torch {build.version} (CUDA {build.cuda}) has no kernels for {gpu.name} (capability {dotted(gpu.capability)})"
    least = _least_capability(build)
    if gpu.capability < least:
        fix = f"install torch {_LAST_FOR_OLD_CARDS} or older built for CUDA 12.6 (the cu126 wheels)"
        return MissingKernels(code="card_too_old", message=f"{without}: its kernels begin at {dotted(least)}", fix=fix)
    needs = max((first for capability, first in FIRST_CUDA_FOR.items() if capability <= gpu.capability), default=(0, 0))
    if cuda < needs:
        fix = f"install a torch built for CUDA {dotted(needs)} or newer"
        return MissingKernels(code="build_too_old", message=without, fix=fix)
    return None


def _least_capability(build: TorchBuild) -> tuple[int, int]:
    """CUDA 13 compiles for nothing before Turing. PyTorch's own CUDA 12.8 and 12.9 wheels left out Maxwell and Pascal from 2.8 on
    (pytorch/test-infra#7046) and Volta from 2.11 on (pytorch/pytorch#175253); who compiled torch himself chose for himself."""
    assert build.cuda is not None
    cuda, torch = numbers(build.cuda), numbers(build.version)
    if cuda >= (13, 0):
        return _TURING
    its_own = "+" not in build.version or "+cu" in build.version
    if not its_own or cuda < (12, 8) or torch < (2, 8):
        return _MAXWELL
    return _TURING if torch >= (2, 11) else _VOLTA


def numbers(text: str) -> tuple[int, int]:
    """'12.8' -> (12, 8); '2.9.0+cu128' -> (2, 9)."""
    parts = [int("".join(letter for letter in part if letter.isdigit()) or 0) for part in text.split("+")[0].split(".")]
    return (parts[0], parts[1] if len(parts) > 1 else 0)


def dotted(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"
