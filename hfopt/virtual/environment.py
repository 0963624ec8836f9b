"""The environment of a process that sees the virtual GPU instead of whatever card is there.

    subprocess.run([sys.executable, "train.py"], env=environment(gpu))

The child's torch, pynvml and nvidia-smi-like readers find `count` cards with the name, memory and capability of `gpu`.
"""

from __future__ import annotations

import atexit
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from hfopt import files
from hfopt.errors import VirtualGpuError
from hfopt.schema import Gpu
from hfopt.virtual import build
from hfopt.virtual.build import find_toolchain, libraries

SITE = Path(__file__).parent / "site"
"""What the child imports by name; `FIRST` holds the sitecustomize that does so."""
FIRST = Path(__file__).parents[1] / "site"
MAX_COUNT = 16
_DEFAULT_SMS, _DEFAULT_POWER_LIMIT_W = 28, 250
_STALE_S = 24 * 3600


def available(python: str | None = None) -> str | None:
    """None when the virtual GPU can run here, else the sentence that says why not. Builds nothing."""
    try:
        find_toolchain(python)
    except VirtualGpuError as error:
        return str(error)
    return None


def environment(
    gpu: Gpu,
    *,
    count: int = 1,
    context_bytes: int = 0,
    state: Path | None = None,
    base: Mapping[str, str] | None = None,
    python: str | None = None,
) -> dict[str, str]:
    """The whole environment for a child: `base` (this process's by default) and the virtual card on top.

    context_bytes: what the CUDA context takes of the card in each process that uses it (`hfopt.memory.step_memory`).
    state: the file all processes of this launch share; by default a new one, removed when this process ends.
    python: the interpreter the child runs, when it is not this one.
    """
    _check(gpu, count)
    assert gpu.capability is not None
    toolchain = find_toolchain(python)
    built = libraries(toolchain)
    env = dict(os.environ if base is None else base)
    env.update(
        HFOPT_VIRTUAL_NAME=gpu.name,
        HFOPT_VIRTUAL_MEMORY_BYTES=str(gpu.memory_bytes),
        HFOPT_VIRTUAL_USABLE_BYTES=str(gpu.usable_bytes or gpu.memory_bytes),
        HFOPT_VIRTUAL_CONTEXT_BYTES=str(context_bytes),
        HFOPT_VIRTUAL_CAPABILITY="{}.{}".format(*gpu.capability),
        HFOPT_VIRTUAL_SMS=str(gpu.sms or _DEFAULT_SMS),
        HFOPT_VIRTUAL_POWER_LIMIT_W=str(round(gpu.power_limit_w or _DEFAULT_POWER_LIMIT_W)),
        HFOPT_VIRTUAL_COUNT=str(count),
        HFOPT_VIRTUAL_STATE=str(state or _new_state()),
        LD_PRELOAD=_joined(f"{built.cuda}:{built.nvml}", env.get("LD_PRELOAD")),
        PYTHONPATH=_joined(f"{FIRST}:{SITE}", env.get("PYTHONPATH")),
    )
    env.update(build.variables(toolchain.torch, built.cuda.parent, env, python))
    env.pop("CUDA_VISIBLE_DEVICES", None)  # it names cards of the real machine
    return env


def _check(gpu: Gpu, count: int) -> None:
    if gpu.vendor != "nvidia" or gpu.capability is None:
        raise VirtualGpuError(f"the virtual GPU stands in for NVIDIA cards only; {gpu.name} is not one whose compute capability is known")
    if not 1 <= count <= MAX_COUNT:
        raise VirtualGpuError(f"the virtual GPU has 1 to {MAX_COUNT} cards, not {count}")


def _joined(first: str, rest: str | None) -> str:
    return f"{first}:{rest}" if rest else first


def _new_state() -> Path:
    """A name for the shared file; the library creates it. What a killed launcher left behind is swept here a day later."""
    try:
        folder = files.make_private(files.own_temporary())
    except OSError as error:
        raise VirtualGpuError(f"cannot use {files.own_temporary()}: {error.strerror}", hint="set TMPDIR to a folder of your own") from error
    for old in folder.glob("board-*"):
        try:
            if time.time() - old.stat().st_mtime > _STALE_S:
                old.unlink()
        except FileNotFoundError:
            continue
    state = folder / f"board-{uuid.uuid4().hex}"
    atexit.register(state.unlink, missing_ok=True)
    return state
