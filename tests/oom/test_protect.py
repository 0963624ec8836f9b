"""A run that runs out of memory ends where the undisturbed one does: weights, step, learning rate, sample order, logged loss, counters."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import BatchEncoding, Trainer, default_data_collator

import hfopt
from hfopt.launch.handoff import Handoff
from hfopt.monitor import history, log, run_text
from hfopt.oom.protect import guard_of, refusal


def supervised(trainer: Any, folder: Path) -> Handoff:
    """As `hfopt run` does when it trains."""
    handoff, guard = Handoff(path=folder / "handoff.json"), guard_of(trainer)
    assert guard is not None
    guard.supervised_by(handoff)
    return handoff


def disturbed(lab: Any, too_small: Any, layer_of: Any, at: dict[tuple[int, int], tuple[str, int]], **run: Any) -> tuple[Any, Any]:
    trainer = hfopt.protect(lab.trainer(**run))
    memory = too_small(at=at)
    memory.watch(trainer, layer_of(trainer.model))
    trainer.train()
    return trainer, memory


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1], ids=["plain", "smoothed"])
@pytest.mark.parametrize("accumulation", [1, 8])
@pytest.mark.parametrize("task", ["causal", "sequence", "token", "seq2seq", "image"])
def test_the_run_is_the_same(
    lab: Any, too_small: Any, layer_of: Any, task: str, accumulation: int, smoothing: float, dtype: torch.dtype
) -> None:
    run = {"task": task, "accumulation": accumulation, "batch": 6, "label_smoothing_factor": smoothing, "dtype": dtype, "max_steps": 2}
    undisturbed = lab.trainer(**run)
    undisturbed.train()
    last = accumulation - 1
    trainer, memory = disturbed(lab, too_small, layer_of, {(0, last // 2): ("backward", 4), (1, last): ("forward", 2)}, **run)
    assert [(step, phase) for step, _, phase, _ in memory.seen] == [(0, "backward"), (1, "forward"), (1, "forward")]
    lab.assert_same_run(trainer, undisturbed, 1e-6)


class MeanOverSamples(Trainer):
    """A custom loss: each sample's mean over its tokens, then the mean over samples; takes the labels out of its inputs."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        kept = labels.ne(-100)
        return ((losses * kept).sum(1) / kept.sum(1)).mean()


class CountsForItself(MeanOverSamples):
    """As TRL's trainers do: keeps its own counters in compute_loss."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.tokens_counted = 0
        self.metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list)}

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        kept = int(inputs["labels"].ne(-100).sum())
        self.tokens_counted += kept
        self.metrics["train"]["mean_label"].append(float(inputs["labels"].clamp(min=0).sum() / kept))
        return super().compute_loss(model, inputs, *args, **more)


class Contrastive(Trainer):
    """In-batch negatives: each sample's own row is its class."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        pooled = model(input_ids=inputs["input_ids"], output_hidden_states=True).hidden_states[-1].mean(1)
        return torch.nn.functional.cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))


def summed_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"].transpose(1, 2)
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


@pytest.mark.parametrize(
    "run",
    [
        {"task": "token", "kind": MeanOverSamples},
        {"task": "causal", "compute_loss_func": summed_loss},
        {"task": "token", "data_collator": lambda rows: BatchEncoding(default_data_collator(rows))},
        {"task": "causal", "optim": "sgd", "max_grad_norm": 0.0},
        {"task": "causal", "gradient_checkpointing": True},
        {"task": "causal", "batch": 7, "max_steps": 7},  # 96 samples: the epoch ends with a window of one micro-batch of 5
    ],
    ids=["custom_compute_loss", "compute_loss_func", "batch_encoding", "sgd_unclipped", "checkpointed", "uneven_epoch"],
)
def test_other_losses_and_inputs(lab: Any, too_small: Any, layer_of: Any, run: dict[str, Any]) -> None:
    undisturbed = lab.trainer(**run)
    undisturbed.train()
    last_step = undisturbed.state.global_step - 1
    trainer, memory = disturbed(lab, too_small, layer_of, {(0, 1): ("backward", 3), (last_step, 0): ("forward", 2)}, **run)
    assert len(memory.seen) >= 2
    lab.assert_same_run(trainer, undisturbed)


def test_a_subclass_that_counts_for_itself_counts_once(lab: Any, too_small: Any, layer_of: Any) -> None:
    undisturbed = lab.trainer("token", kind=CountsForItself)
    undisturbed.train()
    trainer, _ = disturbed(lab, too_small, layer_of, {(1, 1): ("backward", 2)}, task="token", kind=CountsForItself)
    assert trainer.tokens_counted == undisturbed.tokens_counted
    assert trainer.metrics["train"]["mean_label"] == pytest.approx(undisturbed.metrics["train"]["mean_label"])


def test_pieces_are_given_the_masks_of_the_whole(lab: Any, too_small: Any, layer_of: Any, capsys: Any) -> None:
    run = {"task": "sequence", "dropout": 0.1}
    undisturbed = lab.trainer(**run)
    undisturbed.train()
    trainer, _ = disturbed(lab, too_small, layer_of, {(1, 0): ("forward", 3), (2, 1): ("backward", 1)}, **run)
    lab.assert_same_run(trainer, undisturbed)
    assert "other masks" not in capsys.readouterr().err


def test_masks_that_cannot_be_given_are_said_once(lab: Any, too_small: Any, layer_of: Any, capsys: Any) -> None:
    def noise(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 1e-3 * torch.from_numpy(np.random.normal(size=output.shape)) if module.training else output

    trainer = hfopt.protect(lab.trainer("sequence", dropout=0.1))
    trainer.model.get_input_embeddings().register_forward_hook(noise)
    memory = too_small(at={(1, 0): ("forward", 4), (2, 0): ("forward", 4)})
    memory.watch(trainer, layer_of(trainer.model))
    trainer.train()
    assert capsys.readouterr().err.count("dropout draws other masks") == 1


@pytest.mark.parametrize("task", ["causal", "token"])
def test_any_schedule_of_failures(lab: Any, too_small: Any, layer_of: Any, task: str) -> None:
    run = {"task": task, "batch": 8, "accumulation": 3}
    undisturbed = lab.trainer(**run)
    undisturbed.train()
    places = st.tuples(st.integers(0, 3), st.integers(0, 2))
    shortages = st.tuples(st.sampled_from(["forward", "backward"]), st.integers(1, 7))

    @settings(max_examples=8, deadline=None, phases=(Phase.generate,), derandomize=True)
    @given(schedule=st.dictionaries(places, shortages, min_size=1, max_size=6))
    def holds(schedule: dict[Any, Any]) -> None:
        trainer, memory = disturbed(lab, too_small, layer_of, schedule, **run)
        assert memory.seen
        lab.assert_same_run(trainer, undisturbed)

    holds()


# ---------------------------------------------------------------------------------------------- what is refused


def test_a_contrastive_loss_is_refused_by_name_and_checkpointing_takes_over(lab: Any, too_small: Any, layer_of: Any, capsys: Any) -> None:
    undisturbed = lab.trainer("causal", kind=Contrastive)
    undisturbed.train()
    trainer = hfopt.protect(lab.trainer("causal", kind=Contrastive))
    memory = too_small(at={(1, 0): ("forward", 4)})
    memory.watch(trainer, layer_of(trainer.model))
    name = (
        "activation_checkpointing_enable" if hasattr(trainer.model, "activation_checkpointing_enable") else "gradient_checkpointing_enable"
    )
    fits_when_checkpointed = getattr(trainer.model, name)
    setattr(trainer.model, name, lambda **more: (memory.at.clear(), fits_when_checkpointed(**more)))
    trainer.train()
    assert refusal(trainer).name == "contrastive"
    assert "with gradient checkpointing, 8 at a time" in capsys.readouterr().err
    lab.assert_same_run(trainer, undisturbed)


def _batch_norm(trainer: Any) -> None:
    trainer.model.model.layers[0].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.BatchNorm1d(12).double())


def _step_in_backward(trainer: Any) -> None:
    next(trainer.model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)


def _packed(trainer: Any) -> None:
    plain = trainer.data_collator
    trainer.data_collator = lambda rows: plain(rows) | {"cu_seq_lens_q": torch.tensor([0, 12, 24])}


def _ragged(trainer: Any) -> None:
    plain = trainer.data_collator
    trainer.data_collator = lambda rows: plain(rows) | {"patches": torch.zeros(3, 4)}


def _writes_inputs(trainer: Any) -> None:
    def write(module: Any, args: Any, more: Any) -> None:
        more["labels"].clamp_(min=-100)

    trainer.model.register_forward_pre_hook(write, with_kwargs=True)


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (_batch_norm, "batch_norm"),
        (_step_in_backward, "step_in_backward"),
        (_packed, "packed"),
        (_ragged, "ragged"),
        (_writes_inputs, "inputs_written"),
    ],
)
def test_what_cannot_be_cut_is_named_and_the_users_error_comes_out(
    lab: Any, too_small: Any, layer_of: Any, spoil: Any, name: str, tmp_path: Any
) -> None:
    trainer = lab.trainer("causal")
    trainer.model.supports_gradient_checkpointing = False
    spoil(trainer)
    handoff = supervised(hfopt.protect(trainer), tmp_path)
    memory = too_small(at={(1, 1): ("forward", 4)})
    memory.watch(trainer, layer_of(trainer.model))
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        trainer.train()
    assert refusal(trainer).name == name
    assert len(memory.seen) == 1, "not tried again"
    assert handoff.failure is not None
    if refusal(trainer).batch_bound:
        assert handoff.failure.action == "give_up"
    else:
        assert handoff.failure.changes == {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}


# ---------------------------------------------------------------------------------------------- what is not ours to hold


@pytest.mark.parametrize(
    "error", [ValueError("a bug in the model"), RuntimeError("CUDA error: device-side assert triggered"), KeyboardInterrupt()]
)
def test_other_errors_come_out_unchanged_with_their_own_traceback(lab: Any, layer_of: Any, error: BaseException) -> None:
    trainer = hfopt.protect(lab.trainer("causal"))

    def the_users_own_line(*args: Any) -> None:
        raise error

    layer_of(trainer.model).register_forward_hook(the_users_own_line)
    with pytest.raises(type(error)) as caught:
        trainer.train()
    assert caught.value is error
    assert "the_users_own_line" in [entry.name for entry in caught.traceback]


def test_nothing_fits_ends_with_the_smallest_change(lab: Any, too_small: Any, layer_of: Any, capsys: Any) -> None:
    trainer = hfopt.protect(lab.trainer("causal"))
    memory = too_small(at={(1, 1): ("forward", 0)})
    memory.watch(trainer, layer_of(trainer.model))
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert [rows for *_, rows in memory.seen] == [
        8,
        2,
        2,
        4,
        2,
        1,
        1,
    ]  # the check of two samples twice, each size once, one sample with checkpointing
    said = capsys.readouterr().err
    assert "nothing is left to try" in said
    assert "shorter samples" in said


def test_an_oom_in_the_optimizer_is_never_retried(lab: Any, tmp_path: Any) -> None:
    trainer = hfopt.protect(lab.trainer("causal"))
    handoff = supervised(trainer, tmp_path)
    calls = []

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            calls.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    trainer.optimizer = Failing(trainer.model.parameters(), lr=0.1)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    failure = handoff.failure
    assert len(calls) == 1
    assert failure is not None and failure.action == "restart"
    assert failure.changes["per_device_train_batch_size"] * failure.changes["gradient_accumulation_steps"] == 16


def test_the_failed_steps_tensors_are_gone_before_the_step_runs_again(lab: Any, layer_of: Any) -> None:
    trainer = hfopt.protect(lab.trainer("causal"))
    held: list[weakref.ref[torch.Tensor]] = []

    def hook(module: Any, args: Any, output: Any) -> None:
        hidden = output if torch.is_tensor(output) else output[0]
        if trainer.state.global_step == 1 and not held:
            held.append(weakref.ref(hidden))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        assert not held or held[0]() is None

    layer_of(trainer.model).register_forward_hook(hook)
    trainer.train()
    assert held and trainer.state.global_step == 4


# ---------------------------------------------------------------------------------------------- how long it lasts, what is written down


def test_a_rare_long_batch_costs_one_step_and_a_lasting_shortage_settles(lab: Any, too_small: Any, layer_of: Any) -> None:
    often = {(step, 0): ("forward", 4) for step in range(12)}
    trainer = hfopt.protect(lab.trainer("causal", accumulation=1, max_steps=12), grow_after=4)
    memory = too_small(at=often)
    memory.watch(trainer, layer_of(trainer.model))
    trainer.train()
    # steps 0, 1, 2 fail, then 4 at a time lasts; after four quiet steps 8 is tried, fails, and the next wait is twice as long
    assert [step for step, *_ in memory.seen] == [0, 1, 2, 7]


def test_the_record(lab: Any, too_small: Any, layer_of: Any, capsys: Any) -> None:
    entries: list[Any] = []
    trainer = hfopt.protect(lab.trainer("causal"), log=entries.append)
    memory = too_small(at={(2, 1): ("backward", 4)})
    memory.watch(trainer, layer_of(trainer.model))
    trainer.train()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hfopt:")]
    assert len(lines) == len(entries) == 1
    assert lines[0].startswith("hfopt: out of memory at step 2 (backward, 8 samples of 12 tokens")
    assert "pieces of 4; effective batch still 16" in lines[0]
    assert entries[0]["seen"]["phase"] == "backward"
    assert entries[0]["step"]["action"] == "chunk"
    replanned = yaml.safe_load((Path(trainer.args.output_dir) / "config_replanned.yaml").read_text())
    assert replanned == {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}


def test_a_fallback_stands_in_the_monitors_log(lab: Any, too_small: Any, layer_of: Any) -> None:
    trainer = hfopt.protect(lab.trainer("causal", callbacks=[hfopt.HFGpuMonitor()]))
    memory = too_small(at={(1, 0): ("forward", 4), (3, 1): ("backward", 2)})
    memory.watch(trainer, layer_of(trainer.model))
    trainer.train()
    entries = list(log.read(Path(trainer.args.output_dir) / "hfopt" / log.NAME))
    kinds = [entry["kind"] for entry in entries]
    fallbacks = [entry for entry in entries if entry["kind"] == "fallback"]
    assert [(entry["seen"]["step"], entry["seen"]["phase"]) for entry in fallbacks[:2]] == [(1, "forward"), (3, "backward")]
    assert {entry["effective_batch"] for entry in fallbacks} == {16} and fallbacks[0]["step"]["action"] == "chunk"
    assert kinds[0] == "header" and kinds[-1] == "summary"
    told = run_text.report(history.load(Path(trainer.args.output_dir)))
    assert f"ran out of memory {len(fallbacks)} times" in told


def test_protecting_twice_is_protecting_once(lab: Any) -> None:
    trainer = lab.trainer("causal")
    assert hfopt.protect(trainer) is trainer
    step = trainer.training_step
    assert hfopt.protect(trainer).training_step == step


def test_a_copy_of_a_protected_trainer_trains_itself(lab: Any) -> None:
    """Methods that lead to the original would train that one."""
    trainer = hfopt.protect(lab.trainer(task="sequence", max_steps=2))
    twin = copy.deepcopy(trainer)
    twin.train()
    assert (twin.state.global_step, trainer.state.global_step) == (2, 0)
    assert guard_of(trainer) is not None and guard_of(twin) is None
    trainer.train()
    assert "backward" in vars(trainer.accelerator) and "backward" not in trainer.accelerator.__getstate__()
