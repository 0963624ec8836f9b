"""Which task a config trains, where it does not name one."""

from __future__ import annotations

import pytest

from hfopt.config.read_job import load_bytes
from hfopt.schema import ModelSpec

BERT, ARGUMENTS = "model_name_or_path: bert-base-uncased\n", "per_device_train_batch_size: 4\nnum_train_epochs: 1\n"


def model(text: str) -> ModelSpec:
    job = load_bytes(f"{text}\n{ARGUMENTS}".encode(), "c.yaml").job
    assert job is not None
    return job.model


@pytest.mark.parametrize(
    ("lines", "task", "labels"),
    [
        ("dataset_name: rajpurkar/squad", "question_answering", None),
        ("doc_stride: 128", "question_answering", None),
        ("dataset_name: conll2003", "token_classification", 9),
        ("label_all_tokens: true\nlabels: [O, B-PER, I-PER]", "token_classification", 3),
        ("dataset_name: fancyzhx/ag_news", "sequence_classification", 4),
        ("dataset: stanfordnlp/imdb", "sequence_classification", 2),
        ("mlm_probability: 0.15", "masked_lm", None),
        ("dataset_name: squad\ntask: text-classification", "sequence_classification", None),
        ("dataset_name: squad\nnum_labels: 3", None, 3),
        ("dataset_name: org/own", None, None),
        ("id2label: {0: a, 1: b, 2: c, 3: d}", None, 4),
    ],
)
def test_what_an_encoder_is_trained_for(lines: str, task: str | None, labels: int | None) -> None:
    found = model(BERT + lines)
    assert (found.task, found.num_labels) == (task, labels)


@pytest.mark.parametrize("lines", ["dataset_name: imdb", "labels: [yes, no]", "doc_stride: 8"])
def test_a_causal_model_is_not_made_a_classifier_by_its_data(lines: str) -> None:
    found = model(f"model_name_or_path: gpt2\n{lines}")
    assert (found.task, found.num_labels) == (None, None)


@pytest.mark.parametrize("lines", ["loss: MultipleNegativesRankingLoss", "loss: CosineSimilarityLoss", "batch_sampler: no_duplicates"])
def test_losses_of_sentence_transformers_compare_samples(lines: str) -> None:
    assert model(f"model_name: BAAI/bge-base-en-v1.5\n{lines}").task == "embedding"
