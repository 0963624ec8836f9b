"""Whole runs of TRL's trainers on the virtual GPU: reads cases as JSON lines on stdin, prints what torch.cuda counted for each."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from trl_cases import TrlCase, make_trainer, model_folder


def run(case: TrlCase, cache: Path) -> dict[str, Any]:
    trainer = make_trainer(case, model_folder(case, cache))
    trainer.train()
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the Trainer prints
    for line in sys.stdin:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            answer = run(TrlCase(**json.loads(line)), Path(sys.argv[1]))
        except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError, KeyError, AttributeError) as error:
            answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
