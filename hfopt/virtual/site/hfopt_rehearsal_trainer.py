"""Follows transformers' Trainer through a rehearsal: its phases, one evaluation and one checkpoint, and none of the user's files.

From the first Trainer on, everything it writes goes into the rehearsal's folder, and no tracker or Hub is told anything. The user's
own arguments decide everything else: batch, accumulation, precision, optimizer, schedule.
"""

from __future__ import annotations

import collections
import functools
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from hfopt_rehearsal import BETWEEN, LATER, OPTIMIZER, Recorder, is_oom  # type: ignore[import-not-found]

_MOST_EVAL_BATCHES = 8
_MOST_CHECKPOINT_BYTES = 1 << 26
_GROWTH_BYTES = 1 << 20


class _FewBatches:
    """The first batches of an evaluation loader; notes how much memory each one leaves behind on the card."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.allocated: list[int] = []
        self.all = len(loader) if hasattr(loader, "__len__") else None

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self._loader):
            if index == _MOST_EVAL_BATCHES:
                return
            self.allocated.append(torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0)
            yield batch
        self.allocated.append(torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0)

    def __len__(self) -> int:
        return min(_MOST_EVAL_BATCHES, len(self._loader))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def growth_bytes(self) -> int:
        """What a batch leaves on the card: its gathered logits. The first batch also fills caches, so it does not count."""
        steady = self.allocated[1:]
        return max(0, (steady[-1] - steady[0]) // (len(steady) - 1)) if len(steady) > 1 else 0


def _redirect(args: Any, folder: str) -> None:
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


def _asked_of_the_card(trainer: Any) -> list[str]:
    args = trainer.args
    asks = [name for name in ("bf16", "fp16", "tf32") if getattr(args, name, None)]
    dtypes = {parameter.dtype for parameter in trainer.model.parameters()}
    if torch.bfloat16 in dtypes and "bf16" not in asks:
        asks.append("bf16 weights")
    return asks


def _callback_for(trainer: Any, recorder: Recorder, did: set[str]) -> Any:
    from transformers import TrainerCallback

    class Follow(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            recorder.report["asks"] = _asked_of_the_card(trainer)
            recorder.report["max_steps"] = state.max_steps
            before, now = recorder.report.get("micro_batch"), getattr(trainer, "_train_batch_size", None)
            if before and now and now < before and args.auto_find_batch_size:
                recorder.note(f"auto_find_batch_size: a batch of {before} did not fit and became {now}")
            recorder.report["micro_batch"] = now
            recorder.report["accumulation"] = args.gradient_accumulation_steps
            recorder.enter("step 1: forward")

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            recorder.enter(*((LATER, "optimizer") if state.global_step else (OPTIMIZER,)))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            recorder.survived()
            recorder.report["steps_done"] = state.global_step
            recorder.enter(BETWEEN)
            if state.global_step >= min(recorder.steps, state.max_steps):
                control.should_training_stop = True
                control.should_evaluate = control.should_evaluate or (trainer.eval_dataset is not None and "evaluation" not in did)
                control.should_save = control.should_save or "saving" not in did
            return control

    return Follow()


def _follow_steps(trainer: Any, recorder: Recorder) -> None:
    compute_loss = trainer.compute_loss

    @functools.wraps(compute_loss)
    def followed(*args: Any, **kwargs: Any) -> Any:
        if recorder.phase in ("evaluation", "saving"):
            return compute_loss(*args, **kwargs)
        first = not recorder.report["steps_done"]
        recorder.enter(*(("step 1: forward",) if first else (LATER, "forward")))
        loss = compute_loss(*args, **kwargs)
        recorder.enter(*(("step 1: backward",) if first else (LATER, "backward")))
        return loss

    trainer.compute_loss = followed


def _follow_evaluation(trainer: Any, recorder: Recorder, did: set[str]) -> None:
    evaluate, get_loader = trainer.evaluate, trainer.get_eval_dataloader
    loaders: list[_FewBatches] = []

    @functools.wraps(get_loader)
    def few(*args: Any, **kwargs: Any) -> Any:
        loaders.append(_FewBatches(get_loader(*args, **kwargs)))
        return loaders[-1]

    @functools.wraps(evaluate)
    def followed(*args: Any, **kwargs: Any) -> Any:
        if recorder.phase == "evaluation":  # one of several evaluation sets
            return evaluate(*args, **kwargs)
        did.add("evaluation")
        recorder.enter("evaluation")
        start = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
        metrics: Any = collections.defaultdict(float, eval_loss=0.0)
        try:
            metrics = evaluate(*args, **kwargs)
        except Exception as error:  # a metric may choke on values that mean nothing here
            if is_oom(error):
                raise
            recorder.note(f"the evaluation raised {type(error).__name__}: {error}; predictions are zeros here, so a metric may do that")
        recorder.enter(BETWEEN)
        _foresee_whole_evaluation(recorder, loaders, start)
        return metrics

    trainer.get_eval_dataloader, trainer.evaluate = few, followed


def _foresee_whole_evaluation(recorder: Recorder, loaders: list[_FewBatches], start: int) -> None:
    """Without eval_accumulation_steps the Trainer gathers all logits on the card and joins them: at the end twice their size."""
    seen = recorder.report["phases"].get("evaluation")
    for loader in loaders if seen else ():
        growth, run = loader.growth_bytes(), len(loader.allocated) - 1
        if loader.all is None or loader.all <= run or growth < _GROWTH_BYTES:
            continue
        whole = max(seen["allocated"] + growth * (loader.all - run), start + 2 * growth * loader.all)
        recorder.report["evaluation"] = {
            "batches": loader.all,
            "run": run,
            "growth": growth,
            "allocated": max(whole, recorder.report.get("evaluation", {}).get("allocated", 0)),
        }


def _checkpoint_bytes(trainer: Any) -> int:
    state = trainer.optimizer.state_dict()["state"].values() if trainer.optimizer is not None else ()
    tensors = [value for entry in state for value in entry.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in (*tensors, *trainer.model.parameters()))


def _follow_saving(trainer: Any, recorder: Recorder, did: set[str]) -> None:
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


def _inside(folder: str, path: Any) -> str:
    absolute: str = os.path.abspath(path)  # noqa: PTH100
    if absolute.startswith(folder + os.sep):
        return absolute
    return os.path.join(folder, "output", os.path.basename(absolute))  # noqa: PTH118, PTH119


def _keep_writes_inside(folder: str) -> None:
    """Weights from the virtual card mean nothing: whoever saves them, they land in the folder."""

    def wrap(cls: Any) -> None:
        save = cls.save_pretrained

        @functools.wraps(save)
        def inside(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop("push_to_hub", None)
            return save(self, _inside(folder, save_directory), *args, **kwargs)

        cls.save_pretrained = inside

    wrap(sys.modules["transformers.modeling_utils"].PreTrainedModel)
    if "peft.peft_model" in sys.modules:
        wrap(sys.modules["peft.peft_model"].PeftModel)


def install(module: ModuleType, recorder: Recorder) -> None:
    """Changes transformers.trainer.Trainer for this process."""
    trainer_class: Any = module.Trainer
    initialize, train, save_model = trainer_class.__init__, trainer_class.train, trainer_class.save_model

    @functools.wraps(initialize)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        given = kwargs.get("args", args[1] if len(args) > 1 else None)
        if given is None:
            given = kwargs["args"] = sys.modules["transformers.training_args"].TrainingArguments(output_dir=recorder.folder)
        _redirect(given, recorder.folder)
        initialize(self, *args, **kwargs)

    @functools.wraps(train)
    def followed(self: Any, *_: Any, **kwargs: Any) -> Any:
        did: set[str] = set()
        recorder.by_trainer = True
        if not recorder.report["steps_done"]:
            _keep_writes_inside(recorder.folder)
        _follow_steps(self, recorder)
        _follow_evaluation(self, recorder, did)
        _follow_saving(self, recorder, did)
        self.add_callback(_callback_for(self, recorder, did))
        kwargs.pop("resume_from_checkpoint", None)
        try:
            train(self, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if is_oom(error):
                recorder.ran_out(error)
            raise
        if self.eval_dataset is None:
            recorder.note("the Trainer has no evaluation set: evaluation was not rehearsed")
        recorder.finish()

    @functools.wraps(save_model)
    def saved_inside(self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        return save_model(self, _inside(recorder.folder, output_dir or self.args.output_dir), *args, **kwargs)

    trainer_class.__init__, trainer_class.train, trainer_class.save_model = __init__, followed, saved_inside
