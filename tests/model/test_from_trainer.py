"""A workload from a live Trainer: same model, same loss, the longest samples, and the trainer as it was."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel, Trainer, TrainingArguments

from hfopt.errors import WorkloadError
from hfopt.model import from_trainer as trainer_module
from hfopt.model.from_trainer import from_trainer
from hfopt.model.samples import Samples, longest_samples, sample_size, shares

LENGTHS = [3, 9, 5, 21, 7, 4]
CONFIG = BertConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=50, max_position_embeddings=32
)


class Sentences(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        random.random()  # as augmentation does
        return {"input_ids": [1] * LENGTHS[index], "labels": index % 2, "unused": "text"}


def _pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    assert all("unused" not in sample for sample in samples)
    longest = max(len(sample["input_ids"]) for sample in samples)
    rows = [sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples]
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([sample["labels"] for sample in samples])}


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Trainer]:
    def make(trainer_class: type[Trainer] = Trainer, model: nn.Module | None = None, **options: Any) -> Trainer:
        arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, per_device_train_batch_size=2, max_steps=2)
        given = {"data_collator": _pad, "train_dataset": Sentences(), **options}
        return trainer_class(model=model or BertForSequenceClassification(CONFIG), args=arguments, **given)

    return make


def test_it_is_the_trainers_model_and_longest_sample(make_trainer: Any, faked: Any) -> None:
    trainer = make_trainer()
    workload = from_trainer(trainer)
    assert (workload.task, workload.model_class, workload.layers) == ("sequence_classification", "BertForSequenceClassification", 2)
    assert workload.parameters == sum(parameter.numel() for parameter in trainer.model.parameters())
    assert workload.shape.length == max(LENGTHS) and workload.shape.padded and workload.tokens_per_sample == max(LENGTHS)
    assert workload.make_batch(5)["input_ids"].shape == (5, max(LENGTHS))
    assert workload.compute_loss is None
    with faked():
        model = workload.build_model()
        loss = model(**workload.make_batch(3)).loss
        loss.backward()
    assert type(loss).__name__ == "FakeTensor" and model.training
    with torch.device("meta"):
        assert all(parameter.device.type == "meta" for parameter in workload.build_model().parameters())


def test_a_real_build_has_the_weights_and_shares_none(make_trainer: Any) -> None:
    trainer = make_trainer()
    twin = from_trainer(trainer).build_model()
    for ours, theirs in zip(twin.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(ours, theirs) and ours.data_ptr() != theirs.data_ptr()


def test_nothing_of_the_trainer_changes(make_trainer: Any, faked: Any) -> None:
    trainer = make_trainer()
    before = dict(vars(trainer))
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    workload = from_trainer(trainer)
    with faked():
        workload.build_model()
    workload.make_batch(4)
    assert (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    assert vars(trainer) == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in trainer.model.state_dict().items())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_training_afterwards_is_as_without_it(make_trainer: Any) -> None:
    def losses(look: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        trainer = make_trainer(model=BertForSequenceClassification(CONFIG))
        if look:
            from_trainer(trainer).make_batch(3)
        trainer.train()
        return [parameter.detach() for parameter in trainer.model.parameters()]

    for without, with_look in zip(losses(False), losses(True), strict=True):
        assert torch.equal(without, with_look)


class OwnLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        self.state.log_history.append({"seen": 1.0})
        labels = inputs.pop("labels")
        return 7 + nn.functional.cross_entropy(model(**inputs).logits, labels)


def test_its_own_loss_is_used_and_may_empty_the_batch(make_trainer: Any) -> None:
    trainer = make_trainer(OwnLoss)
    workload = from_trainer(trainer)
    assert workload.compute_loss is not None
    batch = workload.make_batch(2)
    assert workload.compute_loss(workload.build_model(), batch) > 7 and "labels" in batch
    assert trainer.state.log_history == []


def test_after_training_the_copy_is_free_of_accelerates_wrapping(make_trainer: Any) -> None:
    trainer = make_trainer()
    trainer.train()
    twin = from_trainer(trainer).build_model()
    assert "forward" not in vars(twin) and not getattr(twin, "is_gradient_checkpointing", False)


class Once(torch.utils.data.IterableDataset[dict[str, Any]]):
    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.read += 1
        yield Sentences()[0]


def test_a_stream_is_left_alone_and_that_is_said(make_trainer: Any) -> None:
    stream = Once()
    workload = from_trainer(make_trainer(train_dataset=stream))
    assert stream.read == 0 and workload.shape.length == CONFIG.max_position_embeddings
    assert any("left alone" in note for note in workload.notes)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layer(x), labels)}


def test_a_plain_module_is_a_custom_task(make_trainer: Any) -> None:
    data = [{"x": [0.0] * 4, "labels": 1} for _ in range(3)]
    workload = from_trainer(make_trainer(model=Plain(), train_dataset=data, data_collator=None))
    assert workload.task == "custom" and workload.parameters == 10
    assert workload.build_model()(**workload.make_batch(3))["loss"].ndim == 0


def test_a_plain_module_on_a_stream_is_refused(make_trainer: Any) -> None:
    with pytest.raises(WorkloadError, match="read once"):
        from_trainer(make_trainer(model=Plain(), train_dataset=Once()))


def test_arrow_columns_tell_lengths_without_their_transform() -> None:
    import datasets

    calls: list[int] = []

    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        calls.append(len(batch["input_ids"]))
        return batch

    table = datasets.Dataset.from_dict({"input_ids": [[1] * length for length in LENGTHS]})
    found = longest_samples(table.with_transform(transform))
    assert found is not None and len(found.longest["input_ids"]) == max(LENGTHS) and found.seen == len(LENGTHS)
    assert sum(calls) == 2, "only the two samples that are used"


def test_lengths_vary_where_the_collator_pads_to_the_longest(make_trainer: Any) -> None:
    found = from_trainer(make_trainer()).lengths
    assert found is not None
    assert (found.longest, found.lengths, found.grouped) == (max(LENGTHS), tuple(sorted(LENGTHS)), False)


def test_lengths_do_not_vary_where_it_pads_to_one_length(make_trainer: Any) -> None:
    def pad_to_32(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {**_pad(samples), "input_ids": torch.zeros(len(samples), 32, dtype=torch.long)}

    assert from_trainer(make_trainer(data_collator=pad_to_32)).lengths is None


def test_few_lengths_stand_for_many() -> None:
    found = shares(list(range(10_000)))
    assert len(found) == 64 and found == tuple(sorted(found))
    assert abs(sum(found) / len(found) - 5_000) < 100


def test_sizes_order_samples_of_all_kinds() -> None:
    assert sample_size({"input_ids": [1, 2, 3], "label": 1}) == 4
    assert sample_size(torch.zeros(2, 3)) == 6 and sample_size("abcd") == 4 and sample_size(numpy.zeros((2, 5))) == 10
    assert sample_size({"rows": [[1, 2], [3]]}) == 3 and longest_samples([]) is None and longest_samples(None) is None


@pytest.mark.skipif(
    not hasattr(PreTrainedModel, "set_attn_implementation"), reason="this transformers cannot change the attention of a model that is made"
)
def test_a_padding_free_batch_is_rows_without_a_mask(tmp_path: Path, faked: Any) -> None:
    from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 50}
    model = LlamaForCausalLM(LlamaConfig(**shape))
    model.config._attn_implementation = "flash_attention_2"  # as a machine with the package and a card has it
    data = [{"input_ids": [1] * length} for length in LENGTHS]
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=DataCollatorWithFlattening())
    workload = from_trainer(trainer)
    batch = workload.make_batch(3)
    assert batch["input_ids"].shape == batch["labels"].shape == (3, max(LENGTHS)) and "position_ids" not in batch
    with faked():
        workload.build_model()(**batch).loss.backward()
    assert model.config._attn_implementation == "flash_attention_2"
    assert any("flash" in note for note in workload.notes)


def test_a_model_in_parts_is_refused(make_trainer: Any) -> None:
    trainer = make_trainer()
    trainer.is_model_parallel = True
    with pytest.raises(WorkloadError, match="several devices"):
        from_trainer(trainer)
    trainer.is_model_parallel = False
    next(trainer.model.parameters()).ds_id = 1
    with pytest.raises(WorkloadError, match="shards"):
        from_trainer(trainer)


class _Packed(nn.Linear):
    """What bitsandbytes' 4-bit layer looks like from outside."""

    __module__ = "bitsandbytes.nn.modules"

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features)
        self.compute_dtype = torch.bfloat16
        self.weight = nn.Parameter(torch.zeros(plain.weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)
        self.weight.quant_state = SimpleNamespace(dtype=torch.float16, nested=True)


def test_packed_layers_are_stood_in_for_by_their_own_bytes(make_trainer: Any, faked: Any) -> None:
    model = BertForSequenceClassification(CONFIG)
    model.bert.requires_grad_(False)
    for layer in model.bert.encoder.layer:
        layer.attention.self.query = _Packed(layer.attention.self.query)
    trainer = make_trainer()
    trainer.model = model
    workload = from_trainer(trainer)
    with faked():
        built = workload.build_model()
        loss = built(**workload.make_batch(2)).loss
        loss.backward()
    packed = built.bert.encoder.layer[0].attention.self.query
    assert type(packed).__module__ == "hfopt.model.quantize"
    assert packed.weight.nbytes == 32 * 32 // 2 and packed.absmax.dtype == torch.uint8 and packed.compute_dtype == torch.bfloat16
    assert workload.parameters == sum(p.numel() for p in BertForSequenceClassification(CONFIG).parameters())
    assert isinstance(model.bert.encoder.layer[0].attention.self.query, _Packed), "the live model is as it was"
    model.bert.pooler.dense.weight.quant_state = object()
    with pytest.raises(WorkloadError, match="outside of layers that hfopt knows"):
        from_trainer(trainer)


class _OwnLoss(Trainer):
    factor = 2.0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        return self.factor * self.model(**inputs).loss


def test_a_loss_that_was_wrapped_on_the_live_trainer_asks_the_copy(make_trainer: Any, faked: Any) -> None:
    """As a rehearsal wraps it, to see its phases."""
    trainer = make_trainer(_OwnLoss)
    original = trainer.compute_loss

    @functools.wraps(original)
    def followed(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the live trainer was asked")

    trainer.compute_loss = followed
    workload = from_trainer(trainer)
    with faked():
        model = workload.build_model()
        assert workload.compute_loss is not None
        workload.compute_loss(model, workload.make_batch(2)).backward()
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def _image_shape(*extra: str) -> Any:
    return trainer_module._shape_of(
        {"pixel_values": torch.zeros(2, 3, 8, 16), **{name: torch.zeros(2, 5) for name in extra}}, nn.Linear(1, 1)
    )


def test_the_collators_batch_in_our_words() -> None:
    image = _image_shape()
    assert (image.kind, image.channels, image.height, image.width, image.length) == ("image", 3, 8, 16, None)
    both = _image_shape("input_ids")
    assert (both.kind, both.length) == ("image_text", 5)
    sound = trainer_module._shape_of({"input_values": torch.zeros(2, 160)}, nn.Linear(1, 1))
    assert (sound.kind, sound.audio_samples) == ("audio", 160)
    translates = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=True))
    pair = trainer_module._shape_of({"input_ids": torch.ones(2, 7), "labels": torch.ones(2, 4)}, translates)  # type: ignore[arg-type]
    assert (pair.kind, pair.length, pair.target_length, pair.padded) == ("text_to_text", 7, 4, False)
    assert trainer_module._shape_of({"x": torch.zeros(2, 160)}, nn.Linear(1, 1)).kind == "custom"


def test_no_model_no_samples_and_samples_the_collator_refuses_are_said(make_trainer: Any) -> None:
    trainer = make_trainer()
    with pytest.raises(WorkloadError, match="a batch of 0 samples"):
        from_trainer(trainer).make_batch(0)
    trainer.data_collator = lambda samples: {}["nothing"]
    with pytest.raises(WorkloadError, match="does not take its own samples"):
        from_trainer(trainer)
    trainer.model = None
    with pytest.raises(WorkloadError, match="the trainer has no model"):
        from_trainer(trainer)


def test_a_stream_of_equal_samples_is_looked_at_and_one_of_unequal_ones_is_not() -> None:
    from datasets import Dataset

    equal = Dataset.from_dict({"input_ids": [[1, 2, 3]] * 20}).to_iterable_dataset()
    found = longest_samples(equal)
    assert found is not None and found.of is None and found.longest == {"input_ids": [1, 2, 3]}
    assert trainer_module._seen(found) == f"the first {found.seen} samples of a stream, all of one length"
    assert longest_samples(Dataset.from_dict({"input_ids": [[1], [1, 2]] * 10}).to_iterable_dataset()) is None
    assert longest_samples(iter([])) is None and longest_samples([]) is None


@pytest.mark.parametrize("as_column", [True, False])
def test_padding_is_there_where_most_samples_were_cut_to_one_length(as_column: bool) -> None:
    from datasets import Dataset

    samples = [{"input_ids": [1] * length} for length in (9, 9, 4, 9, 7, 9, 9)]
    found = longest_samples(Dataset.from_list(samples) if as_column else samples)
    assert found is not None and found.shorter == {"input_ids": [1] * 7}
    alike = longest_samples(samples[:2])
    assert alike is not None and alike.shorter is None


@pytest.mark.parametrize(
    ("sample", "other"),
    [
        ({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [5, 6], "labels": [-100, 6]}),
        ({"prompt_ids": [1], "chosen_ids": [2, 3], "rejected_ids": [4, 5]}, {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [4]}),
        ({"input_ids": [5, 6, 7], "seq_lengths": [1, 2]}, {"input_ids": [9]}),
        ({"text": "a b c"}, {"input_ids": [9]}),
    ],
)
def test_a_batch_for_a_fused_head_lacks_one_token(sample: dict[str, Any], other: dict[str, Any]) -> None:
    found = Samples(longest=sample, shorter={"input_ids": [9]}, seen=2, of=2, filled=True)
    assert found.batch_of(3) == [sample, other, sample]


def test_lengths_come_from_a_column_of_lengths_too() -> None:
    from datasets import Dataset

    named = Dataset.from_dict({"length": [3, 9, 5], "text": ["abc", "a", "b"]})
    found = longest_samples(named)
    assert found is not None and found.longest["length"] == 9
