"""What was asked: the options of `hfopt plan`, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hfopt.config.training_arguments import ATTENTION
from hfopt.config.translation import read_accelerate_file
from hfopt.errors import ConfigError
from hfopt.facts.argument_effects import as_of
from hfopt.schema import ALLOWABLE, Task
from hfopt.speed.calibration import named_host
from hfopt.units import parse_rate

LrScaling = Literal["none", "sqrt", "linear"]
Progress = Callable[[str], None]
LINKS = ("nvlink", "pcie", "network")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The user's wishes; None means: as the config and the machine say."""

    gpu: str | None = None
    vram_gib: float | None = None
    num_gpus: int | None = None
    model: str | None = None
    like: str | None = None  # a known model of the same architecture, for one whose config is not to be found
    model_from: Path | None = None  # another YAML, which names the model
    seq_len: int | None = None
    lengths: tuple[int, ...] = ()
    samples: int | None = None  # of the training data
    task: Task | None = None
    section: str | None = None
    effective_batch: int | None = None
    lr_scaling: LrScaling = "none"
    keep: frozenset[str] = frozenset()
    headroom: float = 0.06
    allow: frozenset[str] = frozenset()
    dry_run: bool | None = None  # None: on the device that is here; for a card that is not, where torch must be imported anyway
    trust_remote_code: bool = False
    nodes: int = 1
    link: str | None = None  # nvlink, pcie or network, with a rate or without: network:400Gbit/s
    host: str | None = None  # the machine the run will be on: 16cores, 30us, or the JSON of its calibration
    engine: str | None = None  # a name of `planner.engines`; None: the cheapest that fits
    accelerate: Path | None = None  # a file of `accelerate config`: engine, processes and precision
    assume_zero: int | None = None  # the stage of a DeepSpeed config whose file is not there
    model_parallel: int = 1  # ranks that share their samples: tensor, sequence, context parallel
    charts: bool = True  # what a page draws costs dozens of replays: not where nobody draws one
    for_transformers: str | None = None  # the version the file is written for; None: the installed one
    own_process: bool = False  # nothing else here needs transformers whole, so it may be imported lean

    def __post_init__(self) -> None:
        unknown = sorted(self.allow - set(ALLOWABLE))
        if unknown:
            raise ConfigError(f"--allow {unknown[0]} is not known", hint=f"can be allowed: {', '.join(ALLOWABLE)}")
        if not 0 <= self.headroom < 1:
            raise ConfigError(f"--headroom {self.headroom} is no share", hint="give a number from 0 to 0.99; 0.06 leaves 6 % free")
        if self.effective_batch is not None and self.effective_batch < 1:
            raise ConfigError(f"--effective-batch {self.effective_batch}: a batch has at least one sample")
        if self.seq_len is not None and self.seq_len < 1:
            raise ConfigError(f"--seq-len {self.seq_len}: a sequence has at least one token")
        if self.nodes < 1:
            raise ConfigError(f"--nodes {self.nodes}: there is at least one machine")
        if self.assume_zero not in (None, 1, 2, 3):
            raise ConfigError(f"--assume-zero {self.assume_zero} is no stage of ZeRO", hint="1, 2 or 3")
        if self.model_parallel < 1:
            raise ConfigError(f"--model-parallel {self.model_parallel}: a group has at least one device")
        self.link_rate  # noqa: B018 - a bad one is said now
        named_host(self.host)
        for key in self.allow - {"accumulation", ATTENTION} if self.for_transformers is not None else ():
            if key not in as_of(self.for_transformers).fields:
                raise ConfigError(f"--allow {key}: transformers {self.for_transformers} has no such key")
        as_of(self.for_transformers)

    @property
    def link_rate(self) -> tuple[str, float | None] | None:
        """The kind of link and its bytes/s, where they were given."""
        if self.link is None:
            return None
        kind, _, rate = self.link.partition(":")
        kind = kind.lower()
        if kind not in LINKS:
            raise ConfigError(
                f"--link {self.link} is not known", hint=f"one of {', '.join(LINKS)}, with a rate if you know it: network:400Gbit/s"
            )
        try:
            return kind, parse_rate(rate) if rate else None
        except ValueError as error:
            raise ConfigError(f"--link {self.link}: {error}") from error


def launched(request: Request) -> Request:
    """With the processes and machines that the file of `accelerate config` states, where the request does not."""
    if request.accelerate is None:
        return request
    file = read_accelerate_file(request.accelerate)
    nodes = request.nodes if request.nodes > 1 else file.machines
    return replace(request, nodes=nodes, num_gpus=request.num_gpus or file.per_machine)
