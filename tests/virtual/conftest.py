"""Cards to stand in for, and a way to run code on them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from hfopt.schema import Gpu
from hfopt.units import GIB, MIB

OnVirtual = Callable[..., Any]


@pytest.fixture(scope="session")
def card() -> Gpu:
    return Gpu(name="Virtual RTX 3060", memory_bytes=4 * GIB, capability=(8, 6), sms=28, power_limit_w=170)


@pytest.fixture(scope="session")
def on_virtual(card: Gpu) -> OnVirtual:
    """Runs code on the virtual card in a child and returns what it puts into `facts`."""
    from hfopt.virtual.environment import environment

    def run(code: str, *, gpu: Gpu = card, count: int = 1, context_bytes: int = 300 * MIB, **variables: str) -> Any:
        program = f"import json, sys\nfacts = {{}}\n{code}\nsys.stdout.write('FACTS ' + json.dumps(facts))"
        env = environment(gpu, count=count, context_bytes=context_bytes) | variables
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.rpartition("FACTS ")[2])

    return run
