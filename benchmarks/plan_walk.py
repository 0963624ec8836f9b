"""How far a plan walks: the modules `hfopt plan --no-dry-run` passes through, and how often it enters each package.

usage: python benchmarks/plan_walk.py [CONFIG] [--gpu NAME] [--list]

Every function of hfopt reports when it is called and when it returns: each module's source gets these two lines as it is imported, so that
torch and transformers run at their own speed (a profiler, which sees their calls too, takes minutes). A package is entered when control
comes to it from the planner or the command line; calls below that belong to the visit. Visits that follow one another without another
package in between are one. The base (errors, units, files, schema and the like) and facts are below all stages and not counted as visits.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import io
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hfopt"
COMPOSES = frozenset({"planner", "cli", "launch"})
STAGES = frozenset(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()) - {"schema", "facts", "compat", "process"}


class Walk:
    """Modules seen, and the stage packages in the order of their visits."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.visits: list[str] = []
        self._inside: list[str] = []  # the stages whose calls have not returned yet

    @contextlib.contextmanager
    def __call__(self, module: str) -> Iterator[None]:
        self.modules.add(module)
        stage = module.partition("/")[0]
        if stage not in STAGES:
            yield
            return
        caller = self._inside[-1] if self._inside else "cli"
        self._inside.append(stage)
        if stage not in COMPOSES and caller in COMPOSES and (not self.visits or self.visits[-1] != stage):
            self.visits.append(stage)
        try:
            yield
        finally:
            self._inside.pop()

    def stepwise(self, module: str) -> Any:
        """A generator's code runs at each of its steps, and its caller's in between."""

        def decorated(function: Any) -> Any:
            @functools.wraps(function)
            def driven(*args: Any, **kwargs: Any) -> Iterator[Any]:
                inner, send, value = function(*args, **kwargs), None, None
                while True:
                    with self(module):
                        try:
                            value = inner.send(send) if not isinstance(send, BaseException) else inner.throw(send)
                        except StopIteration as end:
                            return end.value
                    try:
                        send = yield value
                    except BaseException as error:  # noqa: BLE001 - handed on to the generator, as Python does
                        send = error

            return driven

        return decorated


class Reporting(ast.NodeTransformer):
    """Puts `with __walk__(module):` around the body of every function, and around every step of a generator."""

    def __init__(self, module: str) -> None:
        self._module = module

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        generates = any(isinstance(inner, (ast.Yield, ast.YieldFrom)) for inner in _own_nodes(node))
        self.generic_visit(node)
        if generates:
            name = ast.Name("__stepwise__", ast.Load())
            node.decorator_list.append(ast.Call(name, [ast.Constant(self._module)], []))
            return node
        head = node.body[:1] if ast.get_docstring(node, clean=False) is not None else []
        call = ast.Call(ast.Name("__walk__", ast.Load()), [ast.Constant(self._module)], [])
        rest = node.body[len(head) :] or [ast.Pass()]
        node.body = [*head, ast.With([ast.withitem(call)], rest)]
        return node


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.Lambda, ast.AsyncFunctionDef)):
            yield child
            yield from _own_nodes(child)


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, walk: Walk) -> None:
        super().__init__(name, path)
        self._walk = walk

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)  # never from a cached file, nor into one

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:
        tree = ast.parse(data)
        module = Path(path).relative_to(PACKAGE).as_posix()
        return compile(ast.fix_missing_locations(Reporting(module).visit(tree)), path, "exec", dont_inherit=True)

    def exec_module(self, module: Any) -> None:
        module.__walk__ = self._walk
        module.__stepwise__ = self._walk.stepwise
        super().exec_module(module)


class Finder(MetaPathFinder):
    def __init__(self, walk: Walk) -> None:
        self._walk = walk

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "hfopt":
            return None
        spec = PathFinder.find_spec(fullname, path or [str(ROOT)])
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin, self._walk)
        return spec


def walk(config: Path, gpu: str) -> Walk:
    seen = Walk()
    sys.meta_path.insert(0, Finder(seen))
    from hfopt.planner import Request
    from hfopt.planner.algorithm import make_plan

    request = Request(gpu=gpu, dry_run=False, charts=False)
    seen.modules.clear()
    seen.visits.clear()  # what importing calls is no part of the walk
    with contextlib.redirect_stderr(io.StringIO()):
        make_plan(config, request).to_yaml()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path, default=ROOT / "configs" / "bert_base_glue.yaml")
    parser.add_argument("--gpu", default="rtx 3070")
    parser.add_argument("--list", action="store_true", help="name the modules")
    options = parser.parse_args()
    seen = walk(options.config, options.gpu)
    print(f"{len(seen.modules)} modules, {len(seen.visits)} visits")
    for package, count in Counter(seen.visits).most_common():
        print(f"  {package:<10} entered {count} times")
    if options.list:
        print(*sorted(seen.modules), sep="\n")
        print(" > ".join(seen.visits))


if __name__ == "__main__":
    main()
