"""What a workload rests on: every guess marked, with the flag or key that settles it; what the config says is no guess."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hfopt.model.from_config import from_spec
from hfopt.schema import Assumption, DataSpec, Lora, ModelSpec, Workload

Tiny = Callable[..., str]


def assumed(workload: Workload) -> dict[str, Assumption]:
    return {item.what: item for item in workload.assumed}


def test_what_nobody_said_is_a_guess_with_what_settles_it(tiny: Tiny) -> None:
    found = assumed(from_spec(ModelSpec(name=tiny("bert", architectures=["BertForMaskedLM"])), DataSpec()))
    guesses = {what: item.settle for what, item in found.items() if item.guessed}
    assert found["head"].value == "BertForMaskedLM"
    assert guesses == {"head": "--task", "length": "--seq-len", "weights": "dtype", "attention": "attn_implementation"}


def test_what_was_said_is_no_guess(tiny: Tiny) -> None:
    spec = ModelSpec(
        name=tiny("bert"),
        task="sequence_classification",
        num_labels=5,
        weights_dtype="bfloat16",
        attn_implementation="eager",
        lora=Lora(r=4, target_modules=("query",)),
    )
    workload = from_spec(spec, DataSpec(max_length=16, packing=False))
    assert [item for item in workload.assumed if item.guessed] == []
    said = {what: item.value for what, item in assumed(workload).items()}
    assert said == {
        "head": "BertForSequenceClassification",
        "labels": "5",
        "length": "16 tokens",
        "weights": "bfloat16",
        "attention": "eager",
        "adapter": "LoRA r=4",
    }


@pytest.mark.parametrize("named", [["BertForMaskedLM"], ["BertModel"], None])
def test_a_number_of_labels_asks_for_a_classifier(tiny: Tiny, named: list[str] | None) -> None:
    options: dict[str, Any] = {} if named is None else {"architectures": named}
    workload = from_spec(ModelSpec(name=tiny("bert", **options), num_labels=7), DataSpec())
    assert workload.model_class == "BertForSequenceClassification"
    assert (assumed(workload)["head"].guessed, assumed(workload)["labels"]) == (
        True,
        Assumption(what="labels", value="7", settle="num_labels"),
    )


def test_labels_nobody_counted_are_a_guess(tiny: Tiny) -> None:
    workload = from_spec(ModelSpec(name=tiny("bert"), task="token_classification"), DataSpec())
    assert assumed(workload)["labels"] == Assumption(what="labels", value="2", guessed=True, settle="num_labels")


def test_target_and_image_and_audio_sizes_are_told(tiny: Tiny) -> None:
    translated = assumed(from_spec(ModelSpec(name=tiny("t5"), task="seq2seq_lm"), DataSpec(max_length=32)))
    assert not translated["length"].guessed and translated["target length"].guessed
    seen = assumed(from_spec(ModelSpec(name=tiny("vit"), task="image_classification"), DataSpec()))
    assert not seen["image"].guessed and "pixels" in str(seen["image"].value)


@pytest.mark.parametrize(
    ("trainer", "spec", "said"),
    [
        ("DPO", {}, "a frozen copy in float32"),
        ("DPO", {"lora": Lora(r=4, alpha=8.0)}, "the model without its adapter"),
        ("DPO", {"reference": False}, "none"),
        ("GRPO", {"reference": False}, "none"),
        ("GRPO", {"reference": True, "weights_dtype": "bfloat16"}, "a frozen copy in bfloat16"),
        ("SFT", {}, None),
    ],
)
def test_a_reference_is_said(tiny: Tiny, trainer: str, spec: dict[str, Any], said: str | None) -> None:
    workload = from_spec(ModelSpec(name=tiny("llama"), **spec), DataSpec(max_length=32), trainer=trainer)
    found = assumed(workload).get("reference model")
    assert (found.value if found is not None else None) == said


def test_a_model_that_is_known_by_its_name_alone_is_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    workload = from_spec(ModelSpec(name="somebody/SmolLM2-135M-AWQ", weights_dtype="bfloat16"), DataSpec(max_length=32))
    taken = "that of HuggingFaceTB/SmolLM2-135M, by its name, in 16 bits, as AWQ is not modelled"
    assert workload.assumed[0] == Assumption(what="architecture", value=taken, guessed=True, settle="--like")
    assert any("AWQ packs its weights is not modelled" in note for note in workload.notes)
