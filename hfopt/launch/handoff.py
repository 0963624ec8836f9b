"""What `hfopt run` was told, carried to the user's processes in one environment variable."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import Any, Literal

from hfopt.errors import ConfigError
from hfopt.schema import ALLOWABLE

VARIABLE = "HFOPT_RUN"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    mode: Literal["train", "plan_only", "dry_run"] = "train"
    plan: bool = True
    fallback: bool = True
    keep: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    headroom: float = 0.06
    prepare: str | None = None
    """Who prepares a Trainer before it trains, as 'module:function': this stage may not know the planner."""

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
        """Those of this process; the defaults, which plan nothing, where nobody set any."""
        text = os.environ.get(VARIABLE)
        told: dict[str, Any] = json.loads(text) if text else {}
        for name in ("keep", "allow"):
            told[name] = tuple(told.get(name, ()))
        return cls(**told)
