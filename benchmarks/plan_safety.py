"""Do plans keep their promise? Random (model, card, config) draws are planned with the default headroom, then run on the virtual GPU.

    python benchmarks/plan_safety.py [--draws 200] [--seed 0] [--log draws.jsonl] [--keep FOLDER] [--models plain|beyond|trainers]

Each draw is a YAML with a model of the bundled table, a length, an effective batch, an optimizer, perhaps LoRA; and a card.
The plan is made with `hfopt.plan` (no dry run), then its candidate runs two whole optimizer steps with the real Trainer and PyTorch's own
CUDA allocator on the virtual GPU of that card (the product's own worker, forked by `forked_runs.py`): an out-of-memory error there is a
broken promise. While one draw runs, the next is planned.
`used_share` is the peak on the card over what the card gives a program. `used_share_mean` is over the draws where the effective batch
allows to fill the card: with the chosen precision and checkpointing, some exact divisor of it is predicted to take 85 % or more and fits.
Beside it stand the plain means over the draws that may trade batch for accumulation, and over all.
With --log finished draws are kept, and a second run goes on where the first was stopped; with --keep also traces and runs, for a second
run with a changed planner. The last line is one JSON object.
What this rests on: the virtual GPU (real allocator, no real kernels); cuDNN's inner workspaces are not in it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from forked_runs import ForkedRuns

from hfopt.errors import HfoptError, NothingFits
from hfopt.hardware.detect import named
from hfopt.memory.step_memory import context_bytes, estimate
from hfopt.planner import Plan, plan
from hfopt.pricing.forked_traces import Estimator
from hfopt.schema import Candidate

FILLED = 0.85
AHEAD = 8  # plans that may wait for the card
BATCH_KEYS = ("per_device_train_batch_size", "gradient_accumulation_steps")
CARDS = (
    "rtx 3060",
    "rtx 4060",
    "rtx 3070",
    "t4",
    "rtx 2080 ti",
    "rtx 4070",
    "rtx 3090",
    "rtx 4090",
    "l4",
    "a10",
    "v100 16gb",
    "l40s",
    "a100 40gb",
)
TEXT_LENGTHS = (64, 128, 256, 512)
EFFECTIVE_BATCHES = (24, 48, 60, 96, 120, 144, 180, 240, 360, 720)  # many divisors, so that a card can be filled
MODELS: tuple[tuple[str, str], ...] = (
    ("distilbert-base-uncased", "sequence_classification"),
    ("bert-base-uncased", "sequence_classification"),
    ("bert-base-uncased", "token_classification"),
    ("bert-large-uncased", "question_answering"),
    ("roberta-base", "masked_lm"),
    ("albert-base-v2", "sequence_classification"),
    ("electra-small-discriminator", "sequence_classification"),
    ("deberta-v3-small", "sequence_classification"),
    ("distilgpt2", "causal_lm"),
    ("gpt2", "causal_lm"),
    ("gpt2-medium", "causal_lm"),
    ("opt-125m", "causal_lm"),
    ("pythia-160m", "causal_lm"),
    ("SmolLM2-135M", "causal_lm"),
    ("Qwen2.5-0.5B", "causal_lm"),
    ("Llama-3.2-1B", "causal_lm"),
    ("t5-small", "seq2seq_lm"),
    ("bart-base", "seq2seq_lm"),
    ("vit-base-patch16-224", "image_classification"),
    ("deit-small-patch16-224", "image_classification"),
    ("convnext-tiny-224", "image_classification"),
)
BEYOND: tuple[tuple[str, str], ...] = (
    ("phi-1_5", "causal_lm"),
    ("gemma-3-270m", "causal_lm"),
    ("gemma-2-2b", "causal_lm"),
    ("bloom-560m", "causal_lm"),
    ("pythia-410m", "causal_lm"),
    ("gpt-neo-125m", "causal_lm"),
    ("Qwen3-0.6B", "causal_lm"),
    ("SmolLM2-360M", "causal_lm"),
    ("ModernBERT-base", "sequence_classification"),
    ("xlm-roberta-base", "token_classification"),
    ("all-mpnet-base-v2", "sequence_classification"),
    ("flan-t5-base", "seq2seq_lm"),
    ("mt5-small", "seq2seq_lm"),
    ("resnet-50", "image_classification"),
    ("swin-tiny-patch4-window7-224", "image_classification"),
    ("dinov2-base", "image_classification"),
    ("segformer-b0-finetuned-ade-512-512", "semantic_segmentation"),
    ("wav2vec2-base", "audio_classification"),
    ("whisper-tiny", "speech_seq2seq"),
)
"""Not part of the 200 draws: other families of the table."""
TRAINERS: tuple[tuple[str, str], ...] = (
    ("SmolLM2-135M", "sft"),
    ("SmolLM2-360M", "sft"),
    ("Qwen2.5-0.5B", "sft"),
    ("Qwen3-0.6B", "sft"),
    ("gemma-3-270m", "sft"),
    ("Llama-3.2-1B", "sft"),
    ("SmolLM2-135M", "dpo"),
    ("Qwen2.5-0.5B", "dpo"),
    ("Qwen3-0.6B", "dpo"),
    ("SmolLM2-360M", "kto"),
    ("Qwen2.5-0.5B", "kto"),
    ("SmolLM2-135M", "reward"),
    ("Qwen2.5-0.5B", "reward"),
    ("SmolVLM-256M-Instruct", "image_text"),
    ("SmolVLM-500M-Instruct", "image_text"),
    ("llava-onevision-qwen2-0.5b-ov-hf", "image_text"),
    ("InternVL3-1B-hf", "image_text"),
)
"""TRL's trainers, and models that take images with their text."""
LISTS = {"plain": MODELS, "beyond": BEYOND, "trainers": TRAINERS}
TRL_TASKS = ("sft", "dpo", "kto", "reward")
TEXT_TASKS = ("sequence_classification", "token_classification", "question_answering", "masked_lm", "causal_lm", "seq2seq_lm")
NO_CHECKPOINTING = ("albert-base-v2", "convnext-tiny-224", "resnet-50")


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    number: int
    card: str
    config: dict[str, Any]


def draw(number: int, seed: int, models: Sequence[tuple[str, str]] = MODELS) -> Draw:
    """The draw of that number: the same for the same seed, whatever was drawn before."""
    dice = random.Random(f"{seed}/{number}")
    model, task = dice.choice(models)
    effective = dice.choice(EFFECTIVE_BATCHES)
    batch = dice.choice([size for size in (1, 2, 3, 4, 6, 8, 12) if effective % size == 0])
    config: dict[str, Any] = {
        "model_name_or_path": model,
        "task": task,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": effective // batch,
        "optim": dice.choice(["adamw_torch", "adamw_torch_fused", "adafactor", "sgd"]),
        "max_grad_norm": dice.choice([1.0, 1.0, 0.0]),
        "gradient_checkpointing": dice.random() < 0.2 and model not in NO_CHECKPOINTING,
        "output_dir": "out",
    }
    if task in TEXT_TASKS:
        config["max_seq_length"] = dice.choice(TEXT_LENGTHS)
    if task in TRL_TASKS:
        del config["task"]
        config |= {"trainer_type": task, "dataset_name": "some/data", "max_length": 4 * dice.choice(TEXT_LENGTHS)}
        config |= {"packing": True} if task == "sft" and dice.random() < 0.3 else {}
    if task in ("causal_lm", "sft", "dpo", "kto") and dice.random() < 0.4:
        config |= {"use_lora": True, "lora_r": dice.choice([8, 16]), "lora_target_modules": "all-linear"}
    return Draw(number=number, card=dice.choice(CARDS), config=config)


class Kept:
    """Traces by (model, settings) and runs by (config, card, candidate), kept in a folder between draws and between calls."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: object, make: Callable[[], Any], *, good: Callable[[Any], bool] = lambda made: True) -> Any:
        if self._folder is None:
            return make()
        path = self._folder / hashlib.sha256(repr(key).encode()).hexdigest()
        if path.exists():
            return pickle.loads(path.read_bytes())
        made = make()
        if good(made):
            path.write_bytes(pickle.dumps(made))
        return made

    def estimator(self, config: dict[str, Any]) -> Estimator:
        model = sorted((key, value) for key, value in config.items() if key not in ("output_dir", *BATCH_KEYS))
        return lambda workload, settings: self.get((model, settings), lambda: estimate(workload, settings))


def planned(drawn: Draw, kept: Kept) -> tuple[dict[str, Any], Plan | None]:
    """What the planner says; a plan where there is one."""
    result: dict[str, Any] = {"number": drawn.number, "card": drawn.card, **drawn.config}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.yaml"
        path.write_text(yaml.safe_dump(drawn.config))
        try:
            made = plan(path, gpu=drawn.card, dry_run=False, estimator=kept.estimator(drawn.config))
        except NothingFits as answer:
            return result | {"outcome": "nothing fits", "message": str(answer)}, None
        except HfoptError as error:
            return result | {"outcome": "refused", "message": str(error)}, None
    return result | {"plan_s": round(time.perf_counter() - began, 1)}, made


def tried(drawn: Draw, made: Plan, runs: ForkedRuns, kept: Kept, timeout_s: float) -> dict[str, Any]:
    """The plan's candidate on the virtual card."""
    gpu = named(drawn.card).smallest
    assert gpu is not None
    facts, candidate = made.facts, made.candidate
    context = context_bytes(gpu.capability, multiprocessors=gpu.sms)
    trial = kept.get(
        (sorted(drawn.config.items()), gpu, candidate),
        lambda: runs.run(facts.job, candidate, gpu=gpu, context_bytes=context, timeout_s=timeout_s),
        good=lambda made: made["outcome"] in ("ok", "oom"),
    )
    usable = gpu.usable_bytes or gpu.memory_bytes
    fitting = [(facts.after.candidate, facts.after.memory), *((one.candidate, one.memory) for one in facts.alternatives)]
    fullest = max(memory.device_bytes for other, memory in fitting if _same_settings(other, candidate))
    return {
        "outcome": trial["outcome"],
        "message": trial.get("message"),
        "batch": candidate.per_device_batch,
        "precision": candidate.precision,
        "checkpointing": candidate.checkpointing.every_n_layers,
        "predicted_reserved": facts.after.memory.reserved_bytes,
        "predicted_share": facts.after.memory.device_bytes / usable,
        "measured_reserved": trial.get("peak_reserved_bytes"),
        "used_share": (trial.get("peak_device_bytes") or 0) / usable,
        "could_be_filled": fullest >= FILLED * usable,
        "may_trade": facts.neutrality is None or facts.neutrality.neutral,
        "whole": candidate.accumulation == 1,
    }


def _same_settings(one: Candidate, other: Candidate) -> bool:
    return (one.precision, one.checkpointing) == (other.precision, other.checkpointing)


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    ran = [one for one in results if one["outcome"] in ("ok", "oom")]
    filled = [one["used_share"] for one in ran if one["could_be_filled"] and one["outcome"] == "ok"]
    errors = [
        100 * abs(one["predicted_reserved"] / one["measured_reserved"] - 1)
        for one in ran
        if one["outcome"] == "ok" and one["measured_reserved"]
    ]
    shares = [one["used_share"] for one in ran if one["outcome"] == "ok"]
    trading = [one["used_share"] for one in ran if one["outcome"] == "ok" and one["may_trade"]]
    return {
        "draws": len(results),
        "ran": len(ran),
        "out_of_memory": sum(one["outcome"] == "oom" for one in ran),
        "nothing_fits": sum(one["outcome"] == "nothing fits" for one in results),
        "refused": sum(one["outcome"] == "refused" for one in results),
        "failed": sum(one["outcome"] in ("error", "timeout") for one in results),
        "could_be_filled": len(filled),
        "used_share_mean": round(statistics.fmean(filled), 4) if filled else None,
        "may_trade": len(trading),
        "used_share_mean_of_those_that_may_trade": round(statistics.fmean(trading), 4) if trading else None,
        "used_share_mean_of_all": round(statistics.fmean(shares), 4) if shares else None,
        "reserved_median_pct": round(statistics.median(errors), 3) if errors else None,
        "reserved_max_pct": round(max(errors), 2) if errors else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="finished draws are kept here, one JSON object a line")
    parser.add_argument(
        "--keep", type=Path, help="a folder for traces and runs; a new one after a change to hfopt/trace, memory, model, probe or virtual"
    )
    parser.add_argument("--only", type=int, nargs="+", help="these draws alone")
    parser.add_argument("--models", choices=LISTS, default="plain", help="which list is drawn from")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one run on the virtual GPU")
    options = parser.parse_args()
    results = [json.loads(line) for line in options.log.read_text().splitlines()] if options.log and options.log.exists() else []
    done = {one["number"] for one in results}
    kept = Kept(options.keep)
    first_card = named(CARDS[0]).smallest
    assert first_card is not None

    def finish(result: dict[str, Any], run: Future[dict[str, Any]] | None) -> None:
        result |= {} if run is None else run.result()
        results.append(result)
        if options.log:
            with options.log.open("a") as log:
                log.write(json.dumps(result) + "\n")
        sys.stderr.write(
            f"{result['number']:4} {result['card']:<12} {result['model_name_or_path']:<28} {result['outcome']:<12} "
            f"batch {result.get('batch', '-')} used {100 * result.get('used_share', 0):.0f} % {result.get('message') or ''}\n"
        )

    waiting: list[tuple[dict[str, Any], Future[dict[str, Any]] | None]] = []
    with ForkedRuns(first_card) as runs, ThreadPoolExecutor(max_workers=1) as pool:
        for number in options.only or range(options.draws):
            if number in done:
                continue
            drawn = draw(number, options.seed, LISTS[options.models])
            result, made = planned(drawn, kept)
            waiting.append((result, None if made is None else pool.submit(tried, drawn, made, runs, kept, options.timeout)))
            while waiting and (len(waiting) > AHEAD or waiting[0][1] is None or waiting[0][1].done()):
                finish(*waiting.pop(0))
        for one in waiting:
            finish(*one)
    print(json.dumps(summary(results)))


if __name__ == "__main__":
    main()
