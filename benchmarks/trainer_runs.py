"""HF Trainer runs of others on real cards, predicted as they stand: speed and memory, row by row, beside a plain roofline.

usage: python benchmarks/trainer_runs.py [CSV] [--traces FILE] [--what speed|memory]

CSV is shaped like benchmarks/data/trainer_runs.csv (the default): every setting is kept as the row states it, and none is tuned to. The
installed versions are traced, whatever the row's were, and priced under the torch of the row; what of the row's own stack decides the
peak goes in as a fact with its source: the loss of that transformers, TRL's cast of a 4-bit model, the adapters' dropout. `ambiguity` in
the file says what a row leaves open. Optimizers that transformers or apex had then are traced as what they launch: `adamw_hf` goes
through the parameters one by one, apex's is one fused kernel. Qwen-7B ran as remote code; Qwen2 of the same sizes stands in for it.
data/held_out_runs.csv has the same shape: no share, cost or constant is set with its rows. The last line is one JSON object; nothing
here was measured by us.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import json
import pickle
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from published_rows import NotACase, card_of, torch_of
from speed_accuracy import roofline_step_s

from hfopt.memory.allocator import AllocatorOptions
from hfopt.memory.step_memory import Estimate, estimate
from hfopt.model.from_config import from_spec
from hfopt.schema import Checkpointing, DataSpec, Gpu, Lora, ModelSpec, OpCost, Quantization, StepSettings
from hfopt.speed.device_speed import FLASH_2, Speed, speed_of
from hfopt.speed.step_time import StepTimer
from hfopt.units import GIB, MIB

DATA = Path(__file__).parent / "data" / "trainer_runs.csv"
Row = dict[str, str]
SPEED = ("samples_per_s", "step_seconds")
UNKNOWN = "C"  # a row's trust, where something is known to slow it that is not in the prediction
BYTES = {"MiB": MIB, "GiB": GIB, "GB": 1e9, "bytes": 1}
APEX_BYTES, HALF_BYTES = 40, 14
SHIFTED_LOGITS = ((4, 46), (4, 48))  # transformers.loss came with 4.46; transformers#35646 shifts the labels instead (4.49)
QWEN_7B = {  # config.json of Qwen/Qwen-7B-Chat, in Qwen2's words
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
POWERLM_3B = {  # its config.json, on Granite's
    "hidden_size": 2304,
    "num_hidden_layers": 40,
    "num_attention_heads": 36,
    "num_key_value_heads": 36,
    "intermediate_size": 9216,
    "vocab_size": 49152,
}
STAND_INS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen-7b": ("Qwen/Qwen2-7B", QWEN_7B),
    "ibm/powerlm-3b": ("ibm-granite/granite-3.3-2b-base", POWERLM_3B),
}
LORA_TARGETS: dict[str, tuple[str, ...] | str] = {
    "qv": ("q_proj", "v_proj"),
    "qkvo": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "qkv,o,gate_up,down": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "all-linear": "all-linear",
    "c_attn,c_proj,w1,w2": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
LORA_DROPOUT = {
    "foundation-model-stack/fms-acceleration": 0.1,  # its scripts/benchmarks/scenarios.yaml
    "QwenLM/Qwen": 0.05,  # LoraArguments of its finetune.py
    "ljm565/universal-llm-trainer": 0.05,  # its config_lora
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row with what is needed to predict it."""

    row: Row
    gpu: Gpu
    model: ModelSpec
    settings: StepSettings
    length: int
    batch: int

    @property
    def key(self) -> str:
        """What decides the trace."""
        return repr((self.model, self.settings, self.length, self.copies_logits))

    @property
    def copies_logits(self) -> bool:
        """Whether the row's transformers shifted the logits, in a copy, instead of the labels."""
        stated = re.search(r"transformers (\d+)\.(\d+)", self.row["versions/date"])
        return stated is not None and SHIFTED_LOGITS[0] <= (int(stated[1]), int(stated[2])) <= SHIFTED_LOGITS[1]

    @property
    def title(self) -> str:
        return self.row["id"].partition("#")[0]

    @property
    def measured(self) -> float:
        """Samples per second, or bytes."""
        value = float(self.row["value"])
        if self.row["metric_kind"] == "step_seconds":
            return self.batch * self.settings.accumulation / value
        return value if self.row["metric_kind"] == "samples_per_s" else value * BYTES[self.row["unit"]]


@dataclass(frozen=True, kw_only=True)
class Answer:
    run: Run
    predicted: float
    roofline: float | None = None  # for speed
    clock_share: float | None = None

    @property
    def error(self) -> float:
        return self.predicted / self.run.measured - 1


# ---------------------------------------------------------------------------------------------- a row as a run


def run_of(row: Row) -> Run:
    gpu = card_of(row["card"])
    length = re.match(r"\d+", row["seq_len"])
    if length is None:
        raise NotACase(f"length '{row['seq_len']}' is not stated")
    precision, weights = _precision(row["precision"])
    settings = StepSettings(
        precision=precision,  # type: ignore[arg-type]
        checkpointing=Checkpointing(
            every_n_layers=int(row["checkpointing"] == "True"), use_reentrant=True
        ),  # transformers' default before 5
        accumulation=int(row["accumulation"]),
        optim=_optimizer(row["optimizer"]),
        attn_implementation=row["attention"] if row["attention"] == "eager" else None,
        fused_loss="liger" in row["task"],
        capability=gpu.capability or (8, 0),
        multiprocessors=gpu.sms,
    )
    return Run(row=row, gpu=gpu, model=_model(row, weights), settings=settings, length=int(length[0]), batch=int(row["per_device_batch"]))


def _model(row: Row, weights: str) -> ModelSpec:
    name, details = row["model"], row["params/lora details"]
    name, overrides = next((of for part, of in STAND_INS.items() if part in name.lower()), (name, {}))
    quantized = Quantization(bits=4, double_quant="double-quant" in details, compute_dtype="bfloat16") if "QLoRA" in details else None
    return ModelSpec(
        name=name,
        task=_task(row["task"]),  # type: ignore[arg-type]
        weights_dtype=weights,
        attn_implementation=row["attention"],
        lora=_lora(details, row["source"]),
        quantization=quantized,
        overrides=overrides,
    )


def _task(text: str) -> str:
    words = {"causal": "causal_lm", "masked": "masked_lm", "squad": "question_answering", "glue": "sequence_classification"}
    found = next((task for word, task in words.items() if word in text.lower()), None)
    if found is None:
        raise NotACase(f"task '{text}' is not known")
    return found


def _lora(details: str, source: str) -> Lora | None:
    if details == "full":
        return None
    match = re.search(r"r=(\d+) (\S+)$", details)
    if match is None or match[2] not in LORA_TARGETS:
        raise NotACase(f"adapter '{details}' is not known")
    dropout = next((share for name, share in LORA_DROPOUT.items() if source.startswith(name)), 0.0)
    return Lora(r=int(match[1]), target_modules=LORA_TARGETS[match[2]], dropout=dropout)


def _precision(text: str) -> tuple[str, str]:
    """(autocast, dtype of the weights)."""
    if "tf32 allowed" in text:
        return "tf32", "float32"
    if text.startswith("pure bf16"):
        return "fp32", "bfloat16"
    if "apex O2" in text:
        return "fp32", "float16"
    autocast = re.match(r"(bf16|fp16) autocast( on bf16 weights)?$", text)
    if autocast:
        return autocast[1], "bfloat16" if autocast[2] else "float32"
    if text == "fp32":
        return "fp32", "float32"
    raise NotACase(f"precision '{text}' is not known")


def _optimizer(text: str) -> str:
    return {"adamw_apex_fused": "adamw_torch_fused", "apex FusedAdam": "adamw_torch_fused"}.get(text, text)


# ---------------------------------------------------------------------------------------------- predictions


class Traces:
    """Estimates by what decides them, kept in a file between runs where one is named."""

    def __init__(self, kept: Path | None) -> None:
        self._kept = kept
        self._found: dict[str, Estimate] = pickle.loads(kept.read_bytes()) if kept is not None and kept.exists() else {}

    def of(self, run: Run) -> Estimate:
        if run.key not in self._found:
            workload = from_spec(run.model, DataSpec(max_length=run.length))
            if run.model.quantization is not None and "SFTTrainer" in run.row["task"]:
                workload = replace(workload, build_model=functools.partial(_cast_by_trl, workload.build_model))
            with shifted_logits() if run.copies_logits else contextlib.nullcontext():
                self._found[run.key] = estimate(workload, run.settings)
            if self._kept is not None:
                self._kept.with_suffix(".new").write_bytes(pickle.dumps(self._found))
                self._kept.with_suffix(".new").replace(self._kept)
        return self._found[run.key]


@contextlib.contextmanager
def shifted_logits() -> Iterator[None]:
    """The loss of causal models as transformers 4.46 to 4.48 had it: a float32 copy of the logits, and a second one without the last
    token, where the labels are shifted since (transformers#35646)."""
    from transformers.loss import loss_utils

    def loss(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> Any:
        logits = logits.float()
        shifted, targets = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        return loss_utils.fixed_cross_entropy(shifted.view(-1, vocab_size), targets.view(-1), num_items_in_batch)

    kept = loss_utils.LOSS_MAPPING["ForCausalLM"]
    loss_utils.LOSS_MAPPING["ForCausalLM"] = loss
    try:
        yield
    finally:
        loss_utils.LOSS_MAPPING["ForCausalLM"] = kept


def _cast_by_trl(build: Callable[[], Any]) -> Any:
    """TRL's peft_module_casting_to_bf16, which its SFTTrainer called for a 4-bit model in bf16: the embeddings and the head
    that prepare_model_for_kbit_training had widened."""
    model = build()
    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "lm_head")):
            module.bfloat16()
    return model


def kernels(run: Run, made: Estimate) -> tuple[OpCost, ...]:
    """The step's kernels. Of apex's O2 the trace has the half-precision weights alone: its FusedAdam moves 40 bytes for each of them (of
    gradients that are read, made float32 and read again, of float32 weights and two states there and back, of the new weights in half),
    not 14, and what clips reads float32."""
    if "apex O2" not in run.row["precision"]:
        return made.ops

    def widened(op: OpCost) -> OpCost:
        wider = APEX_BYTES / HALF_BYTES if "adam" in op.name else 2.0
        return replace(op, bytes_constant=op.bytes_constant * wider, bytes_slope=op.bytes_slope * wider)

    return tuple(widened(op) if op.phase == "optimizer" else op for op in made.ops)


def predict(run: Run, made: Estimate, speed: Speed | None = None) -> Answer:
    if run.row["metric_kind"] in SPEED:
        speed = speed or speed_as_run(run)
        accumulation, ops = run.settings.accumulation, kernels(run, made)
        found = StepTimer(ops, speed, run.settings.precision).at(run.batch, accumulation)
        roofline_s = roofline_step_s(ops, run.gpu, run.settings.precision, batch=run.batch, accumulation=accumulation)
        return Answer(run=run, predicted=found.samples_per_s, roofline=run.batch * accumulation / roofline_s, clock_share=found.clock_share)
    return Answer(run=run, predicted=_memory_bytes(run, made))


def speed_as_run(run: Run) -> Speed:
    """The card under the torch of the row; a flash-attention package brings its kernel along whatever the torch."""
    torch = torch_of(run.row["versions/date"])
    speed, newer = speed_of(run.gpu, torch_version=torch), speed_of(run.gpu, torch_version=max(torch, FLASH_2))
    assert speed is not None and newer is not None, run.gpu.name
    return replace(speed, flash_share=newer.flash_share) if run.row["attention"] == "flash_attention_2" else speed


def _memory_bytes(run: Run, made: Estimate) -> float:
    """By what the row's figure holds: what torch allocated or the Trainer's peak, else all of it as nvidia-smi shows it less the context
    (fms-acceleration subtracts a baseline). The allocator is that of the row's torch, on the row's card."""
    curve, kind = made.curve, run.row["metric_kind"]
    room = (run.gpu.usable_bytes or run.gpu.memory_bytes) - curve.context_bytes
    replay = curve.replay(run.batch, AllocatorOptions(torch_version=torch_of(run.row["versions/date"])), capacity_bytes=room)
    if kind in ("torch_max_allocated", "trainer_mem_peak_less_weights_plus_buckets"):
        return replay.allocated_bytes
    return replay.reserved_bytes + curve.context_bytes


# ---------------------------------------------------------------------------------------------- the comparison


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    speed = [one for one in answers if one.roofline is not None]
    memory = [one for one in answers if one.roofline is None and one.run.row["trust"] == "A"]
    found: dict[str, Any] = {}
    known = [one for one in speed if one.run.row["trust"] != UNKNOWN]
    if speed:
        found |= {"speed_rows": len(speed), **_spread("speed", [one.error for one in speed])}
    if known and len(known) < len(speed):
        found |= {"known_rows": len(known), **_spread("known", [one.error for one in known])}
    if speed:
        found |= _spread("roofline", [(one.roofline or 0) / one.run.measured - 1 for one in speed])
    if memory:
        errors = [one.error for one in memory]
        found |= {"memory_rows": len(memory), **_spread("memory", errors), "memory_under_3pct": sum(e < -0.03 for e in errors)}
    return found


def _spread(name: str, errors: Sequence[float]) -> dict[str, float]:
    sizes = sorted(abs(error) for error in errors)
    p90 = statistics.quantiles(sizes, n=10, method="inclusive")[-1] if len(sizes) > 1 else sizes[0]
    return {f"{name}_median_pct": round(100 * statistics.median(sizes), 2), f"{name}_p90_pct": round(100 * p90, 2)}


def read_runs(path: Path, what: str | None = None) -> tuple[list[Run], list[tuple[str, str]]]:
    runs, left_out = [], []
    with path.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            kind = "speed" if row["metric_kind"] in SPEED else "memory"
            if what not in (None, kind):
                continue
            try:
                runs.append(run_of(row))
            except NotACase as error:
                left_out.append((row["id"], str(error)))
    return runs, left_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", nargs="?", type=Path, default=DATA)
    parser.add_argument("--traces", type=Path, help="keep the traces there, and read those that are there")
    parser.add_argument("--what", choices=("speed", "memory"), help="only these rows")
    options = parser.parse_args()
    started = time.perf_counter()
    runs, left_out = read_runs(options.csv, options.what)
    traces = Traces(options.traces)
    answers = [predict(run, traces.of(run)) for run in runs]
    for one in answers:
        row = one.run.row
        unit, scale = ("samples/s", 1.0) if one.roofline is not None else ("MiB", 1 / MIB)
        plain = f"  roofline {100 * (one.roofline / one.run.measured - 1):+7.1f} %" if one.roofline is not None else ""
        figures = f"measured {one.run.measured * scale:10.2f}  predicted {one.predicted * scale:10.2f} {unit:9} {100 * one.error:+7.1f} %"
        print(f"{one.run.title:26} {one.run.gpu.name:24} {row['metric_kind'][:20]:20} {figures}{plain}  {row['trust']}")
    for name, why in left_out:
        print(f"left out: {name}: {why}")
    sys.stderr.write(f"{time.perf_counter() - started:.0f} s\n")
    print(json.dumps({**summary(answers), "left_out": len(left_out)}))


if __name__ == "__main__":
    main()
