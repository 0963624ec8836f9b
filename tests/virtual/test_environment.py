"""The virtual card as torch and NVML see it: identity, memory, a genuine out-of-memory error, several cards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hfopt.errors import VirtualGpuError
from hfopt.schema import Gpu
from hfopt.units import GIB, MIB
from hfopt.virtual import build
from hfopt.virtual.environment import available, environment

SEEN_BY_TORCH_AND_NVML = """
import os, time, warnings
import pynvml, torch

pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
own = lambda: {p.pid: p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}.get(os.getpid())
used = lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used
facts["before"] = {"used": used(), "own": own(), "load": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
                   "power": pynvml.nvmlDeviceGetPowerUsage(handle)}
properties = torch.cuda.get_device_properties(0)
facts["torch"] = {"name": properties.name, "uuid": f"GPU-{properties.uuid}", "total": properties.total_memory,
                  "capability": torch.cuda.get_device_capability(), "sms": properties.multi_processor_count}
facts["nvml"] = {"name": pynvml.nvmlDeviceGetName(handle), "uuid": pynvml.nvmlDeviceGetUUID(handle),
                 "total": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
                 "capability": pynvml.nvmlDeviceGetCudaComputeCapability(handle),
                 "limit": pynvml.nvmlDeviceGetPowerManagementLimit(handle)}
x = torch.empty(2**30, dtype=torch.uint8, device="cuda")
facts["after"] = {"used": used(), "own": own(), "info": torch.cuda.mem_get_info(), "reserved": torch.cuda.memory_reserved()}
end, had = time.monotonic() + 1.1, time.thread_time()
while time.monotonic() < end:
    x[:16].add_(1)
facts["busy"] = {"load": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu, "power": pynvml.nvmlDeviceGetPowerUsage(handle),
                 "core": (time.thread_time() - had) / 1.1}
try:
    torch.empty(2**32, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    facts["oom"] = str(error)
del x
torch.cuda.empty_cache()
facts["freed"] = used()
"""


@pytest.fixture(scope="module")
def seen(on_virtual: Callable[..., Any]) -> Any:
    return on_virtual(SEEN_BY_TORCH_AND_NVML)


@pytest.mark.virtual_gpu
def test_torch_and_nvml_see_the_same_card(seen: Any, card: Gpu) -> None:
    for side in ("torch", "nvml"):
        assert seen[side]["name"] == card.name
        assert seen[side]["total"] == card.memory_bytes
        assert tuple(seen[side]["capability"]) == card.capability
    assert seen["torch"]["uuid"] == seen["nvml"]["uuid"]
    assert seen["torch"]["sms"] == card.sms
    assert card.power_limit_w is not None
    assert seen["nvml"]["limit"] == card.power_limit_w * 1000


@pytest.mark.virtual_gpu
def test_memory_is_counted_with_the_context(seen: Any, card: Gpu) -> None:
    assert seen["before"]["used"] == 0
    assert seen["before"]["own"] is None
    assert seen["after"]["reserved"] == GIB
    assert seen["after"]["used"] == seen["after"]["own"] == GIB + 300 * MIB
    free, total = seen["after"]["info"]
    assert (free, total) == (card.memory_bytes - GIB - 300 * MIB, card.memory_bytes)
    assert 300 * MIB <= seen["freed"] <= 302 * MIB


@pytest.mark.virtual_gpu
def test_load_and_power_follow_the_kernels(seen: Any) -> None:
    assert seen["before"]["load"] == 0
    share = min(1.0, seen["busy"]["core"])  # of a core that this process had: others may have had the rest
    assert seen["busy"]["load"] > 60 * share
    assert seen["busy"]["power"] > (1 + 3 * share) * seen["before"]["power"]


@pytest.mark.virtual_gpu
def test_running_out_is_torchs_own_error(seen: Any) -> None:
    assert "Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 4.00 GiB" in seen["oom"]
    assert "this process has 1.29 GiB memory in use" in seen["oom"]


@pytest.mark.virtual_gpu
def test_visible_devices_choose_among_several_cards(on_virtual: Callable[..., Any]) -> None:
    code = """
import pynvml, torch
pynvml.nvmlInit()
uuids = [pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
facts["physical"] = uuids
facts["visible"] = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(torch.cuda.device_count())]
torch.empty(2**28, dtype=torch.uint8, device="cuda:1")
facts["used"] = [pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(i)).used for i in range(3)]
"""
    facts = on_virtual(code, count=3, CUDA_VISIBLE_DEVICES="2,0")
    assert len(set(facts["physical"])) == 3
    assert facts["visible"] == [facts["physical"][2], facts["physical"][0]]
    assert facts["used"][0] > 2**28
    assert facts["used"][1] == facts["used"][2] == 0
    by_uuid = on_virtual("import torch\nfacts['n'] = torch.cuda.device_count()", count=3, CUDA_VISIBLE_DEVICES=facts["physical"][1])
    assert by_uuid["n"] == 1


@pytest.mark.virtual_gpu
def test_processes_share_the_card_and_a_killed_one_gives_its_memory_back(card: Gpu, tmp_path: Path) -> None:
    env = environment(card, context_bytes=100 * MIB, state=tmp_path / "board")
    hold = "import sys, torch; x = torch.empty(3 * 2**30, dtype=torch.uint8, device='cuda'); print('held', flush=True); sys.stdin.read()"
    other = "import torch; print(torch.cuda.mem_get_info()[0])"
    holder = subprocess.Popen([sys.executable, "-c", hold], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == "held\n"

        def free_elsewhere() -> int:
            return int(subprocess.run([sys.executable, "-c", other], env=env, capture_output=True, text=True, check=True).stdout)

        assert free_elsewhere() == card.memory_bytes - 3 * GIB - 200 * MIB
        holder.kill()
        holder.wait()
        assert free_elsewhere() == card.memory_bytes - 100 * MIB
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()  # type: ignore[union-attr]
        holder.stdin.close()  # type: ignore[union-attr]


@pytest.mark.virtual_gpu
def test_the_users_own_sitecustomize_still_runs(on_virtual: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.users_own = __file__\n")
    from hfopt.virtual.environment import FIRST, SITE

    code = (
        "import importlib.util\nimportlib.util.find_spec('torch')\n"  # as `import transformers` does before it imports torch
        "import torch\nfacts['own'] = users_own\nfacts['values'] = torch.arange(3, device='cuda').sum().item()"
    )
    facts = on_virtual(code, PYTHONPATH=f"{FIRST}:{SITE}:{tmp_path}")
    assert facts == {"own": str(tmp_path / "sitecustomize.py"), "values": 3}


@pytest.mark.virtual_gpu
def test_expandable_segments_and_a_fork(on_virtual: Callable[..., Any]) -> None:
    code = """
import os, torch
x = torch.empty(2**28, dtype=torch.uint8, device="cuda")
facts["reserved"] = torch.cuda.memory_reserved()
before = torch.cuda.mem_get_info()[0]
child = os.fork()
if not child:
    del x
    os._exit(0)
os.waitpid(child, 0)
facts["unchanged"] = torch.cuda.mem_get_info()[0] == before
del x
torch.cuda.empty_cache()
facts["given_back"] = torch.cuda.mem_get_info()[0] - before
"""
    facts = on_virtual(code, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert facts["unchanged"]
    assert facts["given_back"] == facts["reserved"] >= 2**28


@pytest.mark.virtual_gpu
def test_a_child_forked_before_the_card_is_touched_uses_it(on_virtual: Callable[..., Any]) -> None:
    code = """
import os, torch
reading, writing = os.pipe()
if not os.fork():
    x = torch.ones(2**20, device="cuda").cumsum(0)
    os.write(writing, str(torch.cuda.memory_allocated()).encode())
    os._exit(0)
os.close(writing)
facts["in_the_child"] = int(os.read(reading, 100) or 0)
os.wait()
facts["here"] = torch.ones(8, device="cuda").numel()
"""
    assert on_virtual(code) == {"in_the_child": 4 * 2**20, "here": 8}


def test_only_nvidia_cards_and_a_sane_count() -> None:
    with pytest.raises(VirtualGpuError, match="NVIDIA cards only"):
        environment(Gpu(name="Radeon", vendor="amd", memory_bytes=GIB))
    with pytest.raises(VirtualGpuError, match="1 to 16 cards"):
        environment(Gpu(name="T4", memory_bytes=GIB, capability=(7, 5)), count=17)


@pytest.mark.parametrize(("platform", "name"), [("darwin", "macOS"), ("win32", "Windows")])
def test_other_systems_get_a_sentence(platform: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.sys, "platform", platform)  # type: ignore[attr-defined]
    assert available() == f"the virtual GPU runs on Linux only; this is {name}"


@pytest.mark.virtual_gpu
def test_a_card_torch_was_not_built_for_fails_as_it_would(on_virtual: Callable[..., Any]) -> None:
    code = """
import torch
try:
    torch.zeros(4, device="cuda").add_(1)
except RuntimeError as error:
    facts["error"] = str(error)
facts["built_for"] = torch._C._cuda_getArchFlags().split()
"""
    kepler = Gpu(name="Tesla K80", memory_bytes=12 * GIB, capability=(3, 7), sms=13)
    facts = on_virtual(code, gpu=kepler, HFOPT_VIRTUAL_STRICT="1")
    assert "no kernel image is available for execution on the device" in facts["error"]
    oldest = min(int(name.split("_")[1].rstrip("a")) for name in facts["built_for"])
    served = Gpu(name="served", memory_bytes=GIB, capability=(oldest // 10, oldest % 10))
    assert "error" not in on_virtual(code, gpu=served, HFOPT_VIRTUAL_STRICT="1")
    assert "error" not in on_virtual(code, gpu=kepler)
