"""What is installed, read from files and not imported: the torch build and the packages that matter for speed."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

OPTIONAL_PACKAGES = ("flash-attn", "liger-kernel", "bitsandbytes", "peft", "deepspeed", "xformers", "triton")


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchBuild:
    """torch/version.py, read and not run. A build for neither CUDA nor ROCm is for the CPU."""

    version: str
    cuda: str | None = None
    hip: str | None = None

    @property
    def cpu_only(self) -> bool:
        return self.cuda is None and self.hip is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    torch: TorchBuild | None
    transformers: str | None
    accelerate: str | None
    nvidia_ml_py: str | None
    deprecated_pynvml: str | None
    optional: dict[str, str]  # those of OPTIONAL_PACKAGES that are installed


def installed() -> Software:
    return Software(
        torch=torch_build(),
        transformers=package_version("transformers"),
        accelerate=package_version("accelerate"),
        nvidia_ml_py=package_version("nvidia-ml-py"),
        deprecated_pynvml=package_version("pynvml"),
        optional={name: found for name in OPTIONAL_PACKAGES if (found := package_version(name))},
    )


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def torch_build() -> TorchBuild | None:
    """The build that `import torch` would give; None where there is none."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
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
