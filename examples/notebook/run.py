"""Runs the code cells of the notebook in order in one namespace, as a kernel would; it is plain Python, so no Jupyter is needed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

notebook = json.loads((Path(__file__).parent / "plan_and_watch.ipynb").read_text())
namespace = {"__name__": "__main__", "OUTPUT_DIR": sys.argv[1] if len(sys.argv) > 1 else "runs/notebook"}
for number, cell in enumerate((cell for cell in notebook["cells"] if cell["cell_type"] == "code"), start=1):
    print(f"In [{number}]")
    exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
