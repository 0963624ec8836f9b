"""How long `hfopt plan` takes for eight cards, and how much memory: a 70B model with LoRA and an 8B model in full, as a user runs it.

usage: python benchmarks/multi_gpu_plan.py

Wall time, processor time and the largest resident size of the command with its children. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LIMIT_S, LIMIT_GIB = 60, 6
COMMON = "output_dir: out\nmax_seq_length: 2048\nper_device_train_batch_size: 1\nbf16: true\n"
CONFIGS = {
    "llama-8b-full": f"model_name_or_path: meta-llama/Llama-3.1-8B\n{COMMON}gradient_accumulation_steps: 16\n",
    "llama-70b-lora": f"model_name_or_path: meta-llama/Llama-3.1-70B\n{COMMON}gradient_accumulation_steps: 8\n"
    "use_peft: true\nlora_r: 16\nlora_target_modules: all-linear\n",
}


def planned(text: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config, answer = Path(folder, "train.yaml"), Path(folder, "plan.json")
        config.write_text(text)
        command = [sys.executable, "-m", "hfopt", "plan", str(config), "--gpu", "A100 SXM 80GB", "--num-gpus", "8"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        subprocess.run([*command, "-q", "-o", str(Path(folder, "out.yaml")), "--json", str(answer)], check=True)
        wall_s = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        plan = json.loads(answer.read_text())
    return {
        "wall_s": round(wall_s, 1),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "peak_rss_gib": round(after.ru_maxrss / (1 << 20), 2),
        "engine": plan["engine"]["name"],
        "batch": plan["after"]["per_device_batch"],
        "device_gib": round(plan["after"]["peak_device_bytes"] / (1 << 30), 1),
    }


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    result: dict[str, Any] = {}
    for name, text in CONFIGS.items():
        result[name] = planned(text)
        print(f"{name:16} {result[name]}", flush=True)
    result["within"] = all(row["wall_s"] <= LIMIT_S and row["peak_rss_gib"] <= LIMIT_GIB for row in result.values())
    result["load"] = round(os.getloadavg()[0], 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
