"""Precision by capability: what is tried on which card, for which model."""

from __future__ import annotations

import pytest

from hfopt.errors import ConfigError
from hfopt.planner.search import NumericFacts, precisions
from hfopt.schema import Gpu, Precision

BERT = NumericFacts(family="BertForSequenceClassification")
T5 = NumericFacts(family="T5ForConditionalGeneration")
LLAMA = NumericFacts(family="LlamaForCausalLM", trained_in="bfloat16")


def card(major: int, minor: int = 0) -> Gpu:
    return Gpu(name=f"card {major}.{minor}", memory_bytes=8 << 30, capability=(major, minor))


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [(card(6, 1), {"fp32"}), (card(7, 0), {"fp32", "fp16"}), (card(7, 5), {"fp32", "fp16"}), (card(8, 6), {"fp32", "tf32", "bf16"})],
)
def test_capability_rules(gpu: Gpu, expected: set[str]) -> None:
    assert set(precisions(gpu, "fp32", BERT).allowed) == expected


def test_every_precision_is_either_tried_or_explained() -> None:
    for gpu in (card(6), card(7, 5), card(8), card(9)):
        found = precisions(gpu, "fp32", BERT)
        assert set(found.allowed) | {p for p, _ in found.ruled_out} == {"fp32", "tf32", "fp16", "bf16"}


@pytest.mark.parametrize("current", ["fp32", "fp16", "bf16", "tf32"])
@pytest.mark.parametrize("facts", [BERT, T5])
@pytest.mark.parametrize("gpu", [card(6), card(7, 5), card(8), Gpu(name="unheard of", memory_bytes=8 << 30)])
def test_none_is_both_tried_and_ruled_out_nor_ruled_out_twice(gpu: Gpu, facts: NumericFacts, current: Precision) -> None:
    found = precisions(gpu, current, facts)
    named = [*found.allowed, *(precision for precision, _ in found.ruled_out)]
    assert sorted(named) == ["bf16", "fp16", "fp32", "tf32"]


def test_the_capability_that_is_missing_is_told() -> None:
    assert dict(precisions(card(7, 5), "fp32", BERT).ruled_out)["bf16"] == "needs compute capability 8.0, card 7.5 has 7.5"
    unknown = Gpu(name="unheard of", memory_bytes=8 << 30)
    assert dict(precisions(unknown, "fp32", BERT).ruled_out)["bf16"] == "needs compute capability 8.0, unheard of has unknown"


def test_t5_never_goes_to_fp16() -> None:
    assert "fp16" not in precisions(card(7, 5), "fp32", T5).allowed
    assert "fp16" not in precisions(card(8), "fp16", T5).allowed  # bf16 is there instead


def test_fp16_for_a_model_trained_in_bf16_comes_with_a_warning() -> None:
    assert precisions(card(7, 5), "fp32", LLAMA).warnings
    assert not precisions(card(7, 5), "fp32", BERT).warnings


@pytest.mark.parametrize(
    ("gpu", "stored", "instead"),
    [(card(8), "bfloat16", "bf16"), (None, "bfloat16", "bf16"), (card(7, 5), "bfloat16", "fp32")],
)
def test_fp16_on_half_precision_gradients_is_a_fault_of_the_config(gpu: Gpu | None, stored: str, instead: Precision) -> None:
    facts = NumericFacts(family="LlamaForCausalLM", weights_dtype=stored, gradients_in=stored)
    found = precisions(gpu, "fp16", facts)
    assert found.allowed == (instead,) and found.fault is not None and f"weights stored in {stored}" in found.fault
    assert sorted([*found.allowed, *(precision for precision, _ in found.ruled_out)]) == ["bf16", "fp16", "fp32", "tf32"]
    with pytest.raises(ConfigError, match="is to be kept"):
        precisions(gpu, "fp16", facts, keep=True)


def test_fp16_on_float16_gradients_is_refused() -> None:
    """Without loss scaling small float16 gradients vanish: there is no other precision to train such weights in."""
    with pytest.raises(ConfigError, match="weights stored in float16") as refused:
        precisions(card(8), "fp16", NumericFacts(family="OPTForCausalLM", weights_dtype="float16", gradients_in="float16"))
    assert refused.value.hint is not None and "float32" in refused.value.hint


def test_fp16_with_float32_adapters_on_half_precision_weights_is_none() -> None:
    adapted = NumericFacts(family="LlamaForCausalLM", weights_dtype="bfloat16", gradients_in=None)
    found = precisions(card(8), "fp16", adapted)
    assert found.allowed == ("fp16",) and found.fault is None


def test_fp16_stays_where_the_user_has_it() -> None:
    assert precisions(card(8), "fp16", BERT).allowed[0] == "fp16"
    kept = precisions(card(7, 5), "fp16", BERT, keep=True)
    assert (kept.allowed, kept.warnings) == (("fp16",), ())
    assert precisions(card(7, 5), "fp16", T5, keep=True).warnings and not precisions(card(7, 5), "fp32", T5, keep=True).warnings


def test_bf16_on_a_card_without_it_is_left() -> None:
    assert "bf16" not in precisions(card(7, 5), "bf16", BERT).allowed


def test_half_precision_weights_are_left_alone() -> None:
    found = precisions(card(8), "fp32", NumericFacts(family="LlamaForCausalLM", weights_dtype="bfloat16"))
    assert found.allowed == ("fp32",) and dict(found.ruled_out).keys() == {"fp16", "bf16", "tf32"}


def test_the_cpu_keeps_what_the_user_has_but_never_fp16() -> None:
    assert precisions(None, "bf16", BERT).allowed == ("bf16",)
    found = precisions(None, "fp16", BERT)
    assert found.allowed == ("fp32",) and "no fp16 arithmetic" in dict(found.ruled_out)["fp16"] and found.fault is None
    kept = precisions(None, "fp16", BERT, keep=True)
    assert kept.allowed == ("fp16",) and "no fp16 arithmetic" in kept.warnings[0]
