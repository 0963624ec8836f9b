"""A workload from a config alone: right class, counts, batches; builds fake, on meta and for real; wrong input is said clearly."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hfopt.compat.versions import is_at_least
from hfopt.errors import TraceError, WorkloadError
from hfopt.memory.step_memory import estimate
from hfopt.model.builder import DTYPE_OPTION, skeleton
from hfopt.model.from_config import _targets, _with_targets, from_spec
from hfopt.model.sources import find_config
from hfopt.schema import DataSpec, Lora, ModelSpec, StepSettings, Task

Tiny = Callable[..., str]

HEADS: list[tuple[str, Task, DataSpec]] = [
    ("bert", "masked_lm", DataSpec(max_length=16)),
    ("bert", "sequence_classification", DataSpec(max_length=16)),
    ("bert", "token_classification", DataSpec(max_length=16)),
    ("bert", "question_answering", DataSpec(max_length=16)),
    ("bert", "embedding", DataSpec(max_length=16)),
    ("roberta", "sequence_classification", DataSpec(max_length=16)),
    ("gpt2", "causal_lm", DataSpec(max_length=16)),
    ("gpt2", "sequence_classification", DataSpec(max_length=16)),
    ("llama", "causal_lm", DataSpec(max_length=16)),
    ("t5", "seq2seq_lm", DataSpec(max_length=16, max_target_length=8)),
    ("vit", "image_classification", DataSpec()),
    ("convnext", "image_classification", DataSpec(image_size=32)),
    ("segformer", "semantic_segmentation", DataSpec(image_size=64)),
    ("wav2vec2", "ctc", DataSpec(audio_seconds=0.1, max_target_length=5)),
    ("wav2vec2", "audio_classification", DataSpec(audio_seconds=0.1)),
    ("whisper", "speech_seq2seq", DataSpec(max_target_length=8)),
    ("clip", "image_text", DataSpec()),
    ("git", "image_text", DataSpec(max_length=8)),
    ("vision-encoder-decoder", "image_text", DataSpec(max_length=8)),
    ("speech_to_text", "speech_seq2seq", DataSpec(audio_seconds=0.5, max_target_length=5)),
    ("wav2vec2-bert", "ctc", DataSpec(audio_seconds=0.5, max_target_length=5)),
]


def _loss(workload: Any, samples: int) -> torch.Tensor:
    model, batch = workload.build_model(), workload.make_batch(samples)
    loss = workload.compute_loss(model, batch) if workload.compute_loss else model(**batch).loss
    return loss


@pytest.mark.parametrize(("model_type", "task", "data"), HEADS, ids=[f"{kind}-{task}" for kind, task, _ in HEADS])
def test_every_head_trains_for_real(tiny: Tiny, model_type: str, task: Task, data: DataSpec) -> None:
    workload = from_spec(ModelSpec(name=tiny(model_type), task=task), data)
    loss = _loss(workload, 2)
    loss.backward()
    assert loss.ndim == 0 and torch.isfinite(loss)
    assert workload.task == task and 0.9 * workload.parameters < workload.trainable_parameters <= workload.parameters


FAKEABLE = [head for head in HEADS if not head[0].startswith("wav2vec2")]  # its shapes depend on mask values, which only the tracer keeps


@pytest.mark.parametrize(("model_type", "task", "data"), FAKEABLE, ids=[f"{kind}-{task}" for kind, task, _ in FAKEABLE])
def test_every_head_trains_on_fake_tensors(tiny: Tiny, faked: Any, model_type: str, task: Task, data: DataSpec) -> None:
    workload = from_spec(ModelSpec(name=tiny(model_type), task=task), data)
    with faked():
        loss = _loss(workload, 3)
        loss.backward()
    assert type(loss).__name__ == "FakeTensor"


@pytest.mark.parametrize("model_type", ["bert", "llama", "t5", "convnext", "whisper"])
def test_the_same_model_is_built_everywhere(tiny: Tiny, faked: Any, model_type: str) -> None:
    workload = from_spec(ModelSpec(name=tiny(model_type)), DataSpec())
    real = workload.build_model()
    with torch.device("meta"):
        meta = workload.build_model()
    with faked():
        fake = workload.build_model()

    def outline(model: Any) -> dict[str, Any]:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: (tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors.items()}

    assert outline(real) == outline(meta) == outline(fake)
    assert all(tensor.device.type == "meta" for tensor in (*meta.parameters(), *meta.buffers()))
    assert real.training and meta.training and fake.training
    assert sum(p.numel() for p in real.parameters()) == workload.parameters


def test_tied_weights_stay_tied_when_faked(tiny: Tiny, faked: Any) -> None:
    workload = from_spec(ModelSpec(name=tiny("gpt2")), DataSpec())
    with faked():
        model = workload.build_model()
    assert model.lm_head.weight is model.transformer.wte.weight


def test_architectures_names_the_head(tiny: Tiny) -> None:
    workload = from_spec(ModelSpec(name=tiny("bert", architectures=["BertForTokenClassification"])), DataSpec())
    assert (workload.model_class, workload.task) == ("BertForTokenClassification", "token_classification")


def test_the_asked_task_wins_over_architectures(tiny: Tiny) -> None:
    folder = tiny("bert", architectures=["BertForMaskedLM"])
    assert from_spec(ModelSpec(name=folder, task="question_answering"), DataSpec()).model_class == "BertForQuestionAnswering"


def test_a_path_to_the_file_is_as_good_as_the_folder(tiny: Tiny) -> None:
    folder = tiny("gpt2")
    assert (
        from_spec(ModelSpec(name=f"{folder}/config.json"), DataSpec()).parameters
        == from_spec(ModelSpec(name=folder), DataSpec()).parameters
    )


def test_a_base_class_gets_the_usual_head_and_says_so(tiny: Tiny) -> None:
    workload = from_spec(ModelSpec(name=tiny("vit", architectures=["ViTModel"])), DataSpec())
    assert workload.task == "image_classification" and workload.assumed[0].guessed


def test_dtype_and_labels_and_overrides(tiny: Tiny) -> None:
    workload = from_spec(
        ModelSpec(
            name=tiny("llama"), task="sequence_classification", weights_dtype="bfloat16", num_labels=7, overrides={"num_hidden_layers": 5}
        ),
        DataSpec(max_length=8),
    )
    model = workload.build_model()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.score.out_features == 7 and workload.layers == 5


@pytest.mark.parametrize(
    ("stated", "scaled", "stored"),
    [
        (None, True, "float32"),
        (None, False, "float16"),
        ("float16", True, "float16"),
        ("auto", True, "float16"),
        ("bfloat16", True, "bfloat16"),
    ],
)
def test_a_float16_checkpoint_that_fp16_could_not_train_is_taken_to_be_float32(
    tiny: Tiny, stated: str | None, scaled: bool, stored: str
) -> None:
    """DeBERTa-v3, OPT, Pythia, Whisper-large: GradScaler refuses float16 gradients at the first step, so a run does not."""
    name = tiny("llama", **{DTYPE_OPTION: "float16"})
    workload = from_spec(ModelSpec(name=name, weights_dtype=stated, scales_loss=scaled), DataSpec(max_length=8))
    assert workload.weights_dtype == (stored if stated or scaled or is_at_least("transformers", "5") else "float32")
    (said,) = (one for one in workload.assumed if one.what == "weights")
    assert said.guessed == (stated is None)
    assert ("not the checkpoint's float16" in str(said.value)) == (stated is None and scaled)


def test_fp16_on_weights_stored_in_float16_ends_in_a_sentence(tiny: Tiny) -> None:
    workload = from_spec(ModelSpec(name=tiny("llama"), weights_dtype="float16"), DataSpec(max_length=8))
    with pytest.raises(TraceError, match="fp16: true cannot train weights stored in float16") as refused:
        estimate(workload, StepSettings(precision="fp16"))
    assert refused.value.hint == "load the model in float32 (dtype: float32)"


@pytest.mark.parametrize("name", ["flash_attention_2", "kernels-community/flash-attn", "flex_attention"])
def test_flash_attention_is_planned_without_its_package(tiny: Tiny, name: str) -> None:
    workload = from_spec(ModelSpec(name=tiny("llama"), attn_implementation=name), DataSpec(max_length=8))
    assert workload.build_model().config._attn_implementation == "sdpa"
    assert bool(workload.make_batch(2)["attention_mask"].all()), "flash packages cut the padding out"
    assert any(name in note for note in workload.notes)


@pytest.mark.parametrize("window", [None, 4])
def test_a_flash_package_is_traced_as_the_flash_kernel_whatever_its_window(tiny: Tiny, window: int | None) -> None:
    folder = tiny("llama", model_type="mistral", sliding_window=window)
    workload = from_spec(ModelSpec(name=folder, attn_implementation="flash_attention_2"), DataSpec(max_length=8))
    kernels = {op.name for op in estimate(workload, StepSettings(precision="bf16")).ops if op.kind == "attention"}
    assert kernels and all("flash" in kernel for kernel in kernels)


def test_a_model_of_the_files_own_sizes_is_new() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 99}
    made = from_spec(ModelSpec(name=None, overrides={"model_type": "llama", **sizes}), DataSpec(max_length=8))
    assert made.model_class == "LlamaForCausalLM" and made.parameters < 100_000 and made.weights_dtype == "float32"
    assert made.assumed[0].value == "a new llama with " + ", ".join(f"{key} {value}" for key, value in sizes.items())


def test_an_adapter_without_targets_where_peft_has_none(tiny: Tiny) -> None:
    """Qwen2.5-VL is one of them; which they are is peft's affair."""
    pytest.importorskip("peft")
    usual = SimpleNamespace(model_type="llama"), SimpleNamespace(model_type="of_no_table")
    known, unknown = (_with_targets(ModelSpec(name="x", lora=Lora()), config) for config in usual)
    assert known.lora == Lora() and unknown.lora == Lora(target_modules="all-linear")
    assert "all linear layers" in unknown.notes[0]
    (said,) = _targets(SimpleNamespace(spec=unknown))  # type: ignore[arg-type]
    assert (said.what, said.guessed) == ("adapted", True) and _targets(SimpleNamespace(spec=known)) == ()  # type: ignore[arg-type]


def test_attention_implementation_is_taken(tiny: Tiny) -> None:
    model = from_spec(ModelSpec(name=tiny("bert"), attn_implementation="eager"), DataSpec()).build_model()
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(("model_type", "length", "limit"), [("bert", 65, 64), ("roberta", 65, 64), ("gpt2", 100, 64)])
def test_a_text_longer_than_the_positions_is_refused(tiny: Tiny, model_type: str, length: int, limit: int) -> None:
    name = tiny(model_type)
    with pytest.raises(WorkloadError, match=f"{length} tokens is over the model's {limit} positions"):
        from_spec(ModelSpec(name=name), DataSpec(max_length=length))
    assert from_spec(ModelSpec(name=name), DataSpec(max_length=limit)).shape.length == limit


def test_t5_has_no_longest_text(tiny: Tiny) -> None:
    assert from_spec(ModelSpec(name=tiny("t5")), DataSpec(max_length=5000)).shape.length == 5000


def test_a_head_the_model_lacks_is_refused_with_those_it_has(tiny: Tiny) -> None:
    with pytest.raises(WorkloadError, match="gpt2 model has no head for image_classification") as caught:
        from_spec(ModelSpec(name=tiny("gpt2"), task="image_classification"), DataSpec())
    assert "causal_lm" in (caught.value.hint or "")


def test_an_empty_batch_is_refused(tiny: Tiny) -> None:
    workload = from_spec(ModelSpec(name=tiny("bert")), DataSpec())
    with pytest.raises(WorkloadError, match="batch of 0"):
        workload.make_batch(0)


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": "wide"},
        {"hidden_size": 33},
        {"hidden_size": -32},
        {"num_hidden_layers": None},
        {"vocab_size": 0, "pad_token_id": 7},
        {"model_type": 5},
        {"model_type": "no-such-type"},
        {"architectures": "BertModel", "hidden_act": "nonesuch"},
    ],
    ids=str,
)
def test_a_config_that_makes_no_sense_is_one_message(tiny: Tiny, fields: dict[str, Any]) -> None:
    folder = tiny("bert", **fields)
    with pytest.raises(WorkloadError) as caught:
        from_spec(ModelSpec(name=folder), DataSpec())
    assert folder in str(caught.value) and "\n" not in str(caught.value)


def test_no_model_at_all_is_said() -> None:
    with pytest.raises(WorkloadError, match="not stated"):
        from_spec(ModelSpec(name=None), DataSpec())


@pytest.mark.parametrize(
    ("kind", "data", "sizes"),
    [
        ("git", DataSpec(max_length=8), {"input_ids": (3, 8), "attention_mask": (3, 8), "pixel_values": (3, 3, 32, 32), "labels": (3, 8)}),
        ("vision-encoder-decoder", DataSpec(max_length=8), {"pixel_values": (3, 3, 32, 32), "labels": (3, 8)}),
        ("speech_to_text", DataSpec(audio_seconds=0.5), {"input_features": (3, 50, 16), "attention_mask": (3, 50), "labels": (3, 2)}),
        ("wav2vec2-bert", DataSpec(audio_seconds=0.5), {"input_features": (3, 25, 16), "attention_mask": (3, 25), "labels": (3, 8)}),
    ],
)
def test_batches_of_two_kinds_of_input(tiny: Tiny, kind: str, data: DataSpec, sizes: dict[str, tuple[int, ...]]) -> None:
    task = next(task for name, task, _ in HEADS if name == kind)
    batch = from_spec(ModelSpec(name=tiny(kind), task=task), data).make_batch(3)
    assert {name: tuple(value.shape) for name, value in batch.items()} == sizes


def test_several_labels_at_once_and_none_at_all(tiny: Tiny) -> None:
    name = tiny("bert", problem_type="multi_label_classification")
    labels = from_spec(ModelSpec(name=name, task="sequence_classification", num_labels=4), DataSpec(max_length=8)).make_batch(3)["labels"]
    assert labels.shape == (3, 4) and labels.is_floating_point()
    with pytest.raises(WorkloadError, match="num_labels is 0"):
        from_spec(ModelSpec(name=name, task="sequence_classification", num_labels=0), DataSpec())


@pytest.mark.parametrize(
    ("kind", "task", "data", "words"),
    [
        ("bert", "masked_lm", DataSpec(max_length=-3), "a text of -3 tokens cannot be made"),
        ("vit", "image_classification", DataSpec(image_size=-1), "an image of -1 pixels cannot be made"),
        ("wav2vec2", "ctc", DataSpec(audio_seconds=-1.0), "audio of -1 s cannot be made"),
        ("whisper", "speech_seq2seq", DataSpec(max_target_length=41), "41 tokens is over the model's 40 target positions"),
    ],
)
def test_sizes_no_batch_can_have_are_said(tiny: Tiny, kind: str, task: Task, data: DataSpec, words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        from_spec(ModelSpec(name=tiny(kind), task=task), data)


def test_a_weight_type_that_is_none_is_said(tiny: Tiny) -> None:
    with pytest.raises(WorkloadError, match="'int7' is not a dtype for weights"):
        from_spec(ModelSpec(name=tiny("bert"), weights_dtype="int7"), DataSpec())


def test_an_image_holds_a_patch(tiny: Tiny) -> None:
    with pytest.raises(WorkloadError, match=r"an image of 1 × 1 pixels holds no patch of \d+ × \d+"):
        from_spec(ModelSpec(name=tiny("vit")), DataSpec(image_size=1))


def test_computed_positions_go_on(tiny: Tiny) -> None:
    workload = from_spec(ModelSpec(name=tiny("llama")), DataSpec(max_length=4096))
    assert workload.shape.length == 4096
    assert any(one.value == "4096 tokens, over the model's 64 positions" for one in workload.assumed)


def test_a_decoder_reads_source_and_target_in_one_sequence(tiny: Tiny) -> None:
    data = DataSpec(max_length=24, max_target_length=16, target_follows=True)
    assert from_spec(ModelSpec(name=tiny("llama")), data).shape.length == 40
    assert from_spec(ModelSpec(name=tiny("llama")), replace(data, target_follows=False)).shape.length == 24
    shape = from_spec(ModelSpec(name=tiny("t5")), data).shape
    assert (shape.length, shape.target_length) == (24, 16)


def test_a_number_of_labels_makes_an_encoder_a_classifier() -> None:
    workload = from_spec(ModelSpec(name="google-bert/bert-base-uncased", num_labels=3), DataSpec())
    assert workload.model_class == "BertForSequenceClassification" and any("num_labels: 3" in note for note in workload.notes)
    named = from_spec(ModelSpec(name="google-bert/bert-base-uncased", num_labels=3, task="token_classification"), DataSpec())
    assert named.model_class == "BertForTokenClassification"


def test_the_last_layers_alone_train(tiny: Tiny) -> None:
    whole = from_spec(ModelSpec(name=tiny("llama")), DataSpec())
    some = from_spec(ModelSpec(name=tiny("llama"), last_layers=1), DataSpec())
    with torch.device("meta"):
        model = some.build_model()
    training = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert training and all(f".layers.{some.layers - 1}." in name for name in training) if some.layers else False
    assert 0 < some.trainable_parameters < whole.trainable_parameters and some.parameters == whole.parameters


def test_the_layers_that_train_may_be_wider_than_the_rest(tiny: Tiny) -> None:
    spec = ModelSpec(name=tiny("llama"), last_layers=1, weights_dtype="bfloat16", widens_trained=True)
    with torch.device("meta"):
        model = from_spec(spec, DataSpec()).build_model()
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_what_trains_is_among_the_assumptions(tiny: Tiny) -> None:
    first = from_spec(ModelSpec(name=tiny("llama"), last_layers=-1), DataSpec())
    assert any((one.what, one.value) == ("trained", "the first 1 layers alone") for one in first.assumed)
    rotated = from_spec(ModelSpec(name=tiny("llama"), lora=Lora(r=4), stands_for="OFT"), DataSpec())
    assert any((one.what, one.value) == ("adapter", "OFT (planned as LoRA r=4)") for one in rotated.assumed)


def test_a_model_is_planned_like_another_and_that_is_said() -> None:
    workload = from_spec(ModelSpec(name="acme/secret-135m", like="HuggingFaceTB/SmolLM2-135M"), DataSpec(max_length=64))
    assert workload.name == "acme/secret-135m" and workload.parameters == 134515008
    assert "acme/secret-135m is taken for HuggingFaceTB/SmolLM2-135M (--like): its config was not found" in workload.notes


class _Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(2**40))
        self.others = torch.nn.Parameter(torch.empty(2**20, 2**20))
        self.register_buffer("scale", torch.zeros(4))


def test_weights_beyond_any_memory_are_never_held() -> None:
    model = skeleton(_Experts)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"} and model.scale.device.type == "cpu"
    assert torch.zeros(4).device.type == "cpu"


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_flash_attention_of_a_model_without_sdpa_is_built(tmp_path: Path, kind: str) -> None:
    """Softcapping and sinks are in the flash kernels, not in PyTorch's: its own stands for them in a trace."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    more = {"head_dim": 16, "vocab_size": 100, "num_local_experts": 2, "num_experts_per_tok": 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **sizes, **more}))
    spec = ModelSpec(name=str(tmp_path), task="causal_lm", attn_implementation="flash_attention_2")
    workload = from_spec(spec, DataSpec(max_length=16))
    assert workload.parameters > 0
    with pytest.raises(WorkloadError, match="scaled_dot_product_attention"):  # as it was, afterwards
        from_spec(replace(spec, attn_implementation="sdpa"), DataSpec(max_length=16))


def test_building_leaves_the_bundled_table_as_it_is() -> None:
    """transformers completes `rope_scaling` in place: a second question about the same job would not find what the first one kept."""
    name = "meta-llama/Llama-3.1-8B"
    before = copy.deepcopy(dict(find_config(name).fields))
    from_spec(ModelSpec(name=name), DataSpec(max_length=16), layers=1)
    assert before["rope_scaling"] and dict(find_config(name).fields) == before
