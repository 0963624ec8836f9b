"""Every configuration of benchmarks/fault_schedules.py under failures of memory: recovered exactly, restarted, or refused by name."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import fault_schedules as bench
import fault_states

OTHERS = bench.TWICE
STATES = {name for name, make in bench.CONFIGURATIONS.items() if make.__module__ == fault_states.__name__}
pytestmark = [pytest.mark.trainer, pytest.mark.filterwarnings("ignore")]
REFUSED = {
    "class_weights": "contrastive",
    "class_weights_tokens": "contrastive",
    "class_weights_rare": "contrastive",  # two samples of one class do not show it
    "contrastive": "contrastive",
    "running_baseline": "contrastive",
    "experts_balanced": "expert_balance",
    "batch_norm": "batch_norm",
    "buffer_in_forward": "state_in_forward",
    "count_in_forward": "state_in_forward",
    "adversarial_step": "own_backward",
    "balance_in_training": "mixed_samples",
    "auxiliary_in_backward": "mixed_samples",
    "mixup": "mixed_samples",
    "clamped_gradients": "gradient_hooks",
    "generator_of_the_model": "state_in_step",
    "generator_in_a_closure": "state_in_step",
    "focus_in_a_closure": "state_in_step",
    "weights_by_recent_losses": "state_in_step",
    "global_of_the_script": "state_in_step",
    "second_loader": "state_in_step",
    "running_number_of_the_trainer": "state_in_step",
    "mixup_by_numpy": "mixed_samples",
    "mixup_shuffled_by_numpy": "drawn_on_the_host",
    "clipped_after_each": "gradients_touched",
    "mean_that_begins_late": "state_in_forward",
}
"""What cannot be cut, and its name in docs/fallback.md."""
REMEMBERED = (
    "generator_of_the_collator",
    "factor_drawn_per_call",
    "outputs_kept",
    "callback_between_micro_batches",
    "collator_with_a_rest",
)
"""Configurations of fault_states.py that recover in place all the same. Most others differ only in where the state lies."""
LEFT_BEHIND = {
    "attacked_weights": ("again", "the weight model.embed_tokens.weight was changed, and the script did not change it back"),
    "weights_swapped_for_a_pass": ("forward", "the weight first.weight was changed"),
    "hook_for_a_pass": ("forward", "a hook of first was changed"),
    "adapter_off_for_a_pass": ("again", "contrastive"),  # its loss cannot be cut either, and that is the name
}
"""The pass that fails finds the model changed: what is said of it."""
PASSED_TWICE = {*LEFT_BEHIND, "gradients_off_for_a_pass", "critic_with_its_optimizer", "two_masks"}
MOVED = ("schedule_in_the_loss", "decay_in_the_loss", "temperature_in_the_config", "sums_on_the_weights")


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[bench.Trials]:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    gc.freeze()
    yield bench.Trials(tmp_path_factory.mktemp("faults"))
    gc.unfreeze()
    transformers.logging.set_verbosity(verbosity)


def fault(phase: str, step: int, most: int, **more: Any) -> bench.Fault:
    return bench.Fault(phase=phase, step=step, micro_batch=more.pop("micro_batch", 1), most=most, **more)


@pytest.mark.parametrize(
    "name", [name for name in bench.CONFIGURATIONS if name not in OTHERS and (name not in STATES or name in (*REFUSED, *REMEMBERED))]
)
def test_a_run_that_fails_ends_as_the_undisturbed_one_or_says_why_not(trials: bench.Trials, name: str) -> None:
    rows = 2 if name == "multiple_choice" else 1  # of a sample
    late = trials.run(name, (fault("forward", 1, 2 * rows),))
    torn = trials.run(name, (fault("backward", 0, 2 * rows, micro_batch=0), fault("replay", 0, 0, times=1), fault("evaluation", 1, rows)))
    drawn = trials.run(name, bench.draw(random.Random(name), evaluates=name in bench.EVALUATED))
    for seen in (late, torn, drawn):
        assert not seen.outcome.isupper(), f"{seen.outcome}: {seen.detail}; {seen.faults}"
    if name in REFUSED:
        checked = [late] if name in bench.BACKWARD_ONLY else [late, torn]  # memory ran out in the check itself: said, not refused
        assert {(seen.outcome, seen.detail) for seen in checked} == {("refused", REFUSED[name])}
    else:
        assert (late.outcome, torn.outcome) == ("recovered", "recovered")


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_what_is_changed_for_a_while_or_kept_by_a_library(trials: bench.Trials, name: str) -> None:
    late, early, again = fault("forward", 1, 2), fault("backward", 0, 1, micro_batch=0), fault("again", 1, 2, times=1)
    runs = {one.phase: trials.run(name, (one,)) for one in (late, early, again)}
    assert [f"{seen.outcome}: {seen.detail}; {seen.faults}" for seen in runs.values() if seen.outcome.isupper()] == []
    assert runs["again"].happened == (("again",) if name in PASSED_TWICE else ())
    if name in LEFT_BEHIND:
        phase, said = LEFT_BEHIND[name]
        assert runs[phase].outcome == "restarted" and said in runs[phase].detail
    if name in MOVED:
        assert {seen.outcome for seen in (runs["forward"], runs["backward"])} <= {"refused", "restarted"}
    if name in ("cut_to_the_longest", "leaky_noise"):
        assert runs["forward"].detail == "other masks, said"


@pytest.mark.parametrize("phase", ["optimizer", "callback"])
def test_what_cannot_be_repeated_goes_to_the_supervisor(trials: bench.Trials, phase: str) -> None:
    assert trials.run("clipping", (fault(phase, 1, 0),)).outcome == "restarted"
