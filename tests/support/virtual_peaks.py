"""Training by the real libraries on the virtual GPU, in a process of its own: what PyTorch's allocator held at the peak of each case."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from hfopt.schema import Gpu
from hfopt.units import GIB


def peaks_of_cases(code: str, argument: str, test_file: str) -> dict[str, tuple[int, int]]:
    """`code` may import the test file; it prints PEAKS and, in JSON, what was allocated and reserved by the name of the case."""
    from hfopt.virtual.environment import environment

    folder = Path(test_file).parent
    env = environment(Gpu(name="Virtual", memory_bytes=16 * GIB, capability=(8, 6), sms=28))
    env["PYTHONPATH"] = f"{env['PYTHONPATH']}:{folder}:{Path(__file__).parent}:{Path(__file__).parents[2]}"
    done = subprocess.run([sys.executable, "-c", code, argument], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, tuple[int, int]] = json.loads(done.stdout.rpartition("PEAKS")[2])
    return found
