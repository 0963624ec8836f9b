"""What is wrong only between keys: values that exclude each other, batches that do not divide."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hfopt.config.checks import Found
from hfopt.config.facts import Facts
from hfopt.config.keys import ACCUMULATION, BATCH
from hfopt.config.model_facts import Trainer
from hfopt.schema import Place, Problem

PlaceOf = Callable[[str], Place]


def check_together(args: Mapping[str, Any], facts: Facts, trainer: Trainer, world_size: int, place_of: PlaceOf) -> Iterator[Found]:
    if args.get("fp16") is True and args.get("bf16") is True:
        yield _found(
            "error",
            "conflict",
            "fp16",
            place_of,
            "fp16 and bf16 are both true; TrainingArguments refuses that",
            "keep bf16 where the card has it",
        )
    yield from _check_best_model(args, place_of)
    if trainer == "GRPO":
        yield from _check_generations(args, facts, world_size, place_of)
    workers = args.get("dataloader_num_workers", 0)
    if workers == 0 and args.get("dataloader_prefetch_factor") is not None:
        message = "dataloader_prefetch_factor needs dataloader_num_workers above 0; PyTorch refuses it otherwise"
        yield _found("error", "conflict", "dataloader_prefetch_factor", place_of, message, "dataloader_num_workers: 2")


def _check_best_model(args: Mapping[str, Any], place_of: PlaceOf) -> Iterator[Found]:
    if args.get("load_best_model_at_end") is not True:
        return
    saving, evaluating = args.get("save_strategy", "steps"), args.get("eval_strategy", "no")
    if saving != "best" and saving != evaluating:
        message = f"load_best_model_at_end needs equal strategies, but save_strategy is {saving} and eval_strategy is {evaluating}"
        yield _found(
            "error", "conflict", "load_best_model_at_end", place_of, message, f"eval_strategy: {saving}" if saving != "no" else None
        )
    every_save, every_eval = args.get("save_steps", 500), args.get("eval_steps", args.get("logging_steps", 500))
    whole = all(isinstance(value, int | float) and value >= 1 for value in (every_save, every_eval))
    if saving == evaluating == "steps" and whole and every_save % every_eval:
        message = f"load_best_model_at_end needs save_steps ({every_save}) to be a multiple of eval_steps ({every_eval})"
        yield _found(
            "error", "conflict", "save_steps", place_of, message, f"save_steps: {math.ceil(every_save / every_eval) * int(every_eval)}"
        )


def _check_generations(args: Mapping[str, Any], facts: Facts, world_size: int, place_of: PlaceOf) -> Iterator[Found]:
    """TRL: per device × world × steps_per_generation (default: the accumulation) must be a multiple of num_generations."""
    generations = facts.whole("num_generations") or 8
    batch, accumulation = args.get(BATCH, 8), args.get(ACCUMULATION, 1)
    if not isinstance(batch, int) or not isinstance(accumulation, int):
        return
    steps = facts.whole("steps_per_generation") or accumulation
    per_process = batch * steps
    total = facts.whole("generation_batch_size") or per_process * world_size
    if total % generations:
        world = generations // math.gcd(per_process, generations)
        message = (
            f"{total} samples per generation ({batch} per device × {steps} steps × world size {world_size}) do not divide by"
            f" num_generations {generations}, which GRPO needs"
        )
        multiple = generations // math.gcd(steps * world_size, generations)
        fix = f"a world size that is a multiple of {world} (--world-size), or a {BATCH} that is a multiple of {multiple}"
        yield _found("warning", "not_divisible", "num_generations", place_of, message, fix)


def _found(severity: Any, code: str, key: str, place_of: PlaceOf, message: str, fix: str | None) -> Found:
    return Found(problem=Problem(severity=severity, code=code, key=key, place=place_of(key), message=message, fix=fix))
