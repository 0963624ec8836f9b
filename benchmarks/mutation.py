"""Would the tests notice a bug? One operator, constant or condition of a module is changed at a time, and its tests are run on it.

A mutant that no test fails on has survived: either a test is missing, or the change makes no difference (docs/mutation.md says which). The
tests are collected once; each mutant is a process forked from there, which changes the imported module in place: a few hundredths of a
second for most.

usage: python benchmarks/mutation.py [--only NAME] [--every N] [--log FILE]        results are kept in the log, so it can be run in pieces
"""

from __future__ import annotations

import argparse
import ast
import copy
import inspect
import itertools
import json
import math
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 30
"""Seconds of the processor, not of the clock: a busy machine must not decide. A mutant has a few times what its tests take unchanged."""
_SAID_BYTES = 1000
_PLUGINS = ("-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin")
_SEARCH = tuple(
    f"tests/planner/test_{name}.py" for name in ("search", "search_space", "search_fit_and_rank", "search_precision", "changes")
)
_EDIT = ("tests/config/test_yaml_edit.py", "tests/config/test_validate.py", "tests/config/test_yaml_edit_properties.py")
TARGETS: dict[str, tuple[str, ...]] = {  # the module's own tests first: most mutants do not get past them
    "hfopt/oom/step_down.py": ("tests/oom/test_step_down.py",),
    "hfopt/memory/allocator.py": ("tests/memory/test_allocator.py",),
    "hfopt/config/yaml_edit.py": _EDIT,
    "hfopt/config/yaml_splices.py": _EDIT,
    "hfopt/planner/search.py": _SEARCH,
    "hfopt/planner/changes.py": ("tests/planner/test_changes.py", *_SEARCH),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    what: str  # line, columns and change: no two have the same
    tree: ast.Module
    constant: str | None  # the module's constant in which it is, if it is in one


def mutants(source: str) -> Iterator[Mutant]:
    """The whole module with each change; walking the same source twice meets its nodes in the same order."""
    tree = ast.parse(source)
    spared = {below for node in ast.walk(tree) for part in _spared(node) for below in ast.walk(part)}
    constants = {below: _name(statement) for statement in tree.body if _name(statement) for below in ast.walk(statement)}
    for place, node in enumerate(ast.walk(tree)):
        if not hasattr(node, "lineno") or node in spared:
            continue
        for choice, (what, _) in enumerate(changed(node)):
            twin_tree = ast.parse(source)
            twin = next(itertools.islice(ast.walk(twin_tree), place, None))
            new = list(changed(twin))[choice][1]
            mutated = ast.fix_missing_locations(_Replace(twin, new).visit(twin_tree))
            yield Mutant(what=f"{node.lineno}:{node.col_offset}-{node.end_col_offset} {what}", tree=mutated, constant=constants.get(node))


def _name(statement: ast.stmt) -> str | None:
    target = (
        statement.targets[0] if isinstance(statement, ast.Assign) else statement.target if isinstance(statement, ast.AnnAssign) else None
    )
    return target.id if isinstance(target, ast.Name) else None


def become(module: ModuleType, mutant: Mutant) -> None:
    """Changes the imported module in place, so that whoever holds a function, class or constant of it has the changed one."""
    new: dict[str, Any] = {"__name__": module.__name__, "__file__": module.__file__}
    exec(compile(mutant.tree, str(module.__file__), "exec", dont_inherit=True), new)
    for name, old in list(vars(module).items()):
        if getattr(old, "__module__", None) == module.__name__ and name in new:
            _copy_code(old, new[name])
    if mutant.constant is not None:
        old = vars(module)[mutant.constant]
        for holder in [one for name, one in list(sys.modules.items()) if name.startswith(("hfopt", "tests")) and one is not None]:
            for name in [name for name, value in vars(holder).items() if value is old and name == mutant.constant]:
                setattr(holder, name, new[name])


def _copy_code(old: Any, new: Any) -> None:
    old, new = inspect.unwrap(old), inspect.unwrap(new)
    if isinstance(old, type):
        for name, member in list(vars(old).items()):
            if name in vars(new):
                _copy_code(member, vars(new)[name])
    elif isinstance(old, property):
        _copy_code(old.fget, new.fget)
    elif isinstance(old, staticmethod | classmethod):
        _copy_code(old.__func__, new.__func__)
    elif isinstance(old, FunctionType) and isinstance(new, FunctionType):
        old.__code__, old.__defaults__, old.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    verdict: str  # killed, survived or endless
    by: str  # the test that failed, and what it said
    cpu_s: float


class _Trials:
    """A pytest plugin: instead of running the tests once, runs them in a forked process for each mutant.

    Examples come before properties: most mutants do not get past them, and a property takes a hundred times as long.
    """

    def __init__(self, path: str, known: dict[str, str], every: int, keep: Callable[[str, Outcome], None]) -> None:
        self.path, self.known, self.every, self.keep = path, known, every, keep
        self.failure, self.limit_s = "", LIMIT_S

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: hasattr(item.obj, "hypothesis"))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failure:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = (crash.message if crash else str(report.longrepr)).partition("\n")[0]
            self.failure = f"{report.nodeid} ({report.when}): {said}"

    def pytest_runtestloop(self, session: Any) -> bool:
        source = (ROOT / self.path).read_text()
        module = sys.modules[self.path.removesuffix(".py").replace("/", ".")]
        unchanged = Mutant(what="", tree=ast.parse(source), constant=None)
        came = self.outcome(session, module, unchanged)
        if came.verdict != "survived":
            print(f"{self.path}: its tests fail without any change: {came.by}", file=sys.stderr)
            return True
        self.limit_s = min(LIMIT_S, 2 + math.ceil(4 * came.cpu_s))
        for number, mutant in enumerate(mutants(source)):
            if number % self.every == 0 and mutant.what not in self.known:
                self.keep(mutant.what, self.outcome(session, module, mutant))
        return True

    def outcome(self, session: Any, module: ModuleType, mutant: Mutant) -> Outcome:
        """From a forked process that runs the collected tests on the mutant until one fails."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (self.limit_s, self.limit_s + 5))
            try:
                become(module, mutant)
                for item, following in zip(session.items, [*session.items[1:], None], strict=True):
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                    if session.testsfailed:
                        break
            except BaseException as error:  # noqa: BLE001 - a module that cannot even be loaded is found as well
                self.failure = f"outside of a test: {error!r}"
            os.write(writing, self.failure.encode()[:_SAID_BYTES])
            os._exit(1 if self.failure else 0)
        os.close(writing)
        with os.fdopen(reading, errors="replace") as stream:
            by = stream.read()
        _, status, used = os.wait4(child, 0)
        code = os.waitstatus_to_exitcode(status)
        verdict = "endless" if code == -signal.SIGXCPU else "killed" if code else "survived"
        return Outcome(verdict=verdict, by=by, cpu_s=used.ru_utime + used.ru_stime)


def tried(path: str, known: dict[str, str], every: int, keep: Callable[[str, Outcome], None]) -> None:
    """All mutants of one module, in a process of its own: what it loads and changes is gone with it."""
    child = os.fork()
    if child == 0:
        import pytest

        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        with tempfile.TemporaryDirectory() as folder:
            options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", f"--basetemp={folder}/t", *_PLUGINS]
            pytest.main([*options, *(str(ROOT / test) for test in TARGETS[path])], plugins=[_Trials(path, known, every, keep)])
        os._exit(0)
    os.waitpid(child, 0)


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
    hypothesis.settings.register_profile("found", phases=found, database=None, deadline=None, derandomize=True)
    hypothesis.settings.load_profile("found")
    for path in [path for path in TARGETS if options.only in path]:

        def keep(what: str, came: Outcome, path: str = path) -> None:
            with options.log.open("a") as stream:
                stream.write(json.dumps({"file": path, "mutant": what, "outcome": came.verdict, "by": came.by}) + "\n")

        tried(path, _known(options.log, path), options.every, keep)
        known = _known(options.log, path)
        alive = [what for what, came in known.items() if came == "survived"]
        print(f"{path}: {len(known) - len(alive)} of {len(known)} mutants found", *alive, sep="\n    ", flush=True)


def _known(log: Path, path: str) -> dict[str, str]:
    rows = map(json.loads, log.read_text().splitlines()) if log.exists() else ()
    return {row["mutant"]: row["outcome"] for row in rows if row["file"] == path}


if __name__ == "__main__":
    main()
