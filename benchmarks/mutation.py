"""Would the tests notice a bug? One operator, constant or condition of a module is changed at a time, and its tests are run on it.

A mutant that no test fails on has survived: either a test is missing, or the change makes no difference (docs/mutation.md says which). The
process that runs the tests is forked from one that has imported all that they need and that is not ours, so a mutant costs about a second.

usage: python benchmarks/mutation.py [--only NAME] [--every N] [--log FILE]        results are kept in the log, so it can be run in pieces
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import importlib.abc
import importlib.util
import itertools
import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 90
"""Seconds of the processor, not of the clock: a busy machine must not decide."""
_PLUGINS = ("-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin")
_SEARCH = "tests/search"
_EDIT = ("tests/config/test_edit.py", "tests/config/test_edit_properties.py")
TARGETS: dict[str, tuple[str, ...]] = {  # the module's own tests first: most mutants do not get past them
    "hfopt/runtime/replan.py": ("tests/runtime/test_replan.py",),
    "hfopt/estimate/allocator.py": ("tests/estimate/test_allocator.py",),
    "hfopt/config/edit.py": _EDIT,
    "hfopt/config/splices.py": _EDIT,
    "hfopt/config/operations.py": _EDIT,
    "hfopt/config/style.py": _EDIT,
    "hfopt/config/render.py": _EDIT,
    "hfopt/config/comments.py": _EDIT,
    "hfopt/search/space.py": ("tests/search/test_space.py", _SEARCH),
    "hfopt/search/rank.py": ("tests/search/test_feasible_and_rank.py", _SEARCH),
    "hfopt/search/feasible.py": ("tests/search/test_feasible_and_rank.py", _SEARCH),
    "hfopt/search/precision.py": ("tests/search/test_precision.py", _SEARCH),
    "hfopt/search/changes.py": ("tests/search/test_changes.py", _SEARCH),
    "hfopt/search/best.py": ("tests/search/test_best.py", _SEARCH),
}
_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}
_CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}


def changed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Each way to change this node alone: (what was done, the new node)."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
        twin = copy.deepcopy(node)
        twin.ops = [_COMPARED[type(node.ops[0])]()]
        yield f"{type(node.ops[0]).__name__} -> {type(twin.ops[0]).__name__}", twin
    elif isinstance(node, ast.BinOp) and type(node.op) in _COMPUTED:
        twin = copy.deepcopy(node)
        twin.op = _COMPUTED[type(node.op)]()
        yield f"{type(node.op).__name__} -> {type(twin.op).__name__}", twin
    elif isinstance(node, ast.BoolOp):
        twin = copy.deepcopy(node)
        twin.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"{type(node.op).__name__} -> {type(twin.op).__name__}", twin
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not removed", node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} -> {not node.value}", ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield f"{node.value} -> {node.value + 1}", ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLED:
        twin = copy.deepcopy(node)
        twin.func = ast.Name(_CALLED[node.func.id], ast.Load())
        yield f"{node.func.id} -> {_CALLED[node.func.id]}", twin


class _Replace(ast.NodeTransformer):
    def __init__(self, target: ast.AST, by: ast.AST) -> None:
        self.target, self.by = target, by

    def visit(self, node: ast.AST) -> Any:
        return ast.copy_location(self.by, node) if node is self.target else super().visit(node)


def _spared(node: ast.AST) -> list[Any]:
    """Left alone: assertions, which hold for every input there is, and decorators (`tests/test_layout.py` wants values frozen)."""
    if isinstance(node, ast.Assert):
        return [node]
    return node.decorator_list if isinstance(node, ast.ClassDef | ast.FunctionDef) else []


def mutants(source: str) -> Iterator[tuple[str, ast.Module]]:
    """(line and change, the whole module with it); walking the same source twice meets its nodes in the same order."""
    tree = ast.parse(source)
    spared = {below for node in ast.walk(tree) for part in _spared(node) for below in ast.walk(part)}
    for place, node in enumerate(ast.walk(tree)):
        if not hasattr(node, "lineno") or node in spared:
            continue
        for choice, (what, _) in enumerate(changed(node)):
            tree = ast.parse(source)
            twin = next(itertools.islice(ast.walk(tree), place, None))
            new = list(changed(twin))[choice][1]
            mutated = ast.fix_missing_locations(_Replace(twin, new).visit(tree))
            yield f"{node.lineno}:{node.col_offset} {what}", mutated


class _Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives out the changed module instead of the one on disk."""

    def __init__(self, name: str, file: Path, tree: ast.Module) -> None:
        self.name, self.file, self.tree = name, file, tree

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        return importlib.util.spec_from_file_location(fullname, self.file, loader=self) if fullname == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.tree, str(self.file), "exec"), module.__dict__)


class _QuickFirst:
    """Examples before properties: most mutants do not get past the examples, and a property takes a hundred times as long."""

    def __init__(self, loaded: Path | None) -> None:
        self.loaded = loaded

    def pytest_sessionfinish(self) -> None:
        if self.loaded is not None:
            self.loaded.write_text("\n".join(sys.modules))

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: hasattr(item.obj, "hypothesis"))


def outcome(name: str, file: Path, tree: ast.Module, tests: Sequence[str], loaded: Path | None = None) -> str:
    """killed, survived or endless, from a forked process that runs the tests on the mutant; what it loaded is written to `loaded`."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 5))
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        sys.meta_path.insert(0, _Mutated(name, file, tree))
        import pytest

        already = "ignore::pytest.PytestAssertRewriteWarning"  # plugins came with transformers before pytest could rewrite them
        options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--no-header", "--tb=no", "-W", already, *_PLUGINS]
        os._exit(int(pytest.main([*options, *(str(ROOT / test) for test in tests)], plugins=[_QuickFirst(loaded)])))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return "endless" if code == -signal.SIGXCPU else "killed" if code else "survived"


def _have(modules: Sequence[str]) -> None:
    """Imports what the tests need of others, so that the forked processes find it there; ours must be read anew in each."""
    for name in modules:
        if name.partition(".")[0] not in ("hfopt", "tests", "conftest", "__main__") and name not in sys.modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="modules whose path contains this")
    parser.add_argument("--every", type=int, default=1, help="only each N-th mutant")
    parser.add_argument("--log", type=Path, default=Path("mutation.jsonl"))
    options = parser.parse_args()
    os.chdir(ROOT)
    os.environ.update(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", OMP_NUM_THREADS="1")
    import hypothesis

    found = [hypothesis.Phase.explicit, hypothesis.Phase.generate]  # that it fails is enough: no smallest example is looked for
    hypothesis.settings.register_profile("found", phases=found, database=None)
    hypothesis.settings.load_profile("found")
    known = (
        {(row["file"], row["mutant"]): row for row in map(json.loads, options.log.read_text().splitlines())} if options.log.exists() else {}
    )
    for path, tests in TARGETS.items():
        if options.only not in path:
            continue
        name, source = path.removesuffix(".py").replace("/", "."), (ROOT / path).read_text()
        with tempfile.TemporaryDirectory() as folder:
            loaded = Path(folder) / "modules"
            if outcome(name, ROOT / path, ast.parse(source), tests, loaded) != "survived":
                raise SystemExit(f"{path}: its tests fail without any change")
            _have(loaded.read_text().splitlines())
        for number, (what, tree) in enumerate(mutants(source)):
            if number % options.every or (path, what) in known:
                continue
            row = {"file": path, "mutant": what, "outcome": outcome(name, ROOT / path, tree, tests)}
            known[path, what] = row
            with options.log.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
    for path in TARGETS:
        rows = [row for (file, _), row in known.items() if file == path]
        if rows:
            alive = [row["mutant"] for row in rows if row["outcome"] == "survived"]
            print(f"{path}: {len(rows) - len(alive)} of {len(rows)} mutants found", *alive, sep="\n    ")


if __name__ == "__main__":
    main()
