"""transformers' names of its models, read for the model that is asked for instead of for all of them.

At its import transformers reads 1,600 files for the names they export, so that `transformers.BertModel` need not say where it stands: half
of the import. In a process of our own it reads the folder of the auto classes; whoever asks for another name has the folders read whose
name it begins with, and all of them where it is in none of those. No two folders export the same name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_READER = "transformers.utils.import_utils"
_FIRST = ("auto",)
_LISTS = ("transformers", "transformers.models")  # the modules that list the names of all models
Structure = Mapping[str, Any]  # as create_import_structure_from_path has it


def spare_other_models() -> None:
    """Imports transformers with the names of few models; where it is imported already, or made otherwise, it is left as it is."""
    if "transformers" in sys.modules:
        return
    finder = _PatchedReader()
    sys.meta_path.insert(0, finder)
    try:
        import_module("transformers")
    finally:
        sys.meta_path.remove(finder)


class _PatchedReader:
    """While transformers is imported: puts a reader of few folders in place of the one that reads all, and lets its modules read on. A
    processor imports transformers a second time, into a module of its own, by the same reader."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == _READER else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Patching(self, spec.loader)
        return spec

    def patch(self, module: Any) -> None:
        read: Callable[[Any], Structure] | None = getattr(module, "create_import_structure_from_path", None)
        lazy = getattr(module, "_LazyModule", None)
        if read is None or lazy is None:
            return
        folder = _models_folder(module)

        def few(path: Any) -> Structure:
            here = Path(path) in (folder, folder / "__init__.py")
            return {name: read(str(folder / name)) for name in _FIRST if (folder / name).is_dir()} if here else read(path)

        module.create_import_structure_from_path = few
        lazy.__getattr__ = _asked(lazy.__getattr__, module, read)


class _Patching(Loader):
    def __init__(self, reader: _PatchedReader, loader: Loader) -> None:
        self._reader, self._loader = reader, loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._reader.patch(module)


def _is_module(package: ModuleType, name: str) -> bool:
    place = Path(str(package.__file__)).parent / name
    return place.is_dir() or place.with_suffix(".py").is_file()


def _models_folder(helpers: ModuleType) -> Path:
    return Path(str(helpers.__file__)).parents[1] / "models"


def _asked(known: Callable[[Any, str], Any], helpers: Any, read: Callable[[str], Structure]) -> Callable[[Any, str], Any]:
    folder = _models_folder(helpers)

    def holds(module: Any, name: str) -> bool:
        own = vars(module)
        return any(name in own[table] for table in ("_class_to_module", "_modules", "_objects", "_object_missing_backend"))

    def learn(module: Any, found: Structure) -> None:
        """The module's tables, with those that it would have had with these folders."""
        prefix = "" if module.__name__.endswith(".models") else "models."
        spread = helpers.spread_import_structure(found)
        more = helpers._LazyModule(
            module.__name__, str(module.__file__), {of: {prefix + key: names for key, names in one.items()} for of, one in spread.items()}
        )
        for table in ("_class_to_module", "_object_missing_backend", "_import_structure"):
            vars(module)[table] = {**vars(more).get(table, {}), **vars(module)[table]}
        module._modules |= more._modules
        module.__all__.extend(more.__all__)

    def answer(module: Any, name: str) -> Any:
        if module.__name__ in _LISTS and not (name.startswith("__") or holds(module, name) or _is_module(module, name)):
            like = name.lower().replace("_", "")
            near = [one.name for one in folder.iterdir() if like.startswith(one.name.replace("_", "")) and one.is_dir()]
            learn(module, {one: read(str(folder / one)) for one in near})
            if not holds(module, name):
                learn(module, read(str(folder)))
        return known(module, name)

    return answer
