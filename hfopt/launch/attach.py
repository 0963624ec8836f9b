"""What `hfopt run` does inside the user's process: it waits for the Trainer, plans for each, protects it and resumes it after a restart.

The script is unchanged. The new pair of batch and accumulation is set on the TrainingArguments before the Trainer reads them, and only
for the output folder whose run failed, so that another Trainer of the same script keeps its own.

What a planned run leaves in its output folder: `hfopt/plan.json`, `plan.txt` with the reasons, `config.yaml` as it trains. The random
state, the arguments' identity and the model are the user's own: planning draws nothing, and values are set on the arguments the script
already holds. A second `train()` of the same Trainer keeps what the first was given; each further Trainer is planned anew.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hfopt.compat.transformers_patches import checkpoint_batch, quietly
from hfopt.errors import HfoptError
from hfopt.facts.training_keys import both_spellings
from hfopt.files import write_whole
from hfopt.job.request import Request
from hfopt.launch import apply_plan
from hfopt.launch.apply_plan import apply_changes
from hfopt.launch.handoff import Handoff, RestartOrders, RunOptions, RunStart
from hfopt.launch.heartbeat import Heart, callback
from hfopt.oom import next_settings
from hfopt.oom.protect import guard_of, protect
from hfopt.planner.result import Plan
from hfopt.redact import is_secret, json_words, said
from hfopt.schema import Change, PlannedMemory

_hearts: list[Heart] = []


def install(trainer_class: type) -> None:
    """Wraps the class itself, once: subclasses call its __init__ and train."""
    kind: Any = trainer_class
    original_init, original_train = kind.__init__, kind.train
    options = RunOptions.here()

    @functools.wraps(original_init)
    def init(self: Any, *args: Any, **more: Any) -> None:
        asked = _obey(args[1] if len(args) > 1 else more.get("args"))
        original_init(self, *args, **more)
        if options.fallback:
            guard = guard_of(protect(self))
            assert guard is not None
            guard.scripts_accumulation = asked

    @functools.wraps(original_train)
    def train(self: Any, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **more: Any) -> Any:
        if options.plan:
            _planned_harmlessly(self, searching=trial is not None)
        orders = RestartOrders.here(self.args.output_dir)
        _supervised(self, resume_from_checkpoint if orders is None else orders.checkpoint)
        with _signs_of_life(self, options.hang_after_s):
            if orders is None or orders.checkpoint is None:
                return original_train(self, resume_from_checkpoint, trial, *args, **more)
            with checkpoint_batch(self.args.train_batch_size):
                return original_train(self, orders.checkpoint, trial, *args, **more)

    kind.__init__, kind.train = init, train


def _planned_harmlessly(trainer: Any, *, searching: bool) -> None:
    """A fault of ours never stops training: one line, and the script runs as it was. An exit that was asked for goes through."""
    try:
        prepare(trainer, searching=searching)
    except Exception as error:  # noqa: BLE001 - whatever breaks in the planning, the training it is for must go on
        why = " ".join(str(error).split()) or "no further word"
        next_settings.say(f"hfopt: not planned ({type(error).__name__}: {why}); the script trains with its own settings")


def _supervised(trainer: Any, resumed: Any) -> None:
    """From here on the supervisor can start the run again, whoever protected the Trainer."""
    handoff, guard = Handoff.here(), guard_of(trainer)
    if handoff is not None:
        handoff.started(RunStart.of(trainer.args, resumed))
        if guard is not None:
            guard.supervised_by(handoff)


@contextmanager
def _signs_of_life(trainer: Any, after_s: float) -> Iterator[None]:
    """While the Trainer trains; a Trainer inside another one's callback is left to that one."""
    handoff = Handoff.here()
    if handoff is None or after_s <= 0 or _hearts:
        yield
        return
    heart = Heart(handoff.path.parent, rank=trainer.args.process_index, after_s=after_s)
    signs = callback(heart)
    trainer.add_callback(signs)
    _hearts.append(heart)
    try:
        yield
    finally:
        _hearts.remove(heart)
        trainer.remove_callback(signs)
        heart.stop()


def _obey(args: Any) -> int | None:
    """Sets what was ordered; the accumulation the script asked for, where it is another one now."""
    orders = RestartOrders.here(args.output_dir) if args is not None else None
    if orders is None:
        return None
    asked: int = args.gradient_accumulation_steps
    for key, value in both_spellings(orders.changes, args).items():
        setattr(args, key, value)
    return asked if asked != args.gradient_accumulation_steps else None


PLAN, REPORT, CONFIG = "plan.json", "plan.txt", "config.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """An earlier plan of this folder."""

    changes: tuple[Change, ...]
    divides_loss: bool
    memory: PlannedMemory | None = None


def folder_of(args: Any) -> Path:
    return Path(args.output_dir or ".") / "hfopt"


def write_plan(folder: Path, plan: Plan, divides_loss: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    said = {**plan.to_json(), "divides_loss": divides_loss, "memory_curve": plan.memory.to_json() if plan.memory is not None else None}
    write_whole(folder / PLAN, json_words(json.dumps(said, indent=2, ensure_ascii=False, default=str)) + "\n")
    write_whole(folder / REPORT, plan.report(verbose=True))


def read_plan(folder: Path) -> Known | None:
    try:
        said = json.loads((folder / PLAN).read_text())
        changes = tuple(Change(**entry) for entry in said["changes"])
        curve = said.get("memory_curve")
        memory = PlannedMemory.from_json(curve) if curve is not None else None
        return Known(changes=changes, divides_loss=bool(said.get("divides_loss")), memory=memory)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_config(args: Any) -> None:
    """The arguments in force, as a YAML that `TrainingArguments(**...)` takes: what differs from the defaults, without credentials."""
    import yaml

    folder = folder_of(args)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / CONFIG, yaml.safe_dump(effective_config(args), sort_keys=False, allow_unicode=True))


def effective_config(args: Any) -> dict[str, Any]:
    stated: dict[str, Any] = {}
    for item in dataclasses.fields(args):
        value = _plain(getattr(args, item.name, None))
        default = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
        if item.init and value is not None and value != _plain(default) and _writable(value) and not is_secret(item.name, value):
            stated[item.name] = _without_credentials(value)
    return stated


def _without_credentials(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_credentials(entry) for key, entry in value.items() if not is_secret(str(key), entry)}
    return [_without_credentials(entry) for entry in value if not is_secret("", entry)] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Enums as their words, sequences as lists."""
    value = getattr(value, "value", value)
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple, set)) else value


def _writable(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _writable(entry) for key, entry in value.items())
    if isinstance(value, list):
        return all(_writable(entry) for entry in value)
    return value is None or isinstance(value, (bool, int, float, str))


_MARK = "_hfopt_planned"
_said: set[str] = set()


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What rank 0 tells the others."""

    changes: tuple[Change, ...] = ()
    divides_loss: bool = False  # the Trainer divides by the accumulation, for the model's head does not
    memory: PlannedMemory | None = None  # by which the fallback chooses smaller pieces
    lines: tuple[str, ...] = ()
    failed: bool = False
    plan: Plan | None = field(default=None, compare=False)  # rank 0's own; not sent


def prepare(trainer: Any, *, searching: bool) -> None:
    """Called by the wrapped `Trainer.train`. Leaves by SystemExit when only a plan or a dry run was asked for."""
    options = RunOptions.here()
    if searching:
        _say_once("hfopt: hyperparameter_search chooses its own settings for each trial: left alone, not planned")
        return
    if vars(trainer).get(_MARK):
        return
    setattr(trainer, _MARK, True)
    decision = _agreed(trainer, options)
    leads = trainer.is_world_process_zero()
    if leads:
        for line in decision.lines:
            next_settings.say(line)
    if not decision.failed:
        apply_changes(trainer, decision.changes, divides_loss=decision.divides_loss)
        guard = guard_of(trainer)
        if guard is not None:
            guard.settings_changed()
            guard.use_memory(decision.memory)
    if leads:
        try:
            write_config(trainer.args)
        except OSError as error:  # what was planned is in force all the same
            next_settings.say(f"hfopt: the configuration in force could not be written: {error}")
    if options.mode == "plan_only":
        sys.exit(1 if decision.failed else 0)
    _watch(trainer, decision.plan)
    if options.mode == "dry_run":
        apply_plan.arrange(trainer)


def _agreed(trainer: Any, options: RunOptions) -> Decision:
    """Rank 0's decision on every rank. It is sent even when planning failed: the others wait for it."""
    import torch.distributed as dist

    alone = trainer.args.world_size <= 1 or not (dist.is_available() and dist.is_initialized())
    if alone:
        return _decision(trainer, options)
    if dist.get_rank() == 0:
        decision = _decision(trainer, options)
        dist.broadcast_object_list([replace(decision, lines=(), plan=None)], src=0)
        return decision
    received: list[Any] = [None]
    dist.broadcast_object_list(received, src=0)
    decision = received[0]
    assert isinstance(decision, Decision)
    return decision


def _decision(trainer: Any, options: RunOptions) -> Decision:
    folder = folder_of(trainer.args)
    orders = RestartOrders.here(trainer.args.output_dir)
    if orders is not None:
        return _earlier(folder, orders)
    try:
        plan = _planned(trainer, options)
    except HfoptError as error:
        hint = f" ({' '.join(error.hint.split())})" if error.hint else ""
        return Decision(failed=True, lines=(f"hfopt: not planned: {_brief(error)}{hint}; the script's own settings stay",))
    except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer, and the training must go on in any case
        return Decision(
            failed=True, lines=(f"hfopt: not planned ({type(error).__name__}: {_brief(error)}); the script's own settings stay",)
        )
    decision = Decision(changes=plan.facts.changes, divides_loss=_divides(plan), memory=plan.memory, plan=replace(plan, curve=None))
    try:
        write_plan(folder, plan, decision.divides_loss)
        where = f"; reasons in {folder / REPORT}"
    except OSError as error:
        where = f"; the plan could not be written: {error}"
    return replace(decision, lines=tuple(_words(plan, where)))


def _brief(error: Exception) -> str:
    return " ".join(said(str(error)).split())


def _planned(trainer: Any, options: RunOptions) -> Plan:
    from hfopt.compat.transformers_patches import undisturbed
    from hfopt.model.samples import same_random_state
    from hfopt.planner.algorithm import make_plan

    request = Request(keep=frozenset(options.keep), allow=frozenset(options.allow), headroom=options.headroom, dry_run=False)
    with undisturbed(), same_random_state(), quietly():
        return make_plan(trainer, request)


def _earlier(folder: Path, orders: RestartOrders) -> Decision:
    """A restarted run keeps the plan of its first start, under what the restart changed."""
    known = read_plan(folder)
    if known is None:
        return Decision()
    changes = tuple(change for change in known.changes if change.key not in orders.changes)
    return Decision(changes=changes, divides_loss=known.divides_loss, memory=known.memory)


def _divides(plan: Plan) -> bool:
    """Where the accumulation was traded on a head that ignores the number of items: the Trainer divides, as it does for others."""
    found, facts = plan.facts.neutrality, plan.facts
    traded = facts.before.candidate.accumulation != facts.after.candidate.accumulation
    return found is not None and not found.neutral and found.fixable and traded


def _words(plan: Plan, where: str) -> list[str]:
    facts = plan.facts
    warnings = [f"hfopt: warning: {warning}" for warning in facts.warnings]
    if not facts.changes:
        return [
            *warnings,
            f"hfopt: planned: the script's settings are already the fastest that fit (effective batch {facts.effective_batch}){where}",
        ]
    changed = ", ".join(f"{change.key} {_shown(change.before)} → {_shown(change.after)}" for change in facts.changes)
    lines = [*warnings, f"hfopt: planned: {changed}; effective batch still {facts.effective_batch}{where}"]
    if _divides(plan):
        lines.append(
            "hfopt: the loss ignores num_items_in_batch, so the Trainer divides by the accumulation (model_accepts_loss_kwargs = False)"
        )
    return lines


def _shown(value: Any) -> str:
    return {None: "unset", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def _watch(trainer: Any, plan: Plan | None) -> None:
    from hfopt.monitor.callback import HFGpuMonitor

    if not any(isinstance(callback, HFGpuMonitor) for callback in trainer.callback_handler.callbacks):
        trainer.add_callback(HFGpuMonitor(plan=plan))


def _say_once(line: str) -> None:
    if line not in _said:
        _said.add(line)
        next_settings.say(line)
