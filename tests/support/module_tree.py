"""The annotated tree of docs/architecture.md: every module with its first line.

usage: python tests/support/module_tree.py    writes it between the marks of docs/architecture.md
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- tree -->\n", "<!-- /tree -->"


def first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def tree() -> str:
    package = ROOT / "hfopt"
    rows = ["| module | what it holds |", "|---|---|"]
    for folder in [package, *sorted(path.parent for path in package.rglob("__init__.py") if path.parent != package)]:
        name = folder.relative_to(ROOT).as_posix()
        rows.append(f"| **`{name}/`** | **{first_line(folder / '__init__.py')}** |")
        rows += [
            f"| `{path.stem}` | {first_line(path)} |" for path in sorted(folder.glob("*.py")) if path.stem not in ("__init__", "__main__")
        ]
    return "\n".join(rows) + "\n"


def written(text: str) -> str:
    """The document's text with the tree of today."""
    head, _, rest = text.partition(BEGIN)
    return head + BEGIN + tree() + END + rest.partition(END)[2]


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
