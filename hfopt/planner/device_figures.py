"""How fast the device and its host are taken to be: by the tables, as calibrated here, or for a host that the user names.

`--host` takes what is known of the machine the run will be on, separated by commas: its cores (`16cores`), what it needs to launch a
kernel in the forward (`30us`), or the JSON that `hfopt calibrate` wrote there, which says both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from hfopt.errors import ConfigError
from hfopt.schema import Gpu, Hardware, Host
from hfopt.speed.calibration import Calibration, calibrated, for_device, from_json, scaled
from hfopt.speed.device_speed import Speed
from hfopt.units import GIB

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


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFigures:
    speed: Speed
    launches: str  # whose host the launches were priced for; "" on a CPU, which launches nothing
    notes: tuple[str, ...] = ()
    calibrated: str | None = None  # the day on which this device was measured


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


def device_figures(gpu: Gpu | None, host: Host, table: Speed, named: NamedHost, *, threads: int | None = None) -> DeviceFigures:
    """The table's figures, replaced by what was measured on this device and by what is known of the host."""
    made, remark = for_device(gpu, host, threads=threads)
    speed = table if made is None else calibrated(table, made)
    notes = [remark] if remark else []
    if made is not None:
        notes.append(f"speeds of {made.device} {made.words}")
    day = None if made is None else made.date
    if gpu is None:
        return DeviceFigures(speed=speed, launches="", notes=tuple(notes), calibrated=day)
    whose = "a server's CPU" if made is None or made.launch_scale is None else "this host as calibrated"
    if named.launch_scale is not None:
        speed, whose = replace(speed, host=scaled(table.host, named.launch_scale)), f"the host of {named.source}"
    elif named.source is not None:
        notes.append(
            f"--host {named.source} holds no cost of a launch (no card was measured there): its cores are used, the launches are not"
        )
    if named.launch_s is not None:
        speed, whose = replace(speed, host=scaled(table.host, named.launch_s / table.host.forward_s)), "the host as named"
    launches = f"{whose} ({speed.host.forward_s * 1e6:.0f} µs each in forward)"
    return DeviceFigures(speed=speed, launches=launches, notes=tuple(notes), calibrated=day)


def _of_file(path: Path) -> Calibration:
    try:
        made = from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--host {path} cannot be read: {error}") from error
    if made is None:
        raise ConfigError(f"--host {path} is no calibration", hint=_HINT)
    return made
