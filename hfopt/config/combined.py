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
    if trainer == "KTO":
        yield from _check_neighbours(args, facts, place_of)
    if trainer == "SFT":
        yield from _check_rows(args, facts, place_of)
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
    """What GRPOConfig refuses: per device × world × steps_per_generation (default: the accumulation) must be a multiple of
    num_generations, a stated generation_batch_size one of the global batch too."""
    yield from _refused_by_grpo(args, facts, place_of)
    generations = facts.whole("num_generations") or 8
    batch, accumulation = args.get(BATCH, 8), args.get(ACCUMULATION, 1)
    if not isinstance(batch, int) or not isinstance(accumulation, int):
        return
    steps = facts.whole("steps_per_generation") or accumulation
    per_process = batch * steps
    stated = facts.whole("generation_batch_size")
    total = stated or per_process * world_size
    if stated and stated % (batch * world_size):
        message = f"generation_batch_size {stated} is no multiple of the global batch ({batch} per device × world size {world_size})"
        whole = math.lcm(batch * world_size, generations)
        fix = f"generation_batch_size: {whole * max(1, stated // whole)}"
        yield _found("warning", "not_divisible", "generation_batch_size", place_of, message, fix)
    elif stated and total % generations:
        message = f"generation_batch_size {stated} does not divide by num_generations {generations}, which GRPO needs"
        yield _found("warning", "not_divisible", "generation_batch_size", place_of, message, None)
    elif total % generations:
        world = generations // math.gcd(per_process, generations)
        message = (
            f"{total} samples per generation ({batch} per device × {steps} steps × world size {world_size}) do not divide by"
            f" num_generations {generations}, which GRPO needs"
        )
        multiple = generations // math.gcd(steps * world_size, generations)
        fix = f"a world size that is a multiple of {world} (--world-size), or a {BATCH} that is a multiple of {multiple}"
        yield _found("warning", "not_divisible", "num_generations", place_of, message, fix)


def _refused_by_grpo(args: Mapping[str, Any], facts: Facts, place_of: PlaceOf) -> Iterator[Found]:
    if facts.whole("generation_batch_size") and facts.whole("steps_per_generation"):
        message = "generation_batch_size and steps_per_generation are both set; GRPOConfig takes one of them"
        yield _found("error", "conflict", "generation_batch_size", place_of, message, "drop one of them")
    if facts.whole("num_generations") == 1:
        message = "num_generations is 1; GRPO compares the completions of a prompt and needs at least 2"
        yield _found("error", "bad_value", "num_generations", place_of, message, "num_generations: 8")
    if args.get("auto_find_batch_size") is True:
        message = "auto_find_batch_size would break GRPO's groups of completions; GRPOConfig refuses it"
        yield _found("error", "conflict", "auto_find_batch_size", place_of, message, "drop the line; `hfopt run` survives a shortage")


def _check_neighbours(args: Mapping[str, Any], facts: Facts, place_of: PlaceOf) -> Iterator[Found]:
    """KTO's KL term pairs each prompt with its neighbour's completion, within the micro-batch."""
    if facts.text("loss_type") == "apo_zero_unpaired":
        return
    sampling = args.get("train_sampling_strategy")
    if sampling not in (None, "sequential"):
        message = f"train_sampling_strategy is {sampling}; KTO pairs neighbours that were chosen beforehand, in their order"
        yield _found("error", "conflict", "train_sampling_strategy", place_of, message, "train_sampling_strategy: sequential")
    if args.get(BATCH) == 1:
        message = f"{BATCH} is 1; KTO estimates its KL term within the micro-batch, which needs at least 2 samples"
        yield _found("error", "bad_value", BATCH, place_of, message, f"{BATCH}: 2, with half the {ACCUMULATION}")


def _check_rows(args: Mapping[str, Any], facts: Facts, place_of: PlaceOf) -> Iterator[Found]:
    """padding_free lays the samples of a batch in one row, where nothing cuts them; packing cuts and fills the rows itself."""
    if facts.true("padding_free") and not facts.true("packing") and facts.whole("max_length", "max_seq_length") is not None:
        message = "padding_free without packing does not enforce max_length: a longer sample takes more memory than planned"
        yield _found("warning", "conflict", "padding_free", place_of, message, "packing: true, or cut the samples beforehand")


def _found(severity: Any, code: str, key: str, place_of: PlaceOf, message: str, fix: str | None) -> Found:
    return Found(problem=Problem(severity=severity, code=code, key=key, place=place_of(key), message=message, fix=fix))
