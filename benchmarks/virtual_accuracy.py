"""The estimate against PyTorch's own allocator: whole HF Trainer runs on the virtual GPU, at batch sizes that were never traced.

usage: python benchmarks/virtual_accuracy.py [--only TEXT] [--every N] [--log FILE] [--python PYTHON]

Seven model families × fp32, bf16, fp16 × checkpointing × accumulation 1 and 4, and some further models and optimizers. What is compared
are torch.cuda.max_memory_allocated and max_memory_reserved; nothing here was measured on a real card. With --log the virtual runs are
kept (not the estimates, which are made anew), and a second run goes on where the first was stopped. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cases import Case, estimated_curve

from hfopt.errors import HfoptError
from hfopt.schema import Gpu
from hfopt.units import GIB, MIB
from hfopt.virtual.environment import environment

HERE = Path(__file__).parent
CARD = Gpu(name="Virtual card", memory_bytes=200 * GIB, capability=(8, 6), sms=28)

FAMILIES = (
    Case(model="google-bert/bert-base-uncased", batch=13, length=128),
    Case(model="openai-community/gpt2", batch=5, length=256),
    Case(model="google-t5/t5-small", batch=9, length=128),
    Case(model="meta-llama/Llama-3.2-1B", batch=5, length=256, overrides={"num_hidden_layers": 4}, weights_dtype="float32"),
    Case(model="Qwen/Qwen2.5-0.5B", batch=4, length=256, overrides={"num_hidden_layers": 6}, weights_dtype="float32"),
    Case(model="google/vit-base-patch16-224", batch=11),
    Case(model="facebook/wav2vec2-base", batch=5, audio_seconds=3.0, task="audio_classification", overrides={"layerdrop": 0.0}),
)
FURTHER = (
    Case(model="facebook/opt-125m", batch=5, length=200),
    Case(model="facebook/bart-base", batch=5, length=128),
    Case(model="openai/whisper-tiny", batch=3),
    Case(model="microsoft/swin-tiny-patch4-window7-224", batch=5),
    Case(model="microsoft/deberta-v3-small", batch=5, length=128),
    Case(model="google/gemma-3-270m", batch=3, length=128),
    Case(model="mistralai/Mistral-7B-v0.1", batch=3, length=128, overrides={"num_hidden_layers": 2}, lora=True),
    Case(model="meta-llama/Llama-3.2-1B", batch=3, length=256, overrides={"num_hidden_layers": 4}, weights_dtype="bfloat16"),
    Case(model="openai-community/gpt2", batch=5, length=256, optim="adamw_torch_fused"),
    Case(model="openai-community/gpt2", batch=5, length=256, optim="adafactor"),
    Case(model="openai-community/gpt2", batch=5, length=256, optim="sgd", max_grad_norm=0.0),
    Case(model="openai-community/gpt2", batch=5, length=256, label_smoothing=0.1),
)

VISION_LANGUAGE = (
    Case(model="tiny:smolvlm", batch=2, accumulation=12, optim="sgd", data={"image_size": 1024}),  # the inputs are a tenth of the peak
    Case(model="tiny:qwen2_vl", batch=4, data={"image_size": 420}),
    Case(model="tiny:qwen2_vl", batch=4, data={"image_size": 420, "images_per_sample": 2}, precision="bf16"),
    Case(model="tiny:qwen2_5_vl", batch=4, data={"image_size": 420}),
    Case(model="tiny:qwen3_vl", batch=4, data={"max_pixels": 200704}),
    Case(model="tiny:llava", batch=5),
    Case(model="tiny:llava_next", batch=4, data={"image_size": 600}),
    Case(model="tiny:paligemma", batch=5),
    Case(model="tiny:idefics3", batch=3, data={"image_size": 700}),
    Case(model="tiny:smolvlm", batch=4),
    Case(model="tiny:gemma3", batch=5),
    Case(model="tiny:mllama", batch=5),
)

OTHER_INPUTS = (
    Case(model="tiny:detr", batch=4, data={"image_size": 320}),
    Case(model="tiny:rt_detr", batch=4, data={"image_size": 320}),
    Case(model="tiny:yolos", batch=4, data={"image_size": 320}),
    Case(model="tiny:videomae", batch=5),
    Case(model="tiny:timesformer", batch=5),
    Case(model="tiny:vivit", batch=5),
    Case(model="tiny:patchtst", batch=13),
    Case(model="tiny:patchtst_classifier", batch=13),
    Case(model="tiny:patchtsmixer", batch=13),
    Case(model="tiny:informer", batch=13),
    Case(model="tiny:time_series_transformer", batch=13),
    Case(model="tiny:wav2vec2", batch=5, audio_seconds=3.0),
    Case(model="tiny:hubert", batch=5, audio_seconds=3.0),
    Case(model="tiny:wavlm", batch=5, audio_seconds=3.0),
    Case(model="tiny:ast", batch=5),
    Case(model="tiny:whisper_classifier", batch=5),
    Case(model="tiny:speech_to_text", batch=5, audio_seconds=6.0),
    Case(model="tiny:m2m_100", batch=9, length=128),
    Case(model="tiny:longformer", batch=5, length=512),
    Case(model="tiny:longformer_classifier", batch=5, length=512),
    Case(model="tiny:xlnet", batch=5, length=256),
    Case(model="tiny:falcon", batch=5, length=256),
    Case(model="tiny:falcon_alibi", batch=5, length=256),
    Case(model="tiny:falcon_new", batch=5, length=256),
)
STATE_SPACE = tuple(
    Case(model=f"tiny:{name}", batch=5, length=200)
    for name in ("falcon_h1", "bamba", "lfm2", "zamba", "zamba2", "jamba", "mamba", "mamba2", "granitemoehybrid")
)
ENCODERS = tuple(
    Case(model=f"tiny:{name}", batch=5, length=256)
    for name in ("mpnet", "modernbert", "deberta", "deberta_v2", "xlnet_classifier", "electra", "funnel", "led")
)


def matrix() -> Iterator[Case]:
    for case, precision, checkpointing, accumulation in itertools.product(FAMILIES, ("fp32", "bf16", "fp16"), (False, True), (1, 4)):
        yield replace(case, precision=precision, checkpointing=checkpointing, accumulation=accumulation)
    yield from FURTHER
    yield from VISION_LANGUAGE
    yield from OTHER_INPUTS
    yield from STATE_SPACE
    yield from ENCODERS


class VirtualCard:
    """Runs cases in one worker on the virtual GPU; a worker that dies takes its case with it and the next case starts another."""

    def __init__(self, python: str, log: Path | None) -> None:
        self._env = environment(CARD, python=python)
        self._env["PYTHONPATH"] = f"{HERE.parent}:{HERE}:{self._env['PYTHONPATH']}"
        self._env["HF_HUB_OFFLINE"] = "1"
        self._command = [python, str(HERE / "virtual_worker.py")]
        self._log = log
        self._known: dict[str, dict[str, Any]] = {}
        if log is not None and log.exists():
            entries = map(json.loads, log.read_text().splitlines())
            self._known = {entry["case"]: entry["real"] for entry in entries}
        self._worker: subprocess.Popen[str] | None = None

    def run(self, case: Case) -> dict[str, Any]:
        key = json.dumps(asdict(case), sort_keys=True)
        if key not in self._known:
            self._known[key] = self._ask(key)
            if self._log is not None:
                with self._log.open("a") as log:
                    log.write(json.dumps({"case": key, "real": self._known[key]}) + "\n")
        return self._known[key]

    def _ask(self, line: str) -> dict[str, Any]:
        if self._worker is None:
            self._worker = subprocess.Popen(
                self._command, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        self._worker.stdin.write(line + "\n")
        self._worker.stdin.flush()
        answer = self._worker.stdout.readline()
        if answer:
            return json.loads(answer)  # type: ignore[no-any-return]
        code = self._worker.wait()
        self._worker = None
        return {"failed": f"the worker ended with {code}"}

    def close(self) -> None:
        if self._worker is not None:
            self._worker.communicate()


def compare(case: Case, real: dict[str, Any]) -> tuple[float, float] | str:
    """Errors of allocated and reserved in per cent, or why there are none."""
    if "failed" in real:
        return f"not run: {real['failed']}"
    try:
        peak = estimated_curve(case).peak(case.batch)
    except HfoptError as error:
        return f"not traced: {error}"
    return 100 * (peak.allocated_bytes / real["allocated"] - 1), 100 * (peak.reserved_bytes / real["reserved"] - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose title contains this")
    parser.add_argument("--python", default=sys.executable, help="a Python with the CUDA build of torch")
    parser.add_argument("--log", type=Path, help="virtual runs are kept here, one JSON object a line")
    parser.add_argument("--every", type=int, default=1, help="take each n-th case only")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    cases = [case for case in matrix() if arguments.only in case.title][:: arguments.every]
    errors: list[tuple[float, float]] = []
    card = VirtualCard(arguments.python, arguments.log)
    for case in cases:
        real = card.run(case)
        found = compare(case, real)
        if isinstance(found, str):
            print(f"{case.title:70} {found}", flush=True)
            continue
        errors.append(found)
        allocated_mib, reserved_mib = real["allocated"] / MIB, real["reserved"] / MIB
        shown = f"allocated {allocated_mib:8.0f} MiB {found[0]:+6.2f} %   reserved {reserved_mib:8.0f} MiB {found[1]:+6.2f} %"
        print(f"{case.title:70} {shown}", flush=True)
    card.close()
    allocated, reserved = ([abs(pair[index]) for pair in errors] for index in (0, 1))
    result = {
        "n": len(errors),
        "missing": len(cases) - len(errors),
        "allocated_within_half_pct_share": sum(error <= 0.5 for error in allocated) / len(errors),
        "allocated_max_pct": max(allocated),
        "reserved_within_3pct_share": sum(error <= 3 for error in reserved) / len(errors),
        "reserved_max_pct": max(reserved),
    }
    print(json.dumps({key: round(value, 4) for key, value in result.items()}))


if __name__ == "__main__":
    main()
