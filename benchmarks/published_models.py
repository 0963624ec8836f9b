"""The models of published rows, each as a function of its depth: by the sources' own words, or any that the bundled table knows."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from hfopt.errors import WorkloadError
from hfopt.model.builder import add_lora, build_here
from hfopt.model.from_config import from_spec
from hfopt.model.known_models import Architecture, architectures
from hfopt.schema import DataSpec, Lora, ModelSpec, Task

Row = dict[str, str]
Batches = Callable[[int], dict[str, Any]]

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
DEPTH_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
TASKS: tuple[tuple[str, Task], ...] = (  # words of a row's task, the first that is in it counts
    ("squad|question", "question_answering"),
    ("token.?classif|ner\\b", "token_classification"),
    ("image|imagenet|vision", "image_classification"),
    ("classif|glue|mnli|sst|imdb", "sequence_classification"),
    ("mlm|masked", "masked_lm"),
    ("translat|summar|seq2seq", "seq2seq_lm"),
    ("causal|clm|pretrain|finetune|fine-tune|sft|lora", "causal_lm"),
)


class NotACase(Exception):  # noqa: N818 - it is an answer, not a failure
    """Why a row cannot be predicted."""


@dataclass(frozen=True, kw_only=True)
class Found:
    name: str  # the same word for the same architecture
    layers: int
    build: Callable[[int], Any]  # depth -> model
    make_batch: Batches


def model_of(row: Row, length: int, weights: torch.dtype) -> Found:
    name = re.sub(r"\(.*\)", "", row["model"]).strip().lower()
    eager = "eager" if "eager" in row["attn"] else None
    if match := re.match(r"mpt-(\w+)", name):
        if match[1] not in MPT:
            raise NotACase(f"no architecture for '{row['model']}'")
        build = _built(lambda depth: _mpt(match[1], depth, length), "CausalLM", weights, None)
        return Found(name=name, layers=MPT[match[1]][1], build=build, make_batch=_tokens(length, mask=False))
    if (match := re.search(r"llama[ -]?(\d(?:\.\d)?)[ -]?(\d+b)", name)) and (key := f"{match[1]} {match[2]}") in LLAMA:
        build = _built(lambda depth: _llama(key, depth), "CausalLM", weights, None, _lora(row))
        return Found(name=f"llama {key}", layers=LLAMA[key][1], build=build, make_batch=_tokens(length))
    if re.fullmatch(r"(?:[\w-]+/)?bert-(large|base)(?:-(?:un)?cased)?", name):
        return _bert(name, row, length, weights, eager)
    if (match := re.search(r"\bt5-(small|base|large)", name)) and "v1_1" not in name:
        return _t5(match[1], length, weights, eager)
    return _of_the_table(name, row, length, weights, eager)


def _bert(name: str, row: Row, length: int, weights: torch.dtype, eager: str | None) -> Found:
    large = "large" in name
    size = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096} if large else {}
    kind = "PreTraining" if "MLM" in row["task"] else "QuestionAnswering" if "SQuAD" in row["task"] else "SequenceClassification"
    build = _built(lambda depth: transformers.BertConfig(num_hidden_layers=depth, **size), kind, weights, eager)
    return Found(name=name, layers=24 if large else 12, build=build, make_batch=_bert_batch(kind, length))


def _t5(size: str, length: int, weights: torch.dtype, eager: str | None) -> Found:
    width, inner, heads, layers = {"small": (512, 2048, 8, 6), "base": (768, 3072, 12, 12), "large": (1024, 4096, 16, 24)}[size]

    def config(depth: int) -> Any:
        return transformers.T5Config(
            d_model=width,
            d_ff=inner,
            num_heads=heads,
            num_layers=depth,
            num_decoder_layers=depth,
            vocab_size=32128,
            decoder_start_token_id=0,
        )

    build = _built(config, "Seq2SeqLM", weights, eager)
    return Found(name=f"t5-{size}", layers=layers, build=build, make_batch=_tokens(length, decoder=True))


def _of_the_table(name: str, row: Row, length: int, weights: torch.dtype, eager: str | None) -> Found:
    """Any model that hfopt knows by name, with the head its task asks for."""
    entry = _entry(name)
    if entry is None:
        raise NotACase(f"no architecture for '{row['model']}'")
    task = next((task for words, task in TASKS if re.search(words, row["task"].lower())), None)
    depths = {key: value for key, value in entry.config.items() if key in DEPTH_KEYS and isinstance(value, int)}
    layers = max(depths.values(), default=0)

    def spec(depth: int | None) -> ModelSpec:
        overrides = {} if depth is None else dict.fromkeys(depths, depth)
        dtype = str(weights).removeprefix("torch.")
        return ModelSpec(name=entry.hub_id, task=task, weights_dtype=dtype, attn_implementation=eager, lora=_lora(row), overrides=overrides)

    try:
        whole = from_spec(spec(None), DataSpec(max_length=length))
        if len(set(depths.values())) == 1:
            from_spec(spec(2), DataSpec(max_length=length))
            return Found(
                name=entry.hub_id,
                layers=layers,
                build=lambda depth: from_spec(spec(depth), DataSpec(max_length=length)).build_model(),
                make_batch=whole.make_batch,
            )
    except WorkloadError as error:
        raise NotACase(f"'{row['model']}' cannot be built: {error}") from error
    return Found(name=entry.hub_id, layers=1, build=lambda _: whole.build_model(), make_batch=whole.make_batch)  # every depth is the whole


def _entry(name: str) -> Architecture | None:
    """By its letters and digits alone, with or without the owner; none where two models share them."""

    def bare(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower())

    wanted = {bare(name), bare(name.rpartition("/")[2])}
    found = [entry for entry in architectures() if bare(entry.hub_id) in wanted or bare(entry.hub_id.partition("/")[2]) in wanted]
    return found[0] if len({str(sorted(entry.config.items(), key=str)) for entry in found}) == 1 else None


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
