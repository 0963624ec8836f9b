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
import transformers

from hfopt.errors import HardwareError
from hfopt.hardware import catalog
from hfopt.schema import Checkpointing, Gpu, Lora, StepSettings
from hfopt.workload.adapters import add_lora
from hfopt.workload.build import build_here

Row = dict[str, str]

MPT = {  # llm-foundry's yamls: width, layers, heads; vocabulary 50368, learned positions
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
LLAMA = {  # config.json of the published models: width, layers, heads, key-value heads, inner width, vocabulary, tied
    "3.2 1b": (2048, 16, 32, 8, 8192, 128256, True),
    "3.2 3b": (3072, 28, 24, 8, 8192, 128256, True),
    "3 8b": (4096, 32, 32, 8, 14336, 128256, False),
    "3.1 8b": (4096, 32, 32, 8, 14336, 128256, False),
    "2 7b": (4096, 32, 32, 32, 11008, 32000, False),
    "2 13b": (5120, 40, 40, 40, 13824, 32000, False),
}
DTYPE_OPTION = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
NODE_LINK_BYTES_PER_S = 25e9  # 1600 Gbit/s between nodes, shared by the 8 cards of a node, as the source's notes say


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
    batch: int
    accumulation: int
    samples_per_s: float  # measured, all devices together
    looped_optimizer: bool  # one kernel per parameter and operation, as before the multi-tensor optimizers
    compiled: bool
    length: int

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
            row["precision"],
            row["lora"],
            row["task"],
            self.sharded and self.world_size,
            self.looped_optimizer,
        )


class NotACase(Exception):  # noqa: N818 - it is an answer, not a failure
    """Why a row cannot be predicted."""


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
            if row["metric_kind"] in ("samples_per_s", "tokens_per_s"):
                yield {key: value or "" for key, value in row.items()}


def _case(row: Row) -> Case:
    gpu, world = _card(row["gpu"])
    if not row["per_device_batch"]:
        raise NotACase("no batch size")
    batch, accumulation = int(row["per_device_batch"]), int(row["grad_accum"] or 1)
    sharded = world > 1 and ("FULL_SHARD" in row["notes"] or "fsdp" in f"{row['precision']} {row['notes']} {row['task']}".lower())
    length = _length(row, batch)
    precision, weights = _precision(row["precision"], row["notes"])
    name, layers, build, make_batch = _model(row, length, weights)
    settings = StepSettings(
        precision=precision,  # type: ignore[arg-type]
        checkpointing=_checkpointing(row["grad_ckpt"]),
        accumulation=accumulation,
        optim=_optimizer(row["optimizer"]),
        label_smoothing=0.1 if "label_smoothing 0.1" in row["notes"] or "15026" in row["source"] else 0.0,
        attn_implementation="eager" if "eager" in row["attn"] else None,
        capability=gpu.capability or (8, 0),
    )
    value = float(row["value"])
    if row["metric_kind"] == "tokens_per_s":
        value /= length
    return Case(
        row=row,
        gpu=gpu,
        world_size=world,
        sharded=sharded,
        model=name,
        layers=layers,
        build=build,
        make_batch=make_batch,
        settings=settings,
        batch=batch,
        accumulation=accumulation,
        samples_per_s=value * (world if "/gpu" in row["unit"] else 1),
        looped_optimizer=_before_multi_tensor(row),
        compiled=_compiled(row),
        length=length,
    )


# ---------------------------------------------------------------------------------------------- one column each


def _card(text: str) -> tuple[Gpu, int]:
    match = re.match(r"^(?:(\d+)\s*x\s*)?(.*)$", text.strip())
    assert match is not None
    count, name = int(match[1] or 1), re.sub(r"\(.*\)|HBM\w*|NVIDIA", "", match[2]).replace("_", " ").strip()
    for guess in (
        name,
        name.replace("-", " "),
        f"{name.split()[0].split('-')[0]} SXM {' '.join(name.replace('-', ' ').split()[1:])}",
        f"{name.split()[0]} SXM",
    ):
        try:
            return catalog.find(_as_sxm(guess)), count
        except HardwareError:
            continue
    raise NotACase(f"no card '{text}' in the catalog")


def _as_sxm(name: str) -> str:
    """The data-centre form the sources' machines have: eight cards on a board are SXM."""
    plain = re.sub(r"[\s_-]+", " ", name.lower()).strip()
    return {
        "a100 80gb": "A100 SXM4 80GB",
        "a100 40gb": "A100 SXM4 40GB",
        "h100 80gb": "H100 SXM",
        "h100 96gb": "H100 SXM",
        "h100": "H100 SXM",
    }.get(plain, name)


def _length(row: Row, batch: int) -> int:
    text = row["seq_len"].strip()
    if text.isdigit():
        return int(text)
    if "15026" in row["source"]:
        return _longest_of(batch, median=30, spread=0.55, limit=512)
    if "MetaMathQA" in row["source"]:
        return 210  # an assumption: remembered as about 4.2 million tokens in 20,000 samples, bucketed by length; not looked up
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
    plain = text.lower()
    if "fp8" in plain or "float8" in notes.lower():
        raise NotACase("float8 is not modelled")
    if "pure" in plain or plain in ("bf16", "amp_bf16") or "fsdp" in plain:
        return "fp32", torch.bfloat16  # sharded mixed precision gathers the weights in bfloat16
    if not plain or plain.startswith("bf16"):
        return "bf16", torch.float32
    for name in ("fp16", "tf32", "fp32"):
        if plain.startswith(name):
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


def _compiled(row: Row) -> bool:
    """torchtune's rows are cumulative: from '+Compile' on all are compiled."""
    if "torchtune" in row["source"]:
        return not row["notes"].startswith(("Baseline", "+Packed"))
    return "torch.compile" in row["notes"]


def _before_multi_tensor(row: Row) -> bool:
    return row["source"].startswith("transformers") and "fused" not in row["optimizer"]


# ---------------------------------------------------------------------------------------------- models


def _model(row: Row, length: int, weights: torch.dtype) -> tuple[str, int, Callable[[int], Any], Callable[[int], dict[str, Any]]]:
    name = re.sub(r"\(.*\)", "", row["model"]).strip().lower()
    eager = "eager" if "eager" in row["attn"] else None
    if match := re.match(r"mpt-(\w+)", name):
        return (
            name,
            MPT[match[1]][1],
            _built(lambda depth: _mpt(match[1], depth, length), "CausalLM", weights, None),
            _tokens(length, mask=False),
        )
    if match := re.search(r"llama[ -]?(\d(?:\.\d)?)[ -]?(\d+b)", name):
        key = f"{match[1]} {match[2]}"
        if key not in LLAMA:
            raise NotACase(f"no architecture for '{row['model']}'")
        adapter = _lora(row)
        return f"llama {key}", LLAMA[key][1], _built(lambda depth: _llama(key, depth), "CausalLM", weights, None, adapter), _tokens(length)
    if "bert-large" in name or "bert-base" in name:
        size = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096} if "large" in name else {}
        kind = "PreTraining" if "MLM" in row["task"] else "QuestionAnswering" if "SQuAD" in row["task"] else "SequenceClassification"
        layers = 24 if "large" in name else 12
        build = _built(lambda depth: transformers.BertConfig(num_hidden_layers=depth, **size), kind, weights, eager)
        return name, layers, build, _bert_batch(kind, length)
    if match := re.search(r"t5-(small|base|large)", name):
        width, inner, heads, layers = {"small": (512, 2048, 8, 6), "base": (768, 3072, 12, 12), "large": (1024, 4096, 16, 24)}[match[1]]
        build = _built(
            lambda depth: transformers.T5Config(
                d_model=width,
                d_ff=inner,
                num_heads=heads,
                num_layers=depth,
                num_decoder_layers=depth,
                vocab_size=32128,
                decoder_start_token_id=0,
            ),
            "Seq2SeqLM",
            weights,
            eager,
        )
        return name, layers, build, _tokens(length, decoder=True)
    raise NotACase(f"no architecture for '{row['model']}'")


def _mpt(size: str, depth: int, length: int) -> Any:
    width, _, heads = MPT[size]
    return transformers.GPT2Config(
        n_embd=width,
        n_layer=depth,
        n_head=heads,
        n_positions=length,
        vocab_size=50368,
        activation_function="gelu",
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        use_cache=False,
    )


def _llama(key: str, depth: int) -> Any:
    width, _, heads, kv_heads, inner, vocabulary, tied = LLAMA[key]
    return transformers.LlamaConfig(
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128 if width != 2048 else 64,
        intermediate_size=inner,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=131072,
        use_cache=False,
    )


def _lora(row: Row) -> Lora | None:
    text = row["lora"]
    if text in ("", "full"):
        return None
    if text == "LoRA":  # torchtune's recipe: q, v and output projections, rank 8
        return Lora(r=8, target_modules=("q_proj", "v_proj", "o_proj"))
    match = re.match(r"LORA r=(\d+) targets=\[(.*?)\]", text)
    if match is None or any(word in row["notes"] for word in ("bdlora", "dora", "loftq", "eva", "pissa", "olora")):
        raise NotACase(f"adapter '{text.split()[0]}' is not modelled")
    return Lora(r=int(match[1]), target_modules=tuple(part.strip(" '\"") for part in match[2].split(",")))


def _built(
    config: Callable[[int], Any], kind: str, weights: torch.dtype, attention: str | None, adapter: Lora | None = None
) -> Callable[[int], Any]:
    def assemble(depth: int) -> Any:
        options: dict[str, Any] = {DTYPE_OPTION: weights}
        if attention is not None:
            options["attn_implementation"] = attention
        settings = config(depth)
        if kind == "PreTraining":
            model = transformers.BertForPreTraining._from_config(settings, **options)
        else:
            model = getattr(transformers, f"AutoModelFor{kind}").from_config(settings, **options)
        return model if adapter is None else add_lora(model, adapter, "causal_lm")

    def build(depth: int) -> Any:
        return build_here(lambda: assemble(depth)).train()

    return build


def _tokens(length: int, *, mask: bool = True, decoder: bool = False) -> Callable[[int], dict[str, Any]]:
    def make(batch: int) -> dict[str, Any]:
        ids = torch.ones(batch, length, dtype=torch.long)
        made = {"input_ids": ids, "labels": ids.clone()}
        if decoder:  # the collator makes them, since label smoothing takes the labels away
            made["decoder_input_ids"] = ids.clone()
        return {**made, "attention_mask": torch.ones_like(ids)} if mask else made

    return make


def _bert_batch(kind: str, length: int) -> Callable[[int], dict[str, Any]]:
    def make(batch: int) -> dict[str, Any]:
        ids = torch.ones(batch, length, dtype=torch.long)
        one = torch.zeros(batch, dtype=torch.long)
        if kind == "QuestionAnswering":
            return {"input_ids": ids, "start_positions": one, "end_positions": one.clone()}
        if kind == "PreTraining":
            return {"input_ids": ids, "labels": ids.clone(), "next_sentence_label": one}
        return {"input_ids": ids, "labels": one}

    return make
