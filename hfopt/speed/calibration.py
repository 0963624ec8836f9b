"""What a device reached when it was measured here, instead of what a table says of its kind: `hfopt calibrate`.

A few kernels (matrix products by dtype, a large copy, a reduction, many tiny operations) and a few steps of a real Trainer, whose time
says what the host needs for each launch. Kept in the cache folder, one file per device, and used by later plans for the same device
under the same version of torch; a calibration of another card, CPU or torch is named and left alone. Rates were measured at whatever
clock the card sustained, so no power rule is applied on top of them.

`--host` takes what is known of another machine, separated by commas: its cores (`16cores`), what it needs to launch a kernel in the forward
(`30us`), or the JSON that `hfopt calibrate` wrote there, which says both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hfopt.compat.versions import package_version
from hfopt.errors import ConfigError
from hfopt.files import location, write_private
from hfopt.schema import Gpu, Hardware, Host
from hfopt.speed.device_speed import Speed
from hfopt.units import GIB

FORMAT = 1
CPU = "CPU"


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """One device's figures. As JSON it is also a row that can be sent in."""

    device: str  # the catalog's name of the card, or the CPU's own
    kind: str  # cuda or cpu
    torch: str
    transformers: str | None
    cpu_name: str | None
    cores: float
    threads: int | None  # of torch on the CPU
    date: str
    matmul_flops: Mapping[str, float]  # by arithmetic
    memory_bytes_per_s: float
    reduction_bytes_per_s: float
    op_s: float  # one tiny operation, launched and done
    launch_scale: float | None = None  # of a card: what a launch in the Trainer's steps took, against the table's; None: not known
    step_scale: float | None = None  # of a CPU, where host and device are one: the Trainer's step against its prediction by these kernels
    trainer_step_s: float | None = None  # of the step that it was found from
    predicted_step_s: float | None = None  # of the same step, before
    measured_step: str | None = None  # which step that was
    power_limit_w: float | None = None
    driver: str | None = None
    format: int = field(default=FORMAT)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @property
    def words(self) -> str:
        return f"as `hfopt calibrate` measured {'it' if self.kind == 'cuda' else 'this CPU'} on {self.date} with torch {self.torch}"


CalibrateOutput = Calibration | tuple[Calibration, ...]
"""What `hfopt calibrate --json` prints: what was measured now, or with --show all that is kept."""


def folder() -> Path:
    return location("calibration")


def stored() -> tuple[Calibration, ...]:
    """Every calibration that was kept and can be read, by device."""
    found = [_read(path) for path in sorted(folder().glob("*.json"))] if folder().is_dir() else []
    return tuple(one for one in found if one is not None)


def keep(calibration: Calibration) -> Path:
    """Writes it in place of an earlier one of the same device. Raises OSError."""
    path = folder() / f"{calibration.kind}-{_slug(calibration.device)}.json"
    write_private(path, calibration.to_json())
    return path


def clear() -> int:
    """Removes all; the number there was."""
    paths = list(folder().glob("*.json")) if folder().is_dir() else []
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


def from_json(text: str) -> Calibration | None:
    """None where it is none, or one of another format."""
    try:
        data: Any = json.loads(text)
    except ValueError:
        return None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        return None
    try:
        made = Calibration(**{key: value for key, value in data.items() if key != "schema"})
    except TypeError:
        return None
    numbers = (made.memory_bytes_per_s, made.reduction_bytes_per_s, made.op_s, *_values(made.matmul_flops))
    sound = "fp32" in made.matmul_flops and all(isinstance(value, int | float) and value > 0 for value in numbers)
    scales = [scale for scale in (made.launch_scale, made.step_scale) if scale is not None]
    return made if sound and all(isinstance(scale, int | float) and scale > 0 for scale in scales) else None


def unfit(calibration: Calibration, *, threads: int | None = None) -> str | None:
    """Why it is not used with what is installed here; None: it is."""
    torch = package_version("torch")
    if calibration.torch != torch:
        return f"made with torch {calibration.torch}, {torch} is installed"
    if calibration.kind == "cpu" and threads is not None and calibration.threads != threads:
        return f"made with {calibration.threads} threads, {threads} are in use"
    return None


def for_device(gpu: Gpu | None, host: Host, *, threads: int | None = None) -> tuple[Calibration | None, str | None]:
    """(the one to use, a remark on one that is there and is not used)."""
    kind, name = ("cpu", host.cpu_name or CPU) if gpu is None else ("cuda", gpu.catalog_name or gpu.name)
    found = next((one for one in stored() if (one.kind, one.device) == (kind, name)), None)
    why_not = None if found is None else unfit(found, threads=threads)
    if found is None or why_not is None:
        return found, None
    return None, f"a calibration of {name} is not used: {why_not}; run `hfopt calibrate` again"


def calibrated(speed: Speed, made: Calibration) -> Speed:
    """The device with its own figures; what was not measured (attention's and convolutions' share, links) stays."""
    slower = made.step_scale or 1.0
    return replace(
        speed,
        matmul_flops={**speed.matmul_flops, **{name: rate / slower for name, rate in made.matmul_flops.items()}},
        memory_bytes_per_s=made.memory_bytes_per_s / slower,
        reduction_bytes_per_s=made.reduction_bytes_per_s / slower,
        host=speed.host.scaled((made.launch_scale or 1.0) * slower),
        board=None,
    )


def _values(figures: object) -> tuple[Any, ...]:
    return tuple(figures.values()) if isinstance(figures, Mapping) else ("none",)


def _read(path: Path) -> Calibration | None:
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-")[:80]


# ------------------------------------------------------------------------------------------------- another machine: --host

_LAUNCH, _CORES = re.compile(r"(\d+(?:\.\d+)?)\s*[uµμ]s"), re.compile(r"(\d+(?:\.\d+)?)\s*cores?")
RAM_OF_A_CORE = 15 * GIB // 4  # HF Jobs' t4-small and l4x1 (docs/hub/jobs-pricing), Google's n1-standard; AWS's g4dn to g6e have 4 GiB
_HINT = "for example --host 16cores, --host 30us, --host 16cores,30us or the JSON file of `hfopt calibrate` there"


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedHost:
    """The machine a run will be on; None: as here, or as the table has it."""

    cores: float | None = None
    launch_s: float | None = None  # a kernel of the forward
    launch_scale: float | None = None  # against the table
    source: str | None = None  # the file of a calibration


def named_host(text: str | None) -> NamedHost:
    """`--host`, read."""
    host = NamedHost()
    for part in [part.strip() for part in (text or "").split(",") if part.strip()]:
        launch, cores = _LAUNCH.fullmatch(part.lower()), _CORES.fullmatch(part.lower())
        if launch and float(launch[1]) > 0:
            host = replace(host, launch_s=float(launch[1]) * 1e-6)
        elif cores and float(cores[1]) > 0:
            host = replace(host, cores=float(cores[1]))
        elif Path(part).is_file():
            made = _of_file(Path(part))
            host = replace(host, cores=made.cores, launch_scale=made.launch_scale, source=part)
        else:
            raise ConfigError(f"--host {part}: neither a number of cores, a time of a launch nor a file", hint=_HINT)
    return host


def with_host(hardware: Hardware, host: NamedHost) -> Hardware:
    """The same cards beside that host. Another machine has another RAM: as much for a core as rented ones have at least."""
    if host.cores is None:
        return hardware
    here = hardware.host
    ram, free = (int(host.cores * RAM_OF_A_CORE),) * 2 if hardware.hypothetical else (here.ram_bytes, here.ram_free_bytes)
    return replace(hardware, host=Host(cores=host.cores, ram_bytes=ram, ram_free_bytes=free, cpu_name=here.cpu_name))


def _of_file(path: Path) -> Calibration:
    try:
        made = from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--host {path} cannot be read: {error}") from error
    if made is None:
        raise ConfigError(f"--host {path} is no calibration", hint=_HINT)
    return made
