"""The bundled architectures build to the parameter counts their sources publish."""

from __future__ import annotations

import pytest

from hfopt.model.builder import skeleton
from hfopt.model.from_config import from_spec
from hfopt.model.sources import Architecture, architectures, find, near_names
from hfopt.schema import DataSpec, ModelSpec


def _count(entry: Architecture) -> int:
    """Parameters of the class the config names (or its base model), built without weights by transformers alone."""
    import transformers

    config = transformers.CONFIG_MAPPING[entry.config["model_type"]].from_dict(dict(entry.config))
    named = entry.config.get("architectures", [None])[0]
    if named and entry.counts == "head":
        model = skeleton(lambda: getattr(transformers, named)(config))
    else:
        model = skeleton(lambda: transformers.AutoModel.from_config(config))
    count = sum(parameter.numel() for parameter in model.parameters())
    if entry.config.get("tie_word_embeddings") is False and model.get_output_embeddings() is not None:
        shared, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        count += outputs.numel() if shared is outputs else 0
    return count


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("entry", [entry for entry in architectures() if not entry.same_as], ids=lambda entry: entry.hub_id)
def test_the_count_is_the_published_one(entry: Architecture) -> None:
    assert _count(entry) == (pytest.approx(entry.parameters, rel=0.05) if entry.rounded else entry.parameters)


ONE_OF_EACH_TYPE = {entry.config["model_type"]: entry for entry in architectures()}


@pytest.mark.slow
@pytest.mark.parametrize("entry", ONE_OF_EACH_TYPE.values(), ids=ONE_OF_EACH_TYPE.keys())
def test_an_entry_of_each_type_becomes_a_workload(entry: Architecture) -> None:
    workload = from_spec(ModelSpec(name=entry.hub_id), DataSpec())
    assert workload.parameters == pytest.approx(entry.parameters, rel=0.06)
    assert set(workload.make_batch(1)) and workload.name == entry.hub_id


def test_the_table_is_large_sourced_and_without_doubles() -> None:
    ids = [entry.hub_id.lower() for entry in architectures()]
    assert len(ids) >= 80 and len(set(ids)) == len(ids)
    assert all(entry.source and entry.parameters > 1_000_000 for entry in architectures())


def test_a_model_made_from_another_has_its_architecture() -> None:
    tuned, base = find("Qwen/Qwen2.5-7B-Instruct"), find("Qwen/Qwen2.5-7B")
    assert tuned is not None and base is not None and tuned.same_as == base.hub_id
    assert tuned.config == {**base.config, "max_position_embeddings": 32768} and tuned.parameters == base.parameters


def test_names_are_found_in_any_case_and_without_owner() -> None:
    entry = find("BERT-Base-Uncased")
    assert entry is not None and entry.hub_id == "google-bert/bert-base-uncased"
    assert find("meta-llama/llama-3.1-8b") is not None
    assert find("bert") is None


def test_a_slip_is_answered_with_near_names() -> None:
    assert "google-bert/bert-base-uncased" in near_names("bert-base-uncasd")
    assert near_names("zzzzzz/qqqqqq") == []
