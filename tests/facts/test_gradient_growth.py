"""Which heads ignore the number of items: read from the sources, compared with what real steps of the Trainer measured."""

from __future__ import annotations

import pytest

from hfopt.facts.gradient_growth import class_for, class_grows_with_accumulation, grows_with_accumulation, words


@pytest.mark.parametrize(
    ("model_type", "task", "class_name", "grows"),
    [  # what `hfopt.probe.neutrality` measured with transformers 5.22.2: gradients 4.00 times as large in 4 micro-batches, or the same
        ("bert", "sequence_classification", "BertForSequenceClassification", True),
        ("qwen2", "token_classification", "Qwen2ForTokenClassification", True),  # a generic head
        ("gpt2", "sequence_classification", "GPT2ForSequenceClassification", True),
        ("wav2vec2", "audio_classification", "Wav2Vec2ForSequenceClassification", True),
        ("wav2vec2", "ctc", "Wav2Vec2ForCTC", False),  # takes no **kwargs, so the Trainer divides
        ("vit", "image_classification", "ViTForImageClassification", False),
        ("modernbert", "masked_lm", "ModernBertForMaskedLM", False),
        ("llama", "causal_lm", "LlamaForCausalLM", False),
    ],
)
def test_the_rule_says_what_was_measured(model_type: str, task: str, class_name: str, grows: bool) -> None:
    assert class_for(model_type, task) == class_name
    assert grows_with_accumulation(model_type, class_name) is grows


def test_the_rule_follows_the_installed_trainer_for_a_loaded_class() -> None:
    import transformers

    assert class_grows_with_accumulation(transformers.BertForSequenceClassification) is True
    assert class_grows_with_accumulation(transformers.GPT2LMHeadModel) is False


def test_what_the_source_does_not_show_is_not_known() -> None:
    assert grows_with_accumulation("bert", "NoSuchHead") is None
    assert grows_with_accumulation("no_such_type", "BertForMaskedLM") is None
    assert class_grows_with_accumulation(int) is None
    assert class_for("bert", "question_answering") is None  # no labels, nothing is counted
    assert "4 times" in words("BertForMaskedLM", 4) and "47688" in words("BertForMaskedLM", 4)
