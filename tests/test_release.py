"""What is released is whole: the wheel made from the sdist works in an environment of its own, with its C sources, tables and licence."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import hfopt

ROOT = Path(__file__).parent.parent
INSIDE = (
    "hfopt/py.typed",
    "hfopt/hardware/gpus.toml",
    "hfopt/site/sitecustomize.py",
    "hfopt/virtual/csrc/memory.c",
    "hfopt/virtual/csrc/stub.h",
    "hfopt/virtual/site/hfopt_rehearsal.py",
    "hfopt/model/architectures.jsonl",
)


def run(*command: object, cwd: Path, **more: object) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=300, check=False, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return str(done.stdout)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel); the wheel is made from what the sdist holds, not from this folder."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_everything_that_is_needed_is_inside(built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
        metadata = archive.read(next(name for name in in_wheel if name.endswith("/METADATA"))).decode()
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert set(INSIDE) <= in_wheel and set(INSIDE) <= in_sdist
    sources = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "hfopt").rglob("*") if path.suffix in (".py", ".c", ".h", ".toml", ".jsonl")
    }
    assert sources <= in_wheel, sorted(sources - in_wheel)
    assert {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "tests/test_release.py", "configs/bert_base_glue.yaml"} <= in_sdist
    assert "License-Expression: Apache-2.0" in metadata and any(name.endswith("licenses/LICENSE") for name in in_wheel)
    caches = [name for name in in_wheel | in_sdist if "__pycache__" in name or name.endswith((".pyc", ".so", ".o")) or "/." in name]
    assert not caches, caches


@pytest.mark.slow
def test_an_environment_of_its_own_runs_it(built: tuple[Path, Path], tmp_path: Path) -> None:
    """As pipx would install it. The dependencies are this environment's, reached by a path file, so that nothing is downloaded."""
    home = tmp_path / "isolated"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=tmp_path).strip())
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", built[1], cwd=tmp_path)
    places = [place for place in sys.path if place.endswith(("site-packages", "dist-packages"))]  # layered environments have several
    (site / "dependencies.pth").write_text("\n".join(places) + "\n")
    clean = {"env": {"PATH": f"{home / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}}
    assert Path(run(python, "-c", "import hfopt; print(hfopt.__file__)", cwd=tmp_path, **clean).strip()).is_relative_to(home)
    command = home / "bin" / "hfopt"
    assert run(command, "--version", cwd=tmp_path, **clean) == f"hfopt {hfopt.__version__}\n"
    assert "A100" in run(command, "gpus", cwd=tmp_path, **clean)
    (tmp_path / "config.yaml").write_text("per_device_train_batch_size: 4\nlearning_rate: 5.0e-5\n")
    run(command, "check", "config.yaml", cwd=tmp_path, **clean)
    table = "from hfopt.model.known_models import architectures; print(len(architectures()))"
    assert int(run(python, "-c", table, cwd=tmp_path, **clean)) > 10


def test_the_licence_is_apache() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text()


def test_nothing_of_a_machine_is_in_the_repository() -> None:
    """No cache, no build product, no path of somebody's home."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:  # an unpacked sdist
        return
    files = [ROOT / name for name in listed.stdout.split("\n") if name]
    assert not [file for file in files if file.suffix in (".pyc", ".so", ".o", ".log") or "__pycache__" in file.parts]
    for file in files:
        if file.suffix in (".py", ".md", ".toml", ".yaml", ".c", ".h") and file.is_file() and file != Path(__file__):
            assert "/home/" not in file.read_text(encoding="utf-8"), file
