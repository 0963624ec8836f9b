"""Do plans keep their promise? Random (model, card, config) draws are planned with the default headroom, then run on the virtual GPU.

    python benchmarks/plan_safety.py [--draws 200] [--seed 0] [--log draws.jsonl]

Each draw is a YAML with a model of the bundled table, a length, an effective batch, an optimizer, perhaps LoRA; and a card.
The plan is made with `hfopt.plan` (no dry run), then its candidate runs three whole optimizer steps and an evaluation with the real Trainer
and PyTorch's own CUDA allocator on the virtual GPU of that card: an out-of-memory error there is a broken promise.
`used_share` is the peak on the card over what the card gives a program. `used_share_mean` is over the draws where the effective batch
allows to fill the card: with the chosen precision and checkpointing, some exact divisor of it is predicted to take 85 % or more and fits.
With --log finished draws are kept, and a second run goes on where the first was stopped. The last line is one JSON object.
What this rests on: the virtual GPU (real allocator, no real kernels); cuDNN's inner workspaces are not in it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hfopt.errors import HfoptError, NothingFits
from hfopt.estimate.context import context_bytes
from hfopt.hardware.detect import named
from hfopt.planner import plan
from hfopt.schema import Candidate
from hfopt.verify.dryrun import dry_run

FILLED = 0.85
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    number: int
    card: str
    config: dict[str, Any]


def draw(number: int, seed: int) -> Draw:
    """The draw of that number: the same for the same seed, whatever was drawn before."""
    dice = random.Random(f"{seed}/{number}")
    model, task = dice.choice(MODELS)
    effective = dice.choice(EFFECTIVE_BATCHES)
    batch = dice.choice([size for size in (1, 2, 3, 4, 6, 8, 12) if effective % size == 0])
    config: dict[str, Any] = {
        "model_name_or_path": model,
        "task": task,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": effective // batch,
        "optim": dice.choice(["adamw_torch", "adamw_torch_fused", "adafactor", "sgd"]),
        "max_grad_norm": dice.choice([1.0, 1.0, 0.0]),
        "gradient_checkpointing": dice.random() < 0.2 and model not in ("albert-base-v2", "convnext-tiny-224"),
        "output_dir": "out",
    }
    if task != "image_classification":
        config["max_seq_length"] = dice.choice(TEXT_LENGTHS)
    if task == "causal_lm" and dice.random() < 0.4:
        config |= {"use_lora": True, "lora_r": dice.choice([8, 16]), "lora_target_modules": "all-linear"}
    return Draw(number=number, card=dice.choice(CARDS), config=config)


def try_out(drawn: Draw, timeout_s: float) -> dict[str, Any]:
    """Plans the draw, runs the plan on the virtual card and returns what happened."""
    gpu = named(drawn.card).smallest
    assert gpu is not None
    result: dict[str, Any] = {"number": drawn.number, "card": drawn.card, **drawn.config}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.yaml"
        path.write_text(yaml.safe_dump(drawn.config))
        try:
            made = plan(path, gpu=drawn.card, dry_run=False)
        except NothingFits as answer:
            return result | {"outcome": "nothing fits", "message": str(answer)}
        except HfoptError as error:
            return result | {"outcome": "refused", "message": str(error)}
    facts, candidate = made.facts, made.candidate
    result["plan_s"] = round(time.perf_counter() - began, 1)
    context = context_bytes(gpu.capability, multiprocessors=gpu.sms)
    trial = dry_run(facts.job, candidate, device="virtual", gpu=gpu, context_bytes=context, timeout_s=timeout_s, steps=2)
    usable = gpu.usable_bytes or gpu.memory_bytes
    fitting = [(facts.after.candidate, facts.after.memory), *((one.candidate, one.memory) for one in facts.alternatives)]
    fullest = max(memory.device_bytes for other, memory in fitting if _same_settings(other, candidate))
    return result | {
        "outcome": trial.outcome,
        "message": trial.message,
        "batch": candidate.per_device_batch,
        "precision": candidate.precision,
        "checkpointing": candidate.checkpointing.every_n_layers,
        "predicted_reserved": facts.after.memory.reserved_bytes,
        "measured_reserved": trial.peak_reserved_bytes,
        "used_share": (trial.peak_device_bytes or 0) / usable,
        "could_be_filled": fullest >= FILLED * usable,
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
    return {
        "draws": len(results),
        "ran": len(ran),
        "out_of_memory": sum(one["outcome"] == "oom" for one in ran),
        "nothing_fits": sum(one["outcome"] == "nothing fits" for one in results),
        "refused": sum(one["outcome"] == "refused" for one in results),
        "failed": sum(one["outcome"] in ("error", "timeout") for one in results),
        "could_be_filled": len(filled),
        "used_share_mean": round(statistics.fmean(filled), 4) if filled else None,
        "used_share_mean_of_all": round(statistics.fmean(shares), 4) if shares else None,
        "reserved_median_pct": round(statistics.median(errors), 3) if errors else None,
        "reserved_max_pct": round(max(errors), 2) if errors else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="finished draws are kept here, one JSON object a line")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one run on the virtual GPU")
    options = parser.parse_args()
    results = [json.loads(line) for line in options.log.read_text().splitlines()] if options.log and options.log.exists() else []
    done = {one["number"] for one in results}
    for number in range(options.draws):
        if number in done:
            continue
        result = try_out(draw(number, options.seed), options.timeout)
        results.append(result)
        if options.log:
            with options.log.open("a") as log:
                log.write(json.dumps(result) + "\n")
        sys.stderr.write(
            f"{number:4} {result['card']:<12} {result['model_name_or_path']:<28} {result['outcome']:<12} batch {result.get('batch', '-')} "
            f"used {100 * result.get('used_share', 0):.0f} % {result.get('message') or ''}\n"
        )
    print(json.dumps(summary(results)))


if __name__ == "__main__":
    main()
