"""Runs a training command unchanged and, when memory ends its process, starts it again from its newest whole checkpoint.

A process that was killed, or a disk that was full, leaves folders that look like checkpoints. Resuming from weights alone would start the
optimizer anew and train something else without a word, so a checkpoint without its optimizer counts as none. Files are not loaded: a
.safetensors file states its size in its head, a .pt file is a zip archive whose directory stands at its end.

Inside the process every Trainer is protected (`trainer_hooks.py`), so most OOMs never come here. What does: the optimizer step, FSDP and
ZeRO, an exchange of gradients that had begun, the kernel's OOM killer. The process leaves word in a file (what to change, which output
folder); one that was killed could not, so it leaves its settings at the start and the memory cgroup says what killed it. All ranks are
ended, the new pair of batch and accumulation (same product) goes into the environment, and the command runs again from the newest
whole checkpoint. Any other failure is the script's own: its exit code is passed on.
"""

from __future__ import annotations

import json
import os
import re
import struct
import tempfile
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hfopt
from hfopt.cgroup import Kills, killed_for_memory, oom_kills
from hfopt.files import write_whole
from hfopt.launch.handoff import HANDOFF, HOME, OPTIONS, ORDERS, Handoff, RestartOrders, RunOptions, RunStart, stamp_of
from hfopt.launch.heartbeat import Hang, HangWatch
from hfopt.process.child_process import Child, noted_ends

_NAME = re.compile(r"^checkpoint-(\d+)$")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SHARDED = ("pytorch_model_fsdp*", "global_step*", "optimizer_*", "optimizer.bin")
"""What FSDP and DeepSpeed write in place of weights and optimizer; how whole it is only they can tell."""
_HEAD_BYTES = 8  # of a .safetensors file: the length of its header, little-endian
_LONGEST_HEAD = 100_000_000  # as the format's own reader allows


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """`path` is None where there is none to resume from; `passed_over` names newer ones, each with what is wrong with it."""

    path: Path | None
    passed_over: tuple[str, ...] = ()


def newest_whole(output_dir: Path, earlier: Collection[str] = ()) -> Checkpoint:
    """A folder that cannot be read holds none. `earlier`: stamps of checkpoints that another run left there; to resume from one of these
    would train something else without a word."""
    try:
        numbered = [(int(match[1]), entry) for entry in output_dir.iterdir() if (match := _NAME.match(entry.name)) and entry.is_dir()]
    except OSError:
        return Checkpoint(path=None)
    passed_over: list[str] = []
    for _, folder in sorted(numbered, reverse=True):
        if stamp_of(folder) in earlier:
            passed_over.append(f"{folder.name}: it was there before this run began")
            break
        wrong = what_is_wrong(folder)
        if wrong is None:
            return Checkpoint(path=folder, passed_over=tuple(passed_over))
        passed_over.append(f"{folder.name}: {wrong}")
    return Checkpoint(path=None, passed_over=tuple(passed_over))


def what_is_wrong(folder: Path) -> str | None:
    """One thing that keeps a run from being resumed from here exactly; None: nothing was found."""
    try:
        state = json.loads((folder / "trainer_state.json").read_text())
    except (OSError, ValueError):
        return "trainer_state.json is missing or cut short"
    if not isinstance(state, dict) or not isinstance(state.get("global_step"), int):
        return "trainer_state.json names no step"
    try:
        if any(entry for pattern in _SHARDED for entry in folder.glob(pattern)):
            return None
        return _weights(folder) or next((wrong for path in _states(folder) if (wrong := _archive(path))), None)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"


def _states(folder: Path) -> list[Path]:
    """Of optimizer, schedule, scale and random numbers; the scale is there under fp16 only, random states are one for each rank."""
    scale = folder / "scaler.pt"
    drawn = sorted(folder.glob("rng_state*.pth")) or [folder / "rng_state.pth"]
    return [folder / "optimizer.pt", folder / "scheduler.pt", *([scale] if scale.exists() else []), *drawn]


def _weights(folder: Path) -> str | None:
    for name in _INDEXES:
        if (folder / name).exists():
            try:
                shards = sorted(set(json.loads((folder / name).read_text())["weight_map"].values()))
            except (ValueError, KeyError, AttributeError):
                return f"{name} is cut short"
            return next((wrong for shard in shards if (wrong := _file(folder / shard))), None)
    found = [folder / name for name in _WEIGHTS if (folder / name).exists()]
    return "it has no weights" if not found else next((wrong for path in found if (wrong := _file(path))), None)


def _file(path: Path) -> str | None:
    return _safetensors(path) if path.suffix == ".safetensors" else _archive(path)


def _safetensors(path: Path) -> str | None:
    if not path.exists():
        return f"{path.name} is missing"
    with path.open("rb") as stream:
        head = stream.read(_HEAD_BYTES)
        length = struct.unpack("<Q", head)[0] if len(head) == _HEAD_BYTES else _LONGEST_HEAD + 1
        try:
            tensors: Any = json.loads(stream.read(length)) if length <= _LONGEST_HEAD else None
            end = max((tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return f"{path.name} is cut short"
    return None if path.stat().st_size == _HEAD_BYTES + length + end else f"{path.name} is cut short"


def _archive(path: Path) -> str | None:
    if not path.exists():
        return f"{path.name} is missing"
    return None if zipfile.is_zipfile(path) else f"{path.name} is cut short or empty"


SITE = Path(__file__).parents[1] / "site"
GRACE_S = 30.0  # for a launcher to end its ranks by itself once one of them has failed

Replanned = Callable[[Mapping[str, Any], str], None]
"""Takes the settings that go on, and why; the command line writes them into a copy of the user's YAML."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OomVerdict:
    """Why a process ended for lack of memory, and what to change."""

    reason: str
    output_dir: Path | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    hopeless: bool = False


def supervise(
    command: Sequence[str],
    *,
    attempts: int,
    say: Callable[[str], None],
    replanned: Replanned | None = None,
    options: RunOptions | None = None,
    restart_hung: bool = False,
) -> int:
    """Runs the command to its end, restarting it at most `attempts` times; returns its last exit code."""
    with noted_ends() as asked:
        return _supervised(command, asked, attempts=attempts, say=say, replanned=replanned, options=options, restart_hung=restart_hung)


def _supervised(
    command: Sequence[str],
    asked: list[int],
    *,
    attempts: int,
    say: Callable[[str], None],
    replanned: Replanned | None,
    options: RunOptions | None,
    restart_hung: bool,
) -> int:
    orders: RestartOrders | None = None
    earlier: dict[str, tuple[str, ...]] = {}  # by output folder, what was there before this run's first start
    for restart in range(attempts + 1):
        with tempfile.TemporaryDirectory(prefix="hfopt-run-") as folder:
            handoff = Handoff(path=Path(folder) / "handoff.json")
            kills = oom_kills()
            child = Child(command, _environment(handoff, orders, options or RunOptions()), asked)
            watch = (
                HangWatch(folder=Path(folder), after_s=options.hang_after_s) if options is not None and options.hang_after_s > 0 else None
            )
            code = child.run(lambda: _should_end(handoff, watch, say, restart_hung), grace_s=GRACE_S)  # noqa: B023 - called in this round only
            settings = handoff.settings
            if settings is not None and replanned is not None:
                replanned(settings.changes, settings.why)
            verdict = _verdict(handoff, code, kills) if code != 0 and not child.asked_to_end else None
            if verdict is None and watch is not None and watch.found and restart_hung and not child.asked_to_end:
                verdict = _after_hang(handoff.start, watch.found[0])
            start = handoff.start
            if start is not None:
                earlier.setdefault(start.output_dir, start.earlier)
        if code == 0 and start is None and options is not None and options.plan and options.mode != "plan_only":
            say("hfopt: no Trainer was trained, so nothing was planned or protected; hfopt leaves custom training loops alone")
        if verdict is None or verdict.hopeless or verdict.output_dir is None:
            if verdict is not None:
                say(f"hfopt: {verdict.reason}")
            return code
        if restart == attempts:
            say(_the_end(verdict, orders, attempts))
            return code
        if asked:
            return code
        found = newest_whole(verdict.output_dir, earlier.get(str(verdict.output_dir), ()))
        orders = _orders(verdict, orders, found.path)
        say(_announcement(verdict, orders, found, f"{restart + 1} of at most {attempts}"))
        if replanned is not None:
            replanned(orders.changes, verdict.reason)
    raise AssertionError("the loop returns")


def _should_end(handoff: Handoff, watch: HangWatch | None, say: Callable[[str], None], restart_hung: bool) -> bool:
    if watch is None:
        return handoff.has_failed()
    if (hang := watch.look()) is not None:
        say(f"hfopt: {hang}{_written(handoff.start, hang)}")
    return handoff.has_failed() or (restart_hung and bool(watch.found))


def _written(start: RunStart | None, hang: Hang) -> str:
    """All threads' stacks go where the run's other files are."""
    if start is None or not hang.stacks:
        return ""
    path = Path(start.output_dir) / "hfopt" / f"hang-rank{hang.rank}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, hang.stacks)
    except OSError:
        return ""
    return f"; all stacks in {path}"


def _after_hang(start: RunStart | None, hang: Hang) -> OomVerdict | None:
    return None if start is None else OomVerdict(reason=str(hang), output_dir=Path(start.output_dir))


def _environment(handoff: Handoff, orders: RestartOrders | None, options: RunOptions) -> dict[str, str]:
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SITE), env.get("PYTHONPATH"))))
    env[HOME] = str(Path(hfopt.__file__).parent.parent)
    env[HANDOFF] = str(handoff.path)
    env[OPTIONS] = options.to_json()
    if orders is not None:
        env[ORDERS] = orders.to_json()
    return env


def _verdict(handoff: Handoff, code: int, kills_before: Kills) -> OomVerdict | None:
    """None: the failure has nothing to do with memory, as far as anyone can tell."""
    failure = handoff.failure
    if failure is not None and failure.action == "restart":
        assert failure.output_dir is not None
        return OomVerdict(reason=failure.reason, output_dir=Path(failure.output_dir), changes=failure.changes)
    if failure is not None:
        return OomVerdict(reason=f"{failure.reason}; what would fit: {failure.smallest_change}", hopeless=True)
    if not killed_for_memory(kills_before, oom_kills(), code):
        return None
    start = handoff.start
    if start is None:
        return OomVerdict(reason="the kernel's OOM killer ended it before training began: the machine's memory is too small", hopeless=True)
    return _after_kill(start)


def _after_kill(start: RunStart) -> OomVerdict:
    """The machine's memory ran out: workers that load data hold most of it, after them the batch."""
    reason = "the kernel's OOM killer ended it: the machine's memory ran out"
    folder = Path(start.output_dir)
    workers, batch = start.dataloader_num_workers, start.per_device_train_batch_size
    if workers > 0:
        return OomVerdict(reason=reason, output_dir=folder, changes={"dataloader_num_workers": workers // 2})
    if batch > 1:
        smaller = max(size for size in range(1, batch // 2 + 1) if batch % size == 0)
        accumulation = start.gradient_accumulation_steps * batch // smaller
        changes = {"per_device_train_batch_size": smaller, "gradient_accumulation_steps": accumulation}
        return OomVerdict(reason=reason, output_dir=folder, changes=changes)
    return OomVerdict(reason=f"{reason}, with one sample at a time and no worker processes", hopeless=True)


def _orders(verdict: OomVerdict, earlier: RestartOrders | None, checkpoint: Path | None) -> RestartOrders:
    assert verdict.output_dir is not None
    kept = earlier.changes if earlier is not None and earlier.output_dir == str(verdict.output_dir) else {}
    return RestartOrders(
        output_dir=str(verdict.output_dir),
        checkpoint=str(checkpoint) if checkpoint is not None else None,
        changes={**kept, **verdict.changes},
    )


def _announcement(verdict: OomVerdict, orders: RestartOrders, found: Checkpoint, which: str) -> str:
    where = f"resuming from {orders.checkpoint}" if orders.checkpoint else "from the start, for there is no checkpoint to resume from"
    passed = f" (skipped: {'; '.join(found.passed_over)})" if found.passed_over else ""
    settings = f", with {', '.join(f'{key} {value}' for key, value in orders.changes.items())}" if orders.changes else ""
    return f"hfopt: {verdict.reason}. Restart {which}, {where}{passed}{settings}"


def _the_end(verdict: OomVerdict, orders: RestartOrders | None, attempts: int) -> str:
    """What was tried, and what is left to the user."""
    tried = ", ".join(f"{key} {value}" for key, value in orders.changes.items()) if orders is not None and orders.changes else ""
    count = f"{attempts} restart{'s' if attempts != 1 else ''} did not help" + (f" (the last with {tried})" if tried else "")
    left = [] if (orders.changes if orders is not None else {}).get("gradient_checkpointing") else ["gradient_checkpointing: true"]
    left += ["a shorter maximum length", "an 8-bit or paged optimizer (optim: adamw_bnb_8bit)", "LoRA", "a card with more memory"]
    return (
        f"hfopt: {verdict.reason}; {count}, so this is the end. To change: {', '.join(left)}; `hfopt estimate` shows what each would take"
    )
