"""Follows transformers' Trainer through a rehearsal: its phases, one evaluation and one checkpoint.

The user's own arguments decide everything: batch, accumulation, precision, optimizer, schedule. Only where it writes is changed
(hfopt_rehearsal_files).
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
from hfopt_rehearsal import BETWEEN, LATER, OPTIMIZER, RehearsalRecorder, is_oom  # type: ignore[import-not-found]
from hfopt_rehearsal_files import follow_saving, inside, keep_writes_inside, redirect  # type: ignore[import-not-found]
from hfopt_rehearsal_journal import journal  # type: ignore[import-not-found]

_MOST_EVAL_BATCHES = 8
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


def _asked_of_the_card(trainer: Any) -> list[str]:
    args = trainer.args
    asks = [name for name in ("bf16", "fp16", "tf32") if getattr(args, name, None)]
    dtypes = {parameter.dtype for parameter in trainer.model.parameters()}
    if torch.bfloat16 in dtypes and "bf16" not in asks:
        asks.append("bf16 weights")
    return asks


def _not_as_on_a_card(args: Any) -> Iterator[str]:
    """What the arguments ask for and a rehearsal cannot do, or does otherwise: said before it starts."""
    if getattr(args, "torch_compile", False):
        if (refused := os.environ.get("HFOPT_VIRTUAL_NO_COMPILE")) is not None:
            yield f"{refused}: rehearsed without torch.compile, which usually takes less memory"
        elif "max-autotune" in (args.torch_compile_mode or ""):
            yield f"torch_compile_mode {args.torch_compile_mode}: no kernel can be timed here, so torch's own matrix products are taken"


def _callback_for(trainer: Any, recorder: RehearsalRecorder, did: set[str]) -> Any:
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
            journal.step_done(
                state.global_step,
                "between",
                workers=args.dataloader_num_workers,
                micro_batches=args.gradient_accumulation_steps,
            )
            if state.global_step >= min(recorder.steps, state.max_steps):
                journal.end()
                control.should_training_stop = True
                control.should_evaluate = control.should_evaluate or (trainer.eval_dataset is not None and "evaluation" not in did)
                control.should_save = control.should_save or "saving" not in did
            return control

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            counts_done = hasattr(trainer, "_initial_global_step")  # transformers 5.2x: before, its rates were those of all steps
            counted = state.global_step if counts_done else state.max_steps
            if control.should_training_stop and journal.train_ends(state.global_step, counted):
                recorder.note(
                    f"the script's clock showed predicted times: a train_runtime in its log is that of {counted} steps, without evaluation "
                    "and saving"
                )

    return Follow()


def _follow_steps(trainer: Any, recorder: RehearsalRecorder) -> None:
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
    get_batch_samples = trainer.get_batch_samples

    @functools.wraps(get_batch_samples)
    def fetched(*args: Any, **kwargs: Any) -> Any:
        journal.phase("data")
        batches = get_batch_samples(*args, **kwargs)
        journal.phase("between")
        return batches

    trainer.get_batch_samples = fetched
    clip_grad_norm_ = trainer.accelerator.clip_grad_norm_

    @functools.wraps(clip_grad_norm_)
    def clipped(*args: Any, **kwargs: Any) -> Any:
        journal.phase("optimizer")  # as hfopt's traces count it
        return clip_grad_norm_(*args, **kwargs)

    trainer.accelerator.clip_grad_norm_ = clipped


def _follow_evaluation(trainer: Any, recorder: RehearsalRecorder, did: set[str]) -> None:
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


def _foresee_whole_evaluation(recorder: RehearsalRecorder, loaders: list[_FewBatches], start: int) -> None:
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


def install(module: ModuleType, recorder: RehearsalRecorder) -> None:
    """Changes transformers.trainer.Trainer for this process."""
    trainer_class: Any = module.Trainer
    initialize, train, save_model = trainer_class.__init__, trainer_class.train, trainer_class.save_model

    @functools.wraps(initialize)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        given = kwargs.get("args", args[1] if len(args) > 1 else None)
        if given is None:
            given = kwargs["args"] = sys.modules["transformers.training_args"].TrainingArguments(output_dir=recorder.folder)
        redirect(given, recorder.folder)
        initialize(self, *args, **kwargs)

    @functools.wraps(train)
    def followed(self: Any, *_: Any, **kwargs: Any) -> Any:
        did: set[str] = set()
        recorder.by_trainer = True
        if getattr(self.args, "torch_compile", False):
            journal.cannot_time("torch_compile")
        for sentence in _not_as_on_a_card(self.args):
            recorder.tell(sentence)
        if not recorder.report["steps_done"]:
            keep_writes_inside(recorder.folder)
        _follow_steps(self, recorder)
        _follow_evaluation(self, recorder, did)
        follow_saving(self, recorder, did)
        self.add_callback(_callback_for(self, recorder, did))
        kwargs.pop("resume_from_checkpoint", None)
        journal.train_begins()
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
        return save_model(self, inside(recorder.folder, output_dir or self.args.output_dir), *args, **kwargs)

    trainer_class.__init__, trainer_class.train, trainer_class.save_model = __init__, followed, saved_inside
