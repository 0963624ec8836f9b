"""The child of a dry run: imports and builds what it can, waits for the candidate, and has it measured.

Started by dry_run.py as `python -m hfopt.probe.dry_run_worker FOLDER`; reads FOLDER/job.pickle, waits at the named pipe
FOLDER/candidate, and writes FOLDER/trial.json. The children of a compiled estimate come in by this door too: it imports least.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfopt.compat.fast_import import lean_imports, spare_dynamo, spare_inductor, spare_scipy, spare_the_trainer
from hfopt.compat.model_names import spare_other_models
from hfopt.errors import HfoptError
from hfopt.probe.dry_run import COMPILE_ORDER, TOLD
from hfopt.schema import Candidate, EvaluationPeak


def _choice(folder: Path) -> tuple[Candidate, EvaluationPeak | None]:
    """Waits for the candidate and how to evaluate."""
    with (folder / "candidate").open("rb") as pipe:
        choice: tuple[Candidate, EvaluationPeak | None] = pickle.load(pipe)
    return choice


def _compile(folder: Path) -> None:
    with lean_imports():
        spare_other_models()
        spare_scipy(one_device=False)
        spare_the_trainer(adapters=True)
        from hfopt.probe import compiled_worker
    compiled_worker.main(folder)


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    if (folder / COMPILE_ORDER).exists():
        _compile(folder)
        return
    job = pickle.loads((folder / "job.pickle").read_bytes())
    with lean_imports():
        if job["eager"]:
            spare_dynamo(one_device=True)
        spare_other_models()
        spare_scipy(one_device=job["eager"])
        adapters = job["job"].model.lora is not None
        if adapters:
            spare_inductor()
        spare_the_trainer(adapters=adapters)
        from hfopt.probe import training_steps

        order = training_steps.Order(**job)
    try:
        facts = training_steps.measure(order, lambda: _choice(folder), folder / "output")
    except HfoptError as error:
        facts = {"outcome": "error", "message": str(error)}
    except Exception as error:  # the parent tells it in one sentence; the traceback stays in its log
        facts = {"outcome": "error", "message": f"{type(error).__name__}: {training_steps.brief(error)}"}
        _tell(folder, facts)
        raise
    _tell(folder, facts)


def _tell(folder: Path, facts: Mapping[str, Any]) -> None:
    part = folder / f"{TOLD}.part"
    part.write_text(json.dumps(facts))
    part.rename(folder / TOLD)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # taking torch down tidily takes longer than some of the steps, and the guard ends whatever is left
