"""The import rules of the design, checked on the source itself, and the promise that importing hfopt is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hfopt"
BASE = ("errors", "units", "files", "process", "cgroup", "compat", "redact", "schema", "store")
"""What every part may import; among themselves they import only what stands before them."""
STAGES = (
    "facts",
    "config",
    "hardware",
    "model",
    "trace",
    "memory",
    "speed",
    "virtual",
    "probe",
    "monitor",
    "oom",
    "report",
    "job",
    "pricing",
    "planner",
    "launch",
    "cli",
)
"""In the order of the data flow: a stage imports the base and stages before it, never one behind it."""
MODULES = sorted(PACKAGE.rglob("*.py"))
LONGEST, SHORTEST = 400, 40
SHORT_BECAUSE = {
    "__main__.py": "only starts the command",
    "site/sitecustomize.py": "Python prescribes the name",
}


def _part(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def _imported_parts(path: Path) -> set[str]:
    """The parts of hfopt that a module imports, lazily or not; an import for type checking only does not count."""
    tree = ast.parse(path.read_text())
    skip = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for child in ast.walk(node)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if node in skip:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names.update({node.module} if node.module != "hfopt" else {f"hfopt.{alias.name}" for alias in node.names})
    return {name.split(".")[1] for name in names if name.startswith("hfopt.")}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    part, imported = _part(path), _imported_parts(path) - {"__version__"}
    if part in BASE:
        allowed = set(BASE[: BASE.index(part) + 1])
    elif part in STAGES:
        allowed = {*BASE, *STAGES[: STAGES.index(part) + 1]}
    else:
        assert part in ("__init__", "__main__", "site"), f"{part} has no place in the order of parts"
        return
    assert imported <= allowed, f"{part} may not import {sorted(imported - allowed)}"


def test_no_name_stands_twice() -> None:
    """Two modules, or two classes, of one name are two things that a reader takes for one."""
    files = Counter(path.name for path in MODULES if path.name != "__init__.py")
    classes = Counter(
        node.name for path in MODULES for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name[0] != "_"
    )
    assert [name for name, count in (*files.items(), *classes.items()) if count > 1] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_is_neither_a_slice_nor_a_drawer(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= LONGEST, f"{path.name} has {lines} lines: it holds more than one idea"
    if path.name != "__init__.py" and str(path.relative_to(PACKAGE)) not in SHORT_BECAUSE:
        assert lines >= SHORTEST, (
            f"{path.name} has {lines} lines: join it to what it belongs to, or say in SHORT_BECAUSE why it stands alone"
        )


RAW_READ_BY = {
    "job/subject.py": "writes what stands in for a missing DeepSpeed config, and FSDP's own checkpointing",
    "planner/block_recompute.py": "writes FSDP's own checkpointing into the fsdp_config that stands there",
    "planner/engines.py": "writes the keys of an engine beside those that stand there",
    "probe/dry_run.py": "hands the arguments on to a Trainer as they are",
}
"""Who asks for the keys of a file by name, because it writes them; everyone else reads `TrainJob.settings`."""


@pytest.mark.parametrize("path", [path for path in MODULES if _part(path) != "config"], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arguments_are_read_from_the_typed_settings(path: Path) -> None:
    asked = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".raw.get"))
        or (isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith(".raw"))
    ]
    assert bool(asked) == (str(path.relative_to(PACKAGE)) in RAW_READ_BY), asked


PURE = ("step_down.py", "search.py", "changes.py")
VALUES = [path for path in MODULES if _part(path) == "schema" or path.name in PURE]


@pytest.mark.parametrize("path", VALUES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_what_passes_between_stages_is_frozen_and_named(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        for made in node.decorator_list if isinstance(node, ast.ClassDef) else []:
            assert ast.unparse(made) == "dataclass(frozen=True, kw_only=True, slots=True)", f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_says_its_idea_in_its_first_line(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring and len(docstring.splitlines()[0]) > 20


@pytest.mark.parametrize("arguments", [["-c", "import hfopt"], ["-m", "hfopt", "--help"], ["-m", "hfopt", "--version"]])
def test_importing_and_help_stay_light(arguments: list[str]) -> None:
    code = (
        "import sys, runpy, atexit\n"
        "heavy = ('torch', 'transformers', 'accelerate', 'datasets', 'numpy', 'pynvml', 'psutil', 'yaml', 'hfopt.schema')\n"
        "atexit.register(lambda: sys.stderr.write('LOADED ' + ','.join(m for m in heavy if m in sys.modules)))\n"
    )
    if arguments[0] == "-c":
        code += arguments[1]
    else:
        code += f"sys.argv = {['hfopt', *arguments[2:]]!r}\nrunpy.run_module('hfopt', run_name='__main__')\n"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr.endswith("LOADED "), result.stderr
