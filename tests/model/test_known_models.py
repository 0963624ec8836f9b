"""The bundled architectures build to the parameter counts their sources publish."""

from __future__ import annotations

import json
import zlib
from importlib.resources import files
from importlib.util import find_spec

import pytest

from hfopt.errors import WorkloadError
from hfopt.model.builder import skeleton
from hfopt.model.from_config import from_spec
from hfopt.model.known_models import Architecture, architectures, find, near_names
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


def _tier(entry: Architecture) -> object:
    """One of thirty-two, by its name, is built with every run; all with the slow tests."""
    quick = zlib.crc32(entry.hub_id.encode()) % 32 == 0
    return pytest.param(entry, id=entry.hub_id, marks=() if quick else pytest.mark.slow)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("entry", [_tier(entry) for entry in architectures() if not entry.same_as])
def test_the_count_is_the_published_one(entry: Architecture) -> None:
    assert _count(entry) == (pytest.approx(entry.parameters, rel=0.05) if entry.rounded else entry.parameters)


WITHOUT_A_USUAL_TASK = {"dinov3_vit", "videomae", "yolos"}  # a task has to be named, or there is none yet
ONE_OF_EACH_TYPE = {
    entry.config["model_type"]: entry
    for entry in sorted(architectures(), key=lambda entry: entry.parameters, reverse=True)
    if not entry.same_as and entry.config["model_type"] not in WITHOUT_A_USUAL_TASK
}


@pytest.mark.slow
@pytest.mark.parametrize("entry", ONE_OF_EACH_TYPE.values(), ids=ONE_OF_EACH_TYPE.keys())
def test_an_entry_of_each_type_becomes_a_workload(entry: Architecture) -> None:
    try:
        workload = from_spec(ModelSpec(name=entry.hub_id), DataSpec())
    except WorkloadError as error:  # some processors of images run only where torchvision is
        assert find_spec("torchvision") is None and "Torchvision" in str(error)
        return
    assert workload.parameters == pytest.approx(entry.parameters, rel=0.06)
    assert set(workload.make_batch(1)) and workload.name == entry.hub_id


def test_the_table_is_large_sourced_and_without_doubles() -> None:
    ids = [entry.hub_id.lower() for entry in architectures()]
    assert len(ids) >= 700 and len(set(ids)) == len(ids)
    assert all(entry.source and entry.parameters > 1_000_000 for entry in architectures())


def test_every_line_states_its_own_dtype_and_refers_to_a_whole_one() -> None:
    lines = files("hfopt.model").joinpath("architectures.jsonl").read_text(encoding="utf-8").splitlines()
    records = {record["id"]: record for record in map(json.loads, lines)}
    assert {record["config"]["torch_dtype"] for record in records.values()} == {"bfloat16", "float16", "float32"}
    assert all("config" in records[record["same_as"]] for record in records.values() if "same_as" in record)
    assert not any("same_as" in records[record["same_as"]] for record in records.values() if "same_as" in record)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("google/gemma-2-9b", "float32"),
        ("google/gemma-2-9b-it", "bfloat16"),
        ("allenai/OLMo-2-1124-7B", "float32"),
        ("allenai/OLMo-2-1124-7B-Instruct", "bfloat16"),
        ("meta-llama/Llama-2-7b-hf", "float16"),
        ("microsoft/deberta-v3-base", "float16"),
        ("thenlper/gte-base", "float16"),
        ("openai-community/gpt2", "float32"),
    ],
)
def test_the_dtype_is_the_checkpoints_own(name: str, dtype: str) -> None:
    entry = find(name)
    assert entry is not None and entry.config["torch_dtype"] == dtype


def test_a_model_made_from_another_has_its_architecture() -> None:
    tuned, base = find("Qwen/Qwen2.5-7B-Instruct"), find("Qwen/Qwen2.5-7B")
    assert tuned is not None and base is not None and tuned.same_as == base.hub_id
    assert tuned.config == {**base.config, "max_position_embeddings": 32768} and tuned.parameters == base.parameters


def test_names_are_found_in_any_case_and_without_owner() -> None:
    entry = find("BERT-Base-Uncased")
    assert entry is not None and entry.hub_id == "google-bert/bert-base-uncased"
    assert find("meta-llama/llama-3.1-8b") is not None
    mirrored = find("llama-2-7b-hf")
    assert mirrored is not None and mirrored.hub_id == "meta-llama/Llama-2-7b-hf"
    assert find("bert") is None


def test_a_slip_is_answered_with_near_names() -> None:
    assert "google-bert/bert-base-uncased" in near_names("bert-base-uncasd")
    assert near_names("zzzzzz/qqqqqq") == []
