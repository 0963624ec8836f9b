"""What ranks tell each other in Python objects is true on virtual cards too: rank 0's plan reaches the others that way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hfopt.schema import Gpu
from hfopt.units import MIB
from hfopt.virtual.environment import environment

RANK = """
import json, pathlib, sys
import torch.distributed as dist
from accelerate.utils import broadcast_object_list, gather_object

dist.init_process_group("nccl")
rank = dist.get_rank()
told = [{"plan": [rank, "of the first"]}]
dist.broadcast_object_list(told, src=0, device="cuda")
by_accelerate = broadcast_object_list([f"rank {rank}"], from_process=1)
pair = dist.new_group([0, 1], backend="nccl")
everyone = [None, None]
dist.all_gather_object(everyone, {"rank": rank}, group=pair)
scattered = [None]
dist.scatter_object_list(scattered, ["for 0", "for 1"] if rank == 0 else None, src=0)
facts = {"told": told, "by_accelerate": by_accelerate, "everyone": everyone, "scattered": scattered, "gathered": gather_object([rank * 10])}
pathlib.Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(facts))
dist.destroy_process_group()
"""


@pytest.mark.virtual_gpu
def test_objects_reach_the_other_rank(tmp_path: Path, card: Gpu) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script), str(tmp_path)]
    env = environment(card, count=2, context_bytes=300 * MIB)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {
            "told": [{"plan": [0, "of the first"]}],
            "by_accelerate": ["rank 1"],
            "everyone": [{"rank": 0}, {"rank": 1}],
            "scattered": [f"for {rank}"],
            "gathered": [0, 10],
        }
