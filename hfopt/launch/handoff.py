"""What passes between `hfopt run` and the processes it starts: options and orders go in by environment, news comes out by file.

Into a process go `RunOptions`, what the command line asked for, and, when it was started again, `RestartOrders`: which output folder, which
checkpoint, which settings. Out of it come, beside the file that the environment names, a `RunStart` when training begins, `NextSettings`
whenever smaller pieces were needed, and a `RunFailure` when the process cannot go on. Each is written and read here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from hfopt.errors import ConfigError
from hfopt.files import write_whole
from hfopt.monitor.fault_guard import to_stderr
from hfopt.schema import ALLOWABLE, NextSettings, RunFailure

OPTIONS, ORDERS = "HFOPT_RUN", "HFOPT_ORDERS"
HANDOFF = "HFOPT_HANDOFF"
"""Names the file; sitecustomize looks for the variable before anything of hfopt is imported."""
HOME = "HFOPT_HOME"
"""Names the folder that hfopt is in, for a child that has none of its own. On the path it would bring its neighbours along."""
_CHECKPOINT = re.compile(r"^checkpoint-(\d+)$")
_Note = TypeVar("_Note", "RunStart", NextSettings, RunFailure)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """The options of `hfopt run`. The defaults, where none were given, plan nothing."""

    mode: Literal["train", "plan_only", "dry_run"] = "train"
    plan: bool = False
    fallback: bool = True
    keep: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    headroom: float = 0.06
    hang_after_s: float = 0.0  # without a step; 0: nobody looks

    def __post_init__(self) -> None:
        unknown = sorted(set(self.allow) - set(ALLOWABLE))
        if unknown:
            raise ConfigError(f"--allow {unknown[0]} is not known", hint=f"can be allowed: {', '.join(ALLOWABLE)}")
        if not 0 <= self.headroom < 1:
            raise ConfigError(f"--headroom {self.headroom} is no share", hint="give a number from 0 to 0.99; 0.06 leaves 6 % free")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def here(cls) -> RunOptions:
        """Those of this process."""
        text = os.environ.get(OPTIONS)
        given: dict[str, Any] = json.loads(text) if text else {}
        for name in ("keep", "allow"):
            given[name] = tuple(given.get(name, ()))
        return cls(**given)


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartOrders:
    """What a process that was started again does otherwise, for the output folder whose run failed and no other."""

    output_dir: str
    checkpoint: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({"output_dir": self.output_dir, "checkpoint": self.checkpoint, "changes": dict(self.changes)})

    @classmethod
    def here(cls, output_dir: str) -> RestartOrders | None:
        """Those of this process for a Trainer that writes there."""
        text = os.environ.get(ORDERS)
        orders = cls(**json.loads(text)) if text else None
        if orders is None or Path(orders.output_dir).resolve() != Path(output_dir).resolve():
            return None
        return orders


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStart:
    """The settings a Trainer begins with: what the supervisor needs when the process is killed and can say nothing."""

    output_dir: str
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    dataloader_num_workers: int
    earlier: tuple[str, ...] = ()  # stamps of checkpoints that are another run's

    @classmethod
    def of(cls, args: Any, resumed: Any = None) -> RunStart:
        """The folder as the supervisor can find it: a script may have changed its working directory. `resumed`: what train() was given."""
        stated = {item.name: getattr(args, item.name) for item in dataclasses.fields(cls) if item.name != "earlier"}
        folder = Path(args.output_dir).resolve()
        return cls(**{**stated, "output_dir": str(folder), "earlier": _earlier(folder, resumed)})


def stamp_of(checkpoint: Path) -> str:
    """A checkpoint and when it was finished: one that is written again is another one."""
    try:
        return f"{checkpoint.name} {(checkpoint / 'trainer_state.json').stat().st_mtime_ns}"
    except OSError:
        return ""


def _earlier(folder: Path, resumed: Any) -> tuple[str, ...]:
    """All that are there, but what the run itself resumes from and those before it."""
    if resumed is True:  # from the newest
        return ()
    last = 0
    if isinstance(resumed, str | os.PathLike) and (own := Path(resumed).resolve()).parent == folder:
        match = _CHECKPOINT.match(own.name)
        last = int(match[1]) if match else 0
    try:
        found = [entry for entry in folder.iterdir() if (match := _CHECKPOINT.match(entry.name)) and int(match[1]) > last]
    except OSError:
        return ()
    return tuple(stamp for entry in found if (stamp := stamp_of(entry)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Handoff:
    """The files by which a process tells its supervisor; the ranks of a run share them, and the last word stands."""

    path: Path

    @classmethod
    def here(cls) -> Handoff | None:
        """None where nobody supervises this process."""
        target = os.environ.get(HANDOFF)
        return cls(path=Path(target)) if target is not None else None

    def started(self, start: RunStart) -> None:
        self._tell(".alive", start)

    def start_again_with(self, settings: NextSettings) -> None:
        self._write(".settings", settings)

    def failed(self, failure: RunFailure) -> None:
        self._tell("", failure)

    def _tell(self, suffix: str, note: RunStart | RunFailure) -> None:
        """A folder that was swept away, or a full disk, ends no training: it only cannot be restarted."""
        try:
            self._write(suffix, note)
        except OSError as error:
            to_stderr(f"hfopt: the supervisor cannot be reached ({error.strerror}), so this run would not be restarted")

    def has_failed(self) -> bool:
        return self.path.exists()

    @property
    def start(self) -> RunStart | None:
        return self._read(".alive", RunStart)

    @property
    def settings(self) -> NextSettings | None:
        return self._read(".settings", NextSettings)

    @property
    def failure(self) -> RunFailure | None:
        return self._read("", RunFailure)

    def _place(self, suffix: str) -> Path:
        return self.path.with_name(f"{self.path.name}{suffix}")

    def _write(self, suffix: str, note: RunStart | NextSettings | RunFailure) -> None:
        write_whole(self._place(suffix), json.dumps(dataclasses.asdict(note)))

    def _read(self, suffix: str, kind: type[_Note]) -> _Note | None:
        try:
            stored = json.loads(self._place(suffix).read_text())
            fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()}
            return kind(**fields)
        except FileNotFoundError:
            return None
