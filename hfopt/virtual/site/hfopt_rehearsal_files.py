"""None of the user's files: from the first Trainer on, all that is written goes into the rehearsal's folder.

Nothing is sent to trackers or the Hub. Checkpoints are gone through, but the tensors of large ones are not written.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import torch
from hfopt_rehearsal import BETWEEN, RehearsalRecorder  # type: ignore[import-not-found]
from torch.utils._pytree import tree_leaves

_MOST_CHECKPOINT_BYTES = 1 << 26


def redirect(args: Any, folder: str) -> None:
    """The arguments of a run that must leave no trace outside the folder."""
    output = os.path.join(folder, "output")  # noqa: PTH118
    for name, value in {
        "output_dir": output,
        "logging_dir": output,
        "report_to": [],
        "push_to_hub": False,
        "resume_from_checkpoint": None,
    }.items():
        if hasattr(args, name):
            setattr(args, name, value)


def _checkpoint_bytes(trainer: Any) -> int:
    """However the optimizer lays its states out: DeepSpeed's has them at other depths and under other names than torch's."""
    state = trainer.optimizer.state_dict() if trainer.optimizer is not None else {}
    tensors = (value for value in (*tree_leaves(state), *trainer.model.parameters()) if isinstance(value, torch.Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def follow_saving(trainer: Any, recorder: RehearsalRecorder, did: set[str]) -> None:
    save = trainer._save_checkpoint

    @functools.wraps(save)
    def followed(*args: Any, **kwargs: Any) -> Any:
        did.add("saving")
        recorder.enter("saving")
        size = _checkpoint_bytes(trainer)
        if size > _MOST_CHECKPOINT_BYTES:
            recorder.note(f"the checkpoint would take {size / 2**30:.1f} GiB on disk; its tensors were not written")
            _write_no_tensors()
        result = save(*args, **kwargs)
        recorder.enter(BETWEEN)
        return result

    trainer._save_checkpoint = followed
    trainer._load_best_model = lambda *_, **__: None  # it would read what was not written


def _write_no_tensors() -> None:
    """A large checkpoint would fill the disk with zeros: its files stay empty."""

    def touch(_: Any, f: Any, *__: Any, **___: Any) -> None:
        if isinstance(f, (str, os.PathLike)):
            open(f, "w").close()  # noqa: PTH123

    torch.save = touch
    for module in ("safetensors.torch", "transformers.modeling_utils", "peft.peft_model"):
        for name in ("save_file", "safe_save_file"):
            if hasattr(sys.modules.get(module), name):
                setattr(sys.modules[module], name, touch)


def inside(folder: str, path: Any) -> str:
    absolute: str = os.path.abspath(path)  # noqa: PTH100
    if absolute.startswith(folder + os.sep):
        return absolute
    return os.path.join(folder, "output", os.path.basename(absolute))  # noqa: PTH118, PTH119


def keep_writes_inside(folder: str) -> None:
    """Weights from the virtual card mean nothing: whoever saves them, they land in the folder."""

    def wrap(cls: Any) -> None:
        save = cls.save_pretrained

        @functools.wraps(save)
        def saved_inside(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop("push_to_hub", None)
            return save(self, inside(folder, save_directory), *args, **kwargs)

        cls.save_pretrained = saved_inside

    wrap(sys.modules["transformers.modeling_utils"].PreTrainedModel)
    if "peft.peft_model" in sys.modules:
        wrap(sys.modules["peft.peft_model"].PeftModel)
