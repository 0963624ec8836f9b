"""Puts a plan onto a Trainer that exists, and tries it there where that was asked for.

The Trainer reads most arguments when training begins. Six things it read earlier and are brought after: the size of its loader's
batches, the accelerator's precision, DDP's search for unused parameters, checkpointing that is already on in the model, liger's kernels,
and whether the model is compiled. Whatever fails half way is taken back, so that the script's own settings stay whole.

`hfopt run --dry-run`: a few real steps of the planned run on its own device, what they took, and an end before anything is saved.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from hfopt.compat.torch_patches import set_tf32
from hfopt.compat.transformers_patches import disable_checkpointing, is_checkpointing, renew_accelerator
from hfopt.facts.training_keys import PRECISION_KEYS, both_spellings
from hfopt.oom import next_settings
from hfopt.oom.next_settings import memory_now
from hfopt.schema import Change
from hfopt.units import format_bytes, format_seconds

_ATTENTION = "attn_implementation"


def apply_changes(trainer: Any, changes: Sequence[Change], *, divides_loss: bool = False) -> None:
    args = trainer.args
    _switch_attention(trainer.model, changes)
    changes = [change for change in changes if change.key != _ATTENTION]
    wanted = both_spellings({change.key: change.after for change in changes}, args)
    before = {key: getattr(args, key) for key in ("torch_compile_backend", *wanted)}
    batch, accepts = trainer._train_batch_size, trainer.model_accepts_loss_kwargs
    try:
        for key, value in wanted.items():
            setattr(args, key, value)
        _bring_after(trainer, frozenset(change.key for change in changes), batch)
        if divides_loss:
            trainer.model_accepts_loss_kwargs = False
    except Exception:
        for key, value in before.items():
            setattr(args, key, value)
        trainer._train_batch_size, trainer.model_accepts_loss_kwargs = batch, accepts
        if before.keys() & set(PRECISION_KEYS):
            renew_accelerator(trainer)
        raise


def _switch_attention(model: Any, changes: Sequence[Change]) -> None:
    """The model's own setting, not one of the arguments; only planned where the user allowed it."""
    for change in changes:
        if change.key == _ATTENTION:
            model.set_attn_implementation(change.after)


def _bring_after(trainer: Any, changed: frozenset[str], old_batch: int) -> None:
    args = trainer.args
    if "per_device_train_batch_size" in changed:
        trainer._train_batch_size = args.train_batch_size
        _regroup_generations(args, old_batch)
    if changed & {"fp16", "bf16"}:
        renew_accelerator(trainer)
    if "tf32" in changed:
        set_tf32(bool(args.tf32))
    if "gradient_checkpointing" in changed:
        _checkpoint(trainer)
    if args.use_liger_kernel and "use_liger_kernel" in changed:
        _put_on_liger(trainer)
    if args.torch_compile and "torch_compile" in changed:
        _compile(trainer)


def _regroup_generations(args: Any, old_batch: int) -> None:
    """GRPO and its kin generate once for several micro-batches: as many completions as before, in micro-batches of the new size."""
    steps = getattr(args, "steps_per_generation", None)
    if isinstance(steps, int):
        assert steps * old_batch % args.train_batch_size == 0, "the plan keeps the generation batch"
        args.steps_per_generation = steps * old_batch // args.train_batch_size


def _checkpoint(trainer: Any) -> None:
    """Switched on by the Trainer itself when it begins; off, and DDP's flag, are up to us."""
    args, model = trainer.args, trainer.model
    if not args.gradient_checkpointing and is_checkpointing(model):
        disable_checkpointing(model)
    handler = getattr(trainer.accelerator, "ddp_handler", None)
    if handler is not None and args.ddp_find_unused_parameters is None and is_checkpointing(model) is not None:
        handler.find_unused_parameters = not args.gradient_checkpointing


def _put_on_liger(trainer: Any) -> None:
    """As the Trainer does when it is made."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    _apply_liger_kernel_to_instance(model=model, **(getattr(trainer.args, "liger_kernel_config", None) or {}))


def _compile(trainer: Any) -> None:
    """Accelerate compiles the model when training begins, as the plugin says that it was made with."""
    from accelerate.utils import TorchDynamoPlugin

    args = trainer.args
    args.torch_compile_backend = args.torch_compile_backend or "inductor"
    trainer.accelerator.state.dynamo_plugin = TorchDynamoPlugin(backend=args.torch_compile_backend, mode=args.torch_compile_mode)


STEPS = 3
_QUIET = {
    "eval_strategy": "no",
    "eval_on_start": False,
    "load_best_model_at_end": False,
    "logging_strategy": "no",
    "push_to_hub": False,
    "save_strategy": "no",
}


def arrange(trainer: Any) -> None:
    """The Trainer's next `train()` stops after a few steps and ends the process."""
    from transformers.trainer_utils import IntervalStrategy, SaveStrategy

    words = {"eval_strategy": IntervalStrategy.NO, "logging_strategy": IntervalStrategy.NO, "save_strategy": SaveStrategy.NO}
    args = trainer.args
    for name, value in _QUIET.items():
        if hasattr(args, name):
            setattr(args, name, words.get(name, value))
    args.max_steps = STEPS
    trainer.add_callback(_callback(trainer))


def _callback(trainer: Any) -> Any:
    from transformers import TrainerCallback

    class EndAfterSteps(TrainerCallback):  # type: ignore[misc]
        """The first step opens files and makes the optimizer's state: its time does not count."""

        began: float | None = None

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.began is None:
                self.began = time.perf_counter()
                self.first = state.global_step
                return
            if state.global_step < STEPS:
                return
            step_s = (time.perf_counter() - self.began) / max(1, state.global_step - self.first)
            if state.is_world_process_zero:
                next_settings.say(
                    f"hfopt: dry run: {state.global_step} steps, {format_seconds(step_s)} each{_peak(args)}; nothing was saved"
                )
            sys.exit(0)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero:
                next_settings.say(f"hfopt: dry run: the data ended after {state.global_step} steps{_peak(args)}; nothing was saved")
            sys.exit(0)

    return EndAfterSteps()


def _peak(args: Any) -> str:
    import torch

    if args.device.type != "cuda":
        return ""
    reserved, now = torch.cuda.max_memory_reserved(args.device), memory_now(args.device)
    room = f" of {format_bytes(now.capacity_bytes)}" if now.capacity_bytes is not None else ""
    return f", at most {format_bytes(reserved)} reserved{room} (measured)"
