"""Random failures of memory against runs that had none: does training end where it would have ended?

Each trial draws a configuration (fault_configurations.py) and a schedule: where memory runs out (step, micro-batch), in which phase
(forward, backward, the replay itself, evaluation or generation, the optimizer step, a callback), how small a piece must be to fit, and
how often. The run under `hfopt.protect` is compared with the undisturbed one: weights, buffers, loss and gradient norm of every step,
evaluation figures, learning rate, step, order of samples, random states, what callbacks and the Trainer's subclass counted, the
GradScaler.

    recovered   train() ended, and all of that is equal (with dropout: the line about other masks was written)
    restarted   the process cannot repeat the step: the supervisor is asked to start it again from its last checkpoint
    refused     the user's own error came out, with the name of what cannot be cut
    DIFFERENT   train() ended otherwise than the undisturbed run and nothing was said: must be 0
    HUNG        60 CPU seconds were not enough (a run takes about one): must be 0
    BROKE       another error than the user's came out: must be 0

Errors are raised by hooks on the CPU, no memory runs out; tests/oom/test_shortage.py has real ones.

usage: python benchmarks/fault_schedules.py [--trials 2000] [--seed 0] [--only NAME] [--log FILE]       the last line is JSON
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import math
import random
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import fault_interruptions
import fault_states  # noqa: F401 - its configurations join the others
import numpy as np
import torch
import transformers
from fault_configurations import BATCH, CONFIGURATIONS, OBSERVED, STEPS, fresh
from transformers import TrainerCallback

import hfopt
from hfopt.oom.protect import guard_of, refusal
from hfopt.schema import FallbackEvent, NextSettings, RunFailure

PHASES = ("forward", "backward", "replay", "evaluation", "optimizer", "callback", "again")
LIKELY = (6, 6, 3, 2, 1, 1, 6)
LIMIT_S = 60.0  # of CPU time
DRAWS = frozenset({"numpy_noise", "noise_where_asked", "cut_to_the_longest", "leaky_noise"})
"""Pieces cannot be given what the whole would draw: said, not equal."""
BACKWARD_ONLY = frozenset({"auxiliary_in_backward"})  # its losses do not show it: said where two samples do not fit
NOISY_EVALUATION = frozenset({"noisy_evaluation"})  # the same in evaluation, and so training after it draws others
TWICE = frozenset(name for name, make in CONFIGURATIONS.items() if make.__module__ == fault_interruptions.__name__)
"""Some of them pass a micro-batch twice: the second pass can fail (`again`)."""
EVALUATED = frozenset({"evaluated", "generated", "noisy_evaluation"})
TOLERANCE = {"bfloat16": 3e-2, "scaled_gradients": 2e-5, "experts_free": 2e-5, "experts_balanced": 2e-5}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    phase: str
    step: int
    micro_batch: int
    most: int  # samples that fit
    times: int = 1_000  # how often it can happen


class OutOfTime(BaseException):
    pass


def out_of_memory() -> BaseException:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8.00 GiB")


def draw(random_: random.Random, *, evaluates: bool = False, twice: bool = False) -> tuple[Fault, ...]:
    """One to four faults; sometimes the same one at every step, at step 0 or in the last window. A replay fails after a first failure."""
    possible = {"evaluation": evaluates, "again": twice}
    likely = [weight if possible.get(phase, True) else 0 for phase, weight in zip(PHASES, LIKELY, strict=True)]
    way = random_.choice(("some", "some", "some", "first", "last", "always"))
    count = random_.randint(1, 4) if way == "some" else 1
    faults = []
    for _ in range(count):
        phase = random_.choices(PHASES, likely)[0]
        step = {"first": 0, "last": STEPS - 1}.get(way, random_.randrange(STEPS))
        micro_batch = random_.randrange(2)
        most, times = random_.randint(0 if random_.random() < 0.1 else 1, BATCH - 1), random_.choice((1, 2, 1_000))
        faults.append(Fault(phase=phase, step=step, micro_batch=micro_batch, most=most, times=times))
        if phase == "replay":
            faults.append(Fault(phase="forward", step=step, micro_batch=micro_batch, most=BATCH - 1, times=1))
    if way == "always":
        return tuple(Fault(phase=faults[0].phase, step=step, micro_batch=0, most=faults[0].most) for step in range(STEPS + 3))
    return tuple(faults)


@dataclass
class Shortage(TrainerCallback):  # type: ignore[misc]
    """Raises where the schedule says; `seen` notes what really happened."""

    __module__ = "torch"  # an instrument: what it counts is nothing that the script keeps
    trainer: Any
    faults: tuple[Fault, ...]
    seen: list[str] = field(default_factory=list)
    now: FallbackEvent | None = None
    left: dict[int, int] = field(default_factory=dict)
    passes: int = 0  # of this micro-batch

    def attach(self) -> None:
        self.left = {number: fault.times for number, fault in enumerate(self.faults)}
        guard = guard_of(self.trainer)
        assert guard is not None
        guard.listen(self.listen)
        layer = next(module for module in self.trainer.model.modules() if isinstance(module, torch.nn.Linear))
        layer.register_forward_hook(self.hook)
        self.trainer.add_callback(self)

    def listen(self, event: FallbackEvent) -> None:
        self.now = event
        if event.kind == "micro_batch":
            self.passes = 0

    def due(self, phases: tuple[str, ...], rows: int) -> str | None:
        step = self.trainer.state.global_step
        for number, fault in enumerate(self.faults):
            inside = self.now is not None and self.now.micro_batch == fault.micro_batch
            if fault.phase == "replay":
                inside = self.now is not None and self.now.attempt > 0
            if fault.phase in ("evaluation", "optimizer", "callback"):
                inside = True
            if fault.phase in phases and fault.step == step and inside and rows > fault.most and self.left[number]:
                self.left[number] -= 1
                self.seen.append(fault.phase)
                return fault.phase
        return None

    def hook(self, module: Any, args: Any, output: torch.Tensor) -> None:
        samples = self.rows(output)
        if not self.trainer.model.training:
            if self.trainer.is_in_train and self.trainer.control.should_evaluate and self.due(("evaluation",), samples):
                raise out_of_memory()
            return
        self.passes += 1
        if self.passes == 2 and self.now is not None and self.now.attempt == 0 and self.due(("again",), samples):
            raise out_of_memory()
        if not torch.is_grad_enabled():
            return
        phase = self.due(("forward", "replay"), samples)
        if phase is not None:
            raise out_of_memory()
        if output.requires_grad and self.due(("backward",), samples):
            output.register_hook(self._raise)

    def rows(self, output: torch.Tensor) -> int:
        return output.shape[0]

    @staticmethod
    def _raise(gradient: torch.Tensor) -> None:
        raise out_of_memory()

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        optimizer = more["optimizer"]
        step = optimizer.step

        def short(*arguments: Any, **options: Any) -> Any:
            if self.due(("optimizer",), BATCH):
                raise out_of_memory()
            return step(*arguments, **options)

        optimizer.step = short

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.due(("callback",), BATCH):
            raise out_of_memory()


class Told:
    """Stands for the supervisor of `hfopt run`."""

    def __init__(self) -> None:
        self.failure: RunFailure | None = None

    def start_again_with(self, settings: NextSettings) -> None:
        pass

    def failed(self, failure: RunFailure) -> None:
        self.failure = failure


def state_of(trainer: Any) -> dict[str, Any]:
    """All that must be equal."""
    model = trainer.model
    found: dict[str, Any] = {f"weight {name}": value.detach().double().clone() for name, value in model.named_parameters()}
    found |= {f"buffer {name}": value.detach().double().clone() for name, value in model.named_buffers() if value.is_floating_point()}
    found["step"] = trainer.state.global_step
    found["epoch"] = trainer.state.epoch
    found["order"] = list(trainer.train_dataset.order)
    skipped = ("runtime", "per_second", "total_flos")
    rows = [{key: value for key, value in row.items() if not key.endswith(skipped)} for row in trainer.state.log_history]
    found["log"] = rows
    found["tokens"], found["flos"] = trainer.state.num_input_tokens_seen, trainer.state.total_flos
    found["python random"], found["torch random"] = random.getstate(), torch.get_rng_state()
    found["numpy random"] = repr(np.random.get_state())
    scaler = trainer.accelerator.scaler
    found["scaler"] = scaler.state_dict() if scaler is not None else None
    if isinstance(getattr(trainer, "temperature", None), torch.Tensor):
        found["weight of the loss"] = trainer.temperature.detach().clone()
    if hasattr(trainer, "running"):
        found["running mean"] = trainer.running.mean
    found["counted"] = getattr(trainer, "counted", None)
    found["forwards"] = getattr(model, "seen", None)
    look = OBSERVED.get(trainer)
    found["observed"] = look() if look is not None else None
    for callback in trainer.callback_handler.callbacks:
        if hasattr(callback, "average"):
            found["average"] = torch.cat([value.double().flatten() for value in callback.average])
            found["callbacks"] = (callback.substeps, callback.steps)
    return found


def differences(mine: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> list[str]:
    """Names of what is not equal. Weights are compared as one vector: a single one whose gradient is rounding says nothing."""
    found = []
    weights = [torch.cat([value.flatten() for key, value in state.items() if key.startswith("weight ")]) for state in (mine, theirs)]
    if float((weights[0] - weights[1]).norm() / weights[1].norm()) > tolerance:
        found.append("weights")
    for key, value in theirs.items():
        other = mine.get(key)
        if key.startswith("weight "):
            continue
        if key == "log":
            if not _same_log(other, value, max(tolerance, 1e-6)):
                found.append(key)
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            if not torch.allclose(other, value, rtol=max(tolerance, 1e-7), atol=1e-9, equal_nan=True):
                found.append(key)
        elif isinstance(value, torch.Tensor):
            if not torch.equal(other, value):
                found.append(key)
        elif other != value:
            found.append(key)
    return found


def _same_log(mine: list[dict[str, Any]], theirs: list[dict[str, Any]], tolerance: float) -> bool:
    if len(mine) != len(theirs):
        return False
    for one, other in zip(mine, theirs, strict=True):
        if one.keys() != other.keys():
            return False
        for key, value in other.items():
            if isinstance(value, float) and math.isnan(value) and math.isnan(one[key]):
                continue
            if isinstance(value, float) and not math.isclose(one[key], value, rel_tol=20 * tolerance, abs_tol=1e-9):
                return False
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    configuration: str
    outcome: str
    faults: tuple[Fault, ...]
    happened: tuple[str, ...]
    detail: str


class Trials:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._undisturbed: dict[str, dict[str, Any]] = {}

    def undisturbed(self, name: str) -> dict[str, Any]:
        if name not in self._undisturbed:
            trainer = fresh(CONFIGURATIONS[name], self._folder / name)
            with contextlib.redirect_stdout(io.StringIO()):
                trainer.train()
            self._undisturbed[name] = state_of(trainer)
        return self._undisturbed[name]

    def run(self, name: str, faults: tuple[Fault, ...]) -> Outcome:
        expected = self.undisturbed(name)
        trainer = hfopt.protect(fresh(CONFIGURATIONS[name], self._folder / name), grow_after=2)
        told, guard = Told(), guard_of(trainer)
        assert guard is not None
        guard.supervised_by(told)
        shortage = Shortage(trainer=trainer, faults=faults)
        shortage.attach()
        words = io.StringIO()
        outcome, detail = "recovered", ""
        try:
            with contextlib.redirect_stderr(words), contextlib.redirect_stdout(io.StringIO()), limited():
                trainer.train()
        except torch.OutOfMemoryError:
            named = refusal(trainer)
            outcome = "refused" if told.failure is None or told.failure.action == "give_up" else "restarted"
            detail = named.name if named is not None else told.failure.reason if told.failure is not None else "nothing was said"
            if told.failure is None:
                outcome = "BROKE"
        except OutOfTime:
            outcome = "HUNG"
        except Exception as error:  # noqa: BLE001 - whatever comes out is the finding
            outcome, detail = "BROKE", f"{type(error).__name__}: {error}"[:200]
        else:
            outcome, detail = self._judged(name, trainer, expected, words.getvalue())
        return Outcome(configuration=name, outcome=outcome, faults=faults, happened=tuple(shortage.seen), detail=detail)

    def _judged(self, name: str, trainer: Any, expected: dict[str, Any], words: str) -> tuple[str, str]:
        found = differences(state_of(trainer), expected, TOLERANCE.get(name, 1e-7))
        if not found:
            return "recovered", ""
        said = "dropout draws other masks" in words
        if name in DRAWS and said and not {"step", "epoch"} & set(found):
            return "recovered", "other masks, said"
        if "evaluation draws random numbers" in words and name in NOISY_EVALUATION:
            return "recovered", "other noise, said"
        if "not their gradients" in words and name in BACKWARD_ONLY:
            return "recovered", "gradients unchecked, said"
        return "DIFFERENT", ", ".join(found[:6])


@contextlib.contextmanager
def limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise OutOfTime

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def trials(count: int, seed: int, only: str | None, folder: Path) -> Iterator[Outcome]:
    names = [name for name in CONFIGURATIONS if only is None or only in name]
    made, random_ = Trials(folder), random.Random(seed)
    for number in range(count):
        name = names[number % len(names)]
        yield made.run(name, draw(random_, evaluates=name in EVALUATED, twice=name in TWICE))


def table(outcomes: list[Outcome]) -> str:
    words = ("recovered", "restarted", "refused", "DIFFERENT", "HUNG", "BROKE")
    lines = [f"{'configuration':<24}{'tried':>7}" + "".join(f"{word:>11}" for word in words) + "  refused as"]
    for name in dict.fromkeys(one.configuration for one in outcomes):
        own = [one for one in outcomes if one.configuration == name]
        counts = Counter(one.outcome for one in own)
        named = sorted({one.detail for one in own if one.outcome == "refused"})
        lines.append(f"{name:<24}{len(own):>7}" + "".join(f"{counts[word]:>11}" for word in words) + f"  {', '.join(named)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only")
    parser.add_argument("--log", type=Path)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    gc.freeze()  # a fallback collects garbage; what torch and transformers keep for good need not be walked each time
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for one in trials(asked.trials, asked.seed, asked.only, Path(folder)):
            outcomes.append(one)
            if asked.log is not None:
                with asked.log.open("a") as stream:
                    stream.write(json.dumps(asdict(one)) + "\n")
            if one.outcome.isupper():
                sys.stderr.write(f"{one.outcome} {one.configuration}: {one.detail}; {one.faults}\n")
    print(table(outcomes))
    counts = Counter(one.outcome for one in outcomes)
    happened = sum(bool(one.happened) for one in outcomes)
    print(
        json.dumps(
            {"trials": len(outcomes), "with_a_failure": happened, "configurations": len({o.configuration for o in outcomes}), **counts}
        )
    )


if __name__ == "__main__":
    main()
