"""Rows of a table shaped like published.csv as cases the estimator can be asked about; a row that cannot be one says why.

A case holds the model as a function of its depth: a step's kernels are linear in the number of equal layers, so two shallow traces give
any depth. What a source leaves open (real lengths under dynamic padding) is stated here once, for all rows of that source.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from published_models import NotACase, Row, model_of

from hfopt.errors import HardwareError
from hfopt.hardware import catalog
from hfopt.schema import Checkpointing, Gpu, StepSettings
from hfopt.units import GIB

COLUMNS = (
    *("source", "gpu", "model", "task", "seq_len", "per_device_batch", "grad_accum", "precision", "grad_ckpt", "optimizer", "attn", "lora"),
    *("torch_version", "metric_kind", "value", "unit", "url", "notes"),
)
BINNED_LENGTH = 512 // 2 + 64 // 2
"""NVIDIA's BERT at 512 tokens: its changelog says that phase 2 is binned by length with a bin size of 64, and half of the tokens of the
Wikipedia data at 512 are padding (Krell et al., arXiv 2107.02027). So a batch is half of 512 long, and half a bin more."""
GRAND_TETON = {"power_limit_w": 500.0, "bandwidth_bytes_per_s": 2.4e12}
"""torchtitan's H100s, by the hardware section of its docs/performance.md: HBM2e at 2.4 TB/s and a power limit of 500 W."""
NODE_LINK_GBITS = 200.0  # between nodes, for each card: 1600 of a node, shared by its 8, as llm-foundry's notes say


@dataclass(frozen=True, kw_only=True)
class Case:
    """One published speed with what is needed to predict it."""

    row: Row
    gpu: Gpu
    world_size: int
    sharded: bool
    model: str  # normalised: the same word for the same architecture
    layers: int
    build: Callable[[int], Any]  # depth -> model
    make_batch: Callable[[int], dict[str, Any]]
    settings: StepSettings
    weights: torch.dtype
    batch: int
    accumulation: int
    samples_per_s: float  # measured, all devices together
    looped_optimizer: bool  # one kernel per parameter and operation, as before the multi-tensor optimizers
    compiled: bool
    length: int
    torch: tuple[int, int]

    @property
    def node_link_bytes_per_s(self) -> float:
        stated = re.search(r"(\d+) Gb/s between nodes for each card", self.row["notes"])
        return float(stated[1] if stated else NODE_LINK_GBITS) * 1e9 / 8

    @property
    def config(self) -> tuple[Any, ...]:
        """What tells two cases of the same source, card and model apart."""
        s = self.settings
        return (
            self.batch,
            self.accumulation,
            s.precision,
            s.checkpointing,
            s.optim,
            self.length,
            self.compiled,
            self.row["lora"],
            self.world_size,
        )

    @property
    def key(self) -> tuple[Any, ...]:
        """What decides the kernels, whatever the batch, the card's speed or their number."""
        s = replace(self.settings, accumulation=1)
        row = self.row
        return (
            self.model,
            self.length,
            s,
            self.weights,
            row["lora"],
            row["task"],
            self.looped_optimizer,
        )


def read_cases(path: Path) -> tuple[list[Case], list[tuple[Row, str]]]:
    """(the cases, the speed rows that are none with the reason)."""
    cases, skipped = [], []
    for row in _speed_rows(path):
        try:
            cases.append(_case(row))
        except (NotACase, HardwareError) as error:
            skipped.append((row, str(error)))
        except (ValueError, KeyError) as error:
            skipped.append((row, f"cannot be read: {error}"))
    return cases, skipped


def _speed_rows(path: Path) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            if row.get("metric_kind") in ("samples_per_s", "tokens_per_s"):
                yield {key: (row.get(key) or "").strip() for key in COLUMNS}


def _case(row: Row) -> Case:
    gpu, world = _cards(row["gpu"])
    if "torchtitan" in row["source"] and "H100" in gpu.name:
        gpu = replace(gpu, **GRAND_TETON)
    if not row["per_device_batch"]:
        raise NotACase("no batch size")
    batch, accumulation = int(row["per_device_batch"]), int(row["grad_accum"] or 1)
    sharded = world > 1 and ("FULL_SHARD" in row["notes"] or "fsdp" in f"{row['precision']} {row['notes']} {row['task']}".lower())
    length = _length(row, batch)
    precision, weights = _precision(row["precision"], row["notes"])
    found = model_of(row, length, weights)
    settings = StepSettings(
        precision=precision,  # type: ignore[arg-type]
        checkpointing=_checkpointing(row["grad_ckpt"]),
        accumulation=accumulation,
        optim=_optimizer(row["optimizer"]),
        label_smoothing=0.1 if "label_smoothing 0.1" in row["notes"] or "15026" in row["source"] else 0.0,
        attn_implementation="eager" if "eager" in row["attn"] else None,
        capability=gpu.capability or (8, 0),
    )
    value = float(row["value"].replace(",", "").lstrip("~"))
    if row["metric_kind"] == "tokens_per_s":
        value /= length
    return Case(
        row=row,
        gpu=gpu,
        world_size=world,
        sharded=sharded,
        model=found.name,
        layers=found.layers,
        build=found.build,
        make_batch=found.make_batch,
        settings=settings,
        weights=weights,
        batch=batch,
        accumulation=accumulation,
        samples_per_s=value * (world if "/gpu" in row["unit"] else 1),
        looped_optimizer=_before_multi_tensor(row),
        compiled=_compiled(row),
        length=length,
        torch=torch_of(row["torch_version"]),
    )


# ---------------------------------------------------------------------------------------------- one column each


def _cards(text: str) -> tuple[Gpu, int]:
    """(the card, how many)."""
    match = re.match(r"^(?:(\d+)\s*x\s*)?(.*)$", text)
    assert match is not None
    return card_of(match[2]), int(match[1] or 1)


def card_of(text: str) -> Gpu:
    """The card a row names. A data-centre card is the one on a board of eight unless the row says PCIe or NVL."""
    name = re.sub(r"\(.*\)|HBM\w*|NVIDIA", "", text).replace("_", " ").strip()
    family = re.search(r"\b([PVAH][12]00)\b", name, re.IGNORECASE)
    if family is not None and not re.search(r"pcie|nvl", name, re.IGNORECASE):
        stated = re.search(r"(\d+)\s*gi?b?\b", name, re.IGNORECASE)
        boards = [card for card in catalog.cards() if family[1].upper() in card.name and "SXM" in card.name]
        if boards:
            memory_bytes = int(stated[1]) * GIB if stated else 0
            return min(boards, key=lambda card: abs(card.memory_bytes - memory_bytes))
    try:
        return catalog.find(name)
    except HardwareError as error:
        raise NotACase(f"no card '{text}' in the catalog") from error


def _length(row: Row, batch: int) -> int:
    text = row["seq_len"].strip()
    if text == "512" and "DeepLearningExamples BERT" in row["source"] and "pretrain" in row["task"]:
        return BINNED_LENGTH
    if stated := re.match(r"^([\d,]+)(k?)(?:\s*tokens?)?(?:\s*\(?(?:packed|fixed|constant)\b.*)?$", text.lower()):
        return int(stated[1].replace(",", "")) * (1024 if stated[2] else 1)
    if "15026" in row["source"]:
        return _longest_of(batch, median=30, spread=0.55, limit=512)
    if "MetaMathQA" in row["source"]:
        return 210  # the source's result files: 4,197,579 tokens in 20,000 samples ("train total tokens"), bucketed by length
    if match := re.match(r"^(\d+) max \(packed", text):
        if row["notes"].startswith("Baseline"):
            raise NotACase("unpacked samples of unknown length")
        return int(match[1])
    raise NotACase(f"length '{text}' is not stated")


def _longest_of(count: int, *, median: float, spread: float, limit: int) -> int:
    """The expected longest of `count` sentences with log-normal lengths; the median of 30 tokens is an assumption."""
    quantile = 0.5 if count == 1 else 1 - 0.56 / count
    z = math.sqrt(2) * float(torch.erfinv(torch.tensor(2 * quantile - 1, dtype=torch.float64)))
    return min(limit, round(median * math.exp(spread * z)))


def _precision(text: str, notes: str) -> tuple[str, torch.dtype]:
    """(autocast, dtype of the weights the kernels see)."""
    plain = text.lower().replace("bfloat16", "bf16").replace("float16", "fp16").replace("float32", "fp32")
    if "fp8" in plain or "float8" in plain + notes.lower():
        raise NotACase("float8 is not modelled")
    stored = any(word in plain for word in ("pure", "true", "weights"))
    if "bf16" in plain and (stored or plain in ("bf16", "amp_bf16") or "fsdp" in plain):
        return "fp32", torch.bfloat16  # sharded mixed precision gathers the weights in bfloat16
    if "fp16" in plain and stored:
        return "fp32", torch.float16
    if not plain or "bf16" in plain:
        return "bf16", torch.float32
    for name, words in (("fp16", ("fp16", "amp", "mixed")), ("tf32", ("tf32",)), ("fp32", ("fp32", "32"))):
        if any(word in plain for word in words):
            return name, torch.float32
    raise NotACase(f"precision '{text}' is not known")


def _checkpointing(text: str) -> Checkpointing:
    return Checkpointing(every_n_layers={"true": 1, "selective": 2}.get(text.lower(), 0))


def _optimizer(text: str) -> str:
    plain = text.lower()
    if "8-bit" in plain or "8bit" in plain or "paged" in plain:
        raise NotACase("8-bit optimizers are not modelled")
    if "adafactor" in plain:
        return "adafactor"
    if "fused" in plain or "lamb" in plain:
        return "adamw_torch_fused"
    return "adamw_torch"


def torch_of(text: str) -> tuple[int, int]:
    """The torch of a row, the older where it names two; NVIDIA's containers by their date, what is not said is taken for one of today."""
    if stated := re.search(r"(?:^|torch |~)(\d)\.(\d+)", text):
        return int(stated[1]), int(stated[2])
    year = re.search(r"(?:NGC|20)\D*(\d\d)\b", text)
    return (1, 10) if year and int(year[1]) <= 22 else (2, 6)


def _compiled(row: Row) -> bool:
    """torchtune's rows are cumulative: from '+Compile' on all are compiled."""
    if "torchtune" in row["source"]:
        return not row["notes"].startswith(("Baseline", "+Packed"))
    return "torch.compile" in row["notes"]


def _before_multi_tensor(row: Row) -> bool:
    return row["source"].startswith("transformers") and "fused" not in row["optimizer"]
