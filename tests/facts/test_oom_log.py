"""Logs with an out-of-memory error, in the forms of public issues: phase and cause, the figures, and what hostile text may not do."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hfopt.facts.log_text import MOST_BYTES, LogLine, is_text, read_lines, shown
from hfopt.facts.oom_advice import general_changes, reasons_of
from hfopt.facts.oom_log import _LONGEST_MESSAGE, _message, fault_beside_memory, read_oom
from hfopt.facts.oom_messages import size_of
from hfopt.schema import OomReport
from hfopt.units import GIB, MIB

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LOGS: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("oom_logs.toml").read_text(encoding="utf-8"))["log"]
CUDA = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of which "
    "1.00 GiB is free. "
    "Including non-PyTorch memory, this process has 22.64 GiB memory in use. Of the allocated memory 21.90 GiB is "
    "allocated by PyTorch, and "
    "150.00 MiB is reserved by PyTorch but unallocated."
)
BACKWARD = (
    'Traceback (most recent call last):\n  File "/env/transformers/trainer.py", line 3782, in training_step\n'
    '    self.accelerator.backward(loss, **kwargs)\n  File "/env/torch/_tensor.py", line 624, in backward\n    torch.autograd.backward(\n'
)


def read(text: str) -> OomReport:
    report = read_oom(read_lines(text.encode()))
    assert report is not None
    return report


def test_there_are_enough_of_them() -> None:
    assert len(LOGS) >= 40 and len({log["source"] for log in LOGS}) == len(LOGS)


@pytest.mark.parametrize("log", LOGS, ids=[log["source"].removeprefix("https://github.com/") for log in LOGS])
def test_phase_and_cause_are_those_of_the_thread(log: dict[str, Any]) -> None:
    report = read(log["text"])
    assert (report.cause, report.phase) == (log["cause"], log["phase"])
    assert report.certain is log.get("certain", True)
    if "ranks" in log:
        assert list(report.ranks) == log["ranks"]
    if "requested_gib" in log:
        assert report.figures.requested_bytes == pytest.approx(log["requested_gib"] * GIB, rel=1e-3)
    assert all(reasons_of(report)) and general_changes(report)


@pytest.mark.parametrize(
    ("text", "cause", "phase"),
    [
        ("slurmstepd: error: Job 123 exceeded memory limit (68000000 > 67108864), being killed", "host_killed", "unknown"),
        ("=>> PBS: job killed: mem 68000000kb exceeded limit 67108864kb", "host_killed", "unknown"),
        ("TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.", "host_killed", "unknown"),
        ("Your notebook tried to allocate more memory than is available. It has restarted.", "host_killed", "unknown"),
        (
            "Map (num_proc=16):  10%|#  | 1000/10000\nOne of the subprocesses has abruptly died during map operation.To debug the error, "
            "disable multiprocessing.",
            "host_killed",
            "data",
        ),
        (
            "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc 6291456 bytes",
            "communication",
            "communication",
        ),
        ("zsh: killed     python train.py", "host_killed", "unknown"),
        ("      Reason:       OOMKilled\n      Exit Code:    137", "host_killed", "unknown"),
        ("slurmstepd: error: Exceeded job memory limit", "host_killed", "unknown"),
        ("RuntimeError: No executable batch size found, reached zero.", "device_full", "unknown"),
        ("numpy.core._exceptions._ArrayMemoryError: Unable to allocate 29.8 GiB for an array with shape (4, 5)", "host", "unknown"),
        (
            '  File "/usr/lib/python3.10/multiprocessing/popen_fork.py", line 66, in _launch\nOSError: [Errno 12] Cannot allocate memory',
            "host",
            "data",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Rejected by the per_process_memory_fraction limit. Requested size: 1.00 GiB",
            "limit",
            "unknown",
        ),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "library", "unknown"),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.", "device_full", "unknown"),
        ("DataLoader worker (pid(s) 3216) exited unexpectedly", "host_killed", "data"),
        ("Your session crashed after using all available RAM.", "host_killed", "unknown"),
        (
            "    logits = logits / self.temperature\n             ~~~~~~~^~~~~~~~\n"
            "RuntimeError: MPS backend out of memory (MPS allocated: 12.74 GB, other allocations: 4.39 GB, max allowed: 18.13 GB). "
            "Tried to allocate 1.02 GB.",
            "device_full",
            "loss",
        ),
        (
            " return Variable._execution_engine.run_backward(  # Calls into the C++ engine\n           ^^^^^^^^^^\n"
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.",
            "device_full",
            "backward",
        ),
        ("Parameter Offload - Persistent parameters statistics\nexits with return code = -9", "host_killed", "setup"),
        ("Summoning checkpoint.\nKilled", "host_killed", "saving"),
        ("Resource exhausted: Out of memory allocating 4294967296 bytes.", "device_full", "unknown"),
        ("71291.0   python   acct   1 OUT_OF_ME+    0:125", "host_killed", "unknown"),
        ('"Status": "exited",\n"OOMKilled": true,\n"ExitCode": 137', "host_killed", "unknown"),
        (
            'Traceback (most recent call last):\n  File "/w/dist.py", line 9, in start\n    torch.cuda.set_device(rank)\n'
            '  File "/env/torch/cuda/__init__.py", line 480, in set_device\ntorch.AcceleratorError: CUDA error: out of memory',
            "device_full",
            "setup",
        ),
        (
            'Traceback (most recent call last):\n  File "/w/megatron/training.py", line 9, in setup_model_and_optimizer\n'
            '  File "/w/megatron/param_and_grad_buffer.py", line 480, in __init__\n'
            "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
            "device_full",
            "setup",
        ),
        (
            'Traceback (most recent call last):\n  File "/env/deepspeed/runtime/zero/stage3.py", line 620, in _create_fp32_partitions\n'
            "    self.fp32_groups.append(unpinned_buffer.pin_memory())\nRuntimeError: CUDA error: out of memory",
            "host",
            "setup",
        ),
        (
            'Traceback (most recent call last):\n  File "/w/trainer.py", line 450, in run_training\n    l = self.distil(output, target)\n'
            '  File "/w/loss_functions/deep_supervision.py", line 88, in forward\n    d = self.pool(x, y)\n'
            "RuntimeError: CUDA out of memory. Tried to allocate 320.00 MiB",
            "device_full",
            "loss",
        ),
    ],
)
def test_forms_that_schedulers_shells_and_libraries_have(text: str, cause: str, phase: str) -> None:
    report = read(text)
    assert (report.cause, report.phase) == (cause, phase)


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: CUDA error: device-side assert triggered",
        "Segmentation fault (core dumped)",
        "    except torch.cuda.OutOfMemoryError:\n        retry()\nloss 3.2",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: 101376.",
        "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 1167 closing signal SIGTERM",
        "Unable to shutdown process 264 via Signals.SIGTERM, forcefully exiting via Signals.SIGKILL",
        "{'loss': 1.2, 'epoch': 0.3}\nKeyboardInterrupt",
        "",
    ],
)
def test_other_ends_are_not_taken_for_it(text: str) -> None:
    assert read_oom(read_lines(text.encode())) is None


def test_another_fault_is_named() -> None:
    lines = read_lines(b"RuntimeError: CUDA error: an illegal memory access was encountered\n")
    assert "illegal memory access" in (fault_beside_memory(lines) or "")


@pytest.mark.parametrize(
    "dressed",
    [
        BACKWARD + CUDA,
        "".join(f"[rank3]: {line}\n" for line in (BACKWARD + CUDA).split("\n")),
        "".join(f"2026-01-02T03:04:05.678Z {line}\n" for line in (BACKWARD + CUDA).split("\n")),
        "".join(f"\x1b[31m{line}\x1b[0m\r\n" for line in (BACKWARD + CUDA).split("\n")),
        "".join(f"(train pid=12, ip=10.0.0.1) {line}\n" for line in (BACKWARD + CUDA).split("\n")),
        "".join(f"> {line}\n" for line in (BACKWARD + CUDA).split("\n")),
        (BACKWARD + CUDA).replace("GiB", "GB").replace("MiB", "MB"),
        BACKWARD.removeprefix("Traceback (most recent call last):\n") + CUDA,
        BACKWARD + CUDA[:120] + "\n" + CUDA[120:200] + "\n" + CUDA[200:],
        "Instantaneous batch size per device = 8\n 3%|▎         | 12/400 [00:10<05:30,  1.17it/s]\n" + BACKWARD + CUDA,
        "".join(json.dumps({"time": "2026-01-02", "log": line + "\n"}) + "\n" for line in (BACKWARD + CUDA).split("\n")),
        json.dumps({"severity": "ERROR", "jsonPayload": {"message": "failed", "exc_info": BACKWARD + CUDA}}),
        "\0" * 5000 + BACKWARD + CUDA,
    ],
    ids=["plain", "ranks", "timestamps", "colours", "ray", "quoted", "GB", "cut", "wrapped", "progress", "docker", "JSON", "hole"],
)
def test_however_a_log_is_dressed_the_figures_are_the_same(dressed: str) -> None:
    report = read(dressed)
    figures = report.figures
    assert (report.cause, report.phase, report.device) == ("device_full", "backward", "GPU 0")
    assert figures.requested_bytes == 2 * GIB and figures.free_bytes == GIB and figures.unused_bytes == 150 * MIB
    assert figures.total_bytes == pytest.approx(23.64 * GIB, rel=1e-6)


def test_what_the_run_was_doing_is_read_from_its_log() -> None:
    text = (
        "  Instantaneous batch size per device = 8\n  Gradient Accumulation steps = 4\n 3%|▎ | 12/400 [00:10<05:30, 1.1it/s]\n"
        + BACKWARD
        + CUDA
    )
    report = read(text)
    assert (report.batch, report.accumulation, report.step) == (8, 4, 12)


def test_a_logger_that_writes_json_tells_the_rank() -> None:
    lines = [json.dumps({"rank": 3, "msg": line}) for line in (BACKWARD + CUDA).split("\n")]
    assert read("\n".join(lines)).ranks == (3,)
    assert read_oom(read_lines(b'{"loss": 2.1, "step": 5}\n{"broken": \n' + b'{"a":' * 3000)) is None


@pytest.mark.parametrize(
    ("after", "went_on"),
    [
        ("{'loss': 2.1, 'epoch': 0.1}\n" * 3, True),
        ("{'loss': 2.1, 'epoch': 0.1}\n{'train_runtime': 9.1, 'train_loss': 2.0}\n", True),
        ("{'loss': 2.1, 'epoch': 0.1}\nERROR: failed (exitcode: 1) local_rank: 0\n", False),
        ("[rank7]: {'loss': 2.1}\n" * 5, False),
    ],
)
def test_a_run_that_went_on_is_told_from_one_that_ended(after: str, went_on: bool) -> None:
    report = read("".join(f"[rank0]: {line}\n" for line in (BACKWARD + CUDA).split("\n")) + after)
    assert report.went_on is went_on and "loss" not in report.text
    assert any("went on" in reason for reason in reasons_of(report)) is went_on


def test_text_with_a_hole_is_text() -> None:
    assert is_text(b"\0" * 5000 + CUDA.encode()) and not is_text(b"\0" * 5000) and not is_text(bytes(range(32)) * 50)
    assert is_text(b"")


def test_ranks_that_fail_together_are_told_apart() -> None:
    both = [f"[rank{rank}]: {line}" for line in (BACKWARD + CUDA).split("\n") for rank in (0, 1)]
    report = read("\n".join(both))
    assert report.ranks == (0, 1) and report.phase == "backward"


def test_an_explicit_error_counts_more_than_the_launchers_end() -> None:
    report = read(BACKWARD + CUDA + "\nERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 0")
    assert report.source == "PyTorch" and report.cause == "device_full"


def test_of_two_runs_the_last_one_counts() -> None:
    text = CUDA.replace("2.00 GiB", "9.00 GiB", 1) + "\n" + "step\n" * 600 + BACKWARD + CUDA
    assert read(text).figures.requested_bytes == 2 * GIB


def test_the_process_of_a_container_is_not_another_one() -> None:
    inside = CUDA.replace(
        "Including non-PyTorch memory, this process has 22.64 GiB memory in use.", "Process 77 has 22.60 GiB memory in use."
    )
    assert read(inside).cause == "device_full"
    beside = (
        inside.replace("Process 77", "Process 9 has 4.00 GiB memory in use. Process 77")
        .replace("21.90 GiB", "17.90 GiB")
        .replace("22.60", "18.60")
    )
    report = read(beside)
    assert report.cause == "other_processes" and "9" in general_changes(report)[0].how


def test_vllms_figures_become_figures() -> None:
    share = next(log for log in LOGS if log["cause"] == "vllm_share")
    assert "0.74" in general_changes(read(share["text"]))[0].how
    stored = next(log for log in LOGS if "23648" in log["text"])
    assert "23648" in general_changes(read(stored["text"]))[0].how
    weights = next(log for log in LOGS if "model weights take" in log["text"])
    assert any("0.85" in change.what for change in general_changes(read(weights["text"])))


def test_what_the_kernel_ended_held() -> None:
    killed = next(log for log in LOGS if "anon-rss" in log["text"])
    assert read(killed["text"]).figures.process_bytes == 14095848 * 1024


def test_tokens_and_escapes_are_not_repeated() -> None:
    secret = "hf_" + "a" * 30
    report = read(f"\x1b]0;title\x07{CUDA} --hub_token={secret} password: swordfish \x1b[2J\u202e")
    assert secret not in report.text and "swordfish" not in report.text
    assert "\x1b" not in report.text and "\u202e" not in report.text
    assert shown("\x1b[31mred\x1b[0m\x00") == "red"


def test_a_huge_log_is_read_from_its_end() -> None:
    raw = b"x" * (MOST_BYTES + 10) + b"\n" + CUDA.encode()
    report = read_oom(read_lines(raw[-MOST_BYTES:]))
    assert report is not None and report.figures.requested_bytes == 2 * GIB


@pytest.mark.parametrize("piece", [b"_", b"a/", b"-> ", b"a.", b"val ", b" "])
def test_no_line_costs_its_square(piece: bytes) -> None:
    def log(length: int) -> bytes:
        line = b'  File "a.py", line 1, in ' + piece * (length // len(piece)) + b".py\n"
        return b"Traceback (most recent call last):\n" + line * 40 + CUDA.encode()

    assert _seconds(log(3900)) < 40 * _seconds(log(390))  # ten times as long; its square would cost a hundredfold


def test_a_message_without_an_end_is_cut() -> None:
    """Its figures are looked for by patterns that try each digit as the first."""
    lines = [LogLine(number=number, text="1" * 4_000) for number in range(1, 100)]
    assert len(_message(lines, 0)) == _LONGEST_MESSAGE


def _seconds(raw: bytes) -> float:
    start = time.process_time()
    read_oom(read_lines(raw))
    return time.process_time() - start


@pytest.mark.parametrize("raw", [b"\xff\xfe" + CUDA.encode("utf-16-le"), b"\xef\xbb\xbf" + CUDA.encode(), b"\xff\x00\x80" + CUDA.encode()])
def test_other_encodings_and_broken_bytes(raw: bytes) -> None:
    report = read_oom(read_lines(raw))
    assert report is not None and report.figures.requested_bytes == 2 * GIB


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2.50 GiB", int(2.5 * GIB)),
        ("0 bytes", 0),
        ("1,024 MB", GIB),
        ("2147483648 bytes", 2 * GIB),
        ("17179869184.00 GiB", None),
        ("1 EB", None),
    ],
)
def test_sizes(text: str, size: int | None) -> None:
    assert size_of(text) == size


SCORED = (
    'Traceback (most recent call last):\n  File "/env/transformers/trainer.py", line 3744, in training_step\n'
    "    inputs = self._prepare_inputs(inputs)\n"
    '  File "/env/trl/trainer/grpo_trainer.py", line 1310, in _generate_and_score_completions\n{code}\n{frames}'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB.\n"
)


@pytest.mark.parametrize(
    ("code", "frames", "phase"),
    [
        ("    ids = model.generate(prompts)", '  File "/env/transformers/generation/utils.py", line 9, in _sample\n', "generation"),
        (
            "    ref = self._get_per_token_logps_and_entropies(self.ref_model, ids)",
            '  File "/env/trl/trainer/grpo_trainer.py", line 900, in _get_per_token_logps_and_entropies\n'
            "    logits = model(**inputs).logits\n"
            '  File "/env/transformers/models/qwen2/modeling_qwen2.py", line 220, in forward\n',
            "forward",
        ),
        (
            "    old = self._get_per_token_logps_and_entropies(self.model, ids)",
            '  File "/env/trl/trainer/grpo_trainer.py", line 900, in _get_per_token_logps_and_entropies\n'
            "    logps = selective_log_softmax(a, b)\n"
            '  File "/env/trl/trainer/utils.py", line 40, in selective_log_softmax\n',
            "loss",
        ),
        (
            "    rewards = self._calculate_rewards(inputs, completions)",
            '  File "/env/trl/trainer/grpo_trainer.py", line 1200, in _calculate_rewards\n    scores = reward_func(**inputs).logits\n'
            '  File "/env/transformers/models/llama/modeling_llama.py", line 300, in forward\n',
            "forward",
        ),
    ],
)
def test_what_was_generated_and_is_scored_is_no_longer_generating(code: str, frames: str, phase: str) -> None:
    assert read(SCORED.format(code=code, frames=frames)).phase == phase


@pytest.mark.parametrize(
    ("bar", "step"),
    [
        ("  2%|▏         | 12/640 [00:11<09:40,  1.08it/s]", 12),
        ("Steps:   5%|▌         | 40/800 [01:11<19:40,  1.08it/s, loss=0.1]", 40),
        ("Running tokenizer on dataset (num_proc=96):   0%|          | 16/33047 [00:00<?, ? examples/s]", None),
        ("Loading weights:  12%|█▏        | 157/1285 [00:07<00:56, 20.01it/s]", None),
        ("Packing train dataset:  12%|█▏        | 15/128 [00:07<00:56, 2.01 examples/s]", None),
    ],
)
def test_only_the_bar_of_a_training_counts_its_steps(bar: str, step: int | None) -> None:
    assert read(f"{bar}\nRuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB.\n").step == step


@pytest.mark.parametrize(
    "text",
    [
        "[INFO] [launch.py:319:sigkill_handler] Killing subprocess 8812\n"
        "[ERROR] [launch.py:325:sigkill_handler] ['python', 'train.py'] exits with return code = 1\n",
        "[ERROR] [launch.py:325:sigkill_handler] ['python', 'train.py'] exits with return code = -15\n",
        '"Status": "exited",\n"OOMKilled": false,\n"ExitCode": 1\n',
    ],
)
def test_a_handler_by_that_name_and_a_state_that_denies_it_are_no_kill(text: str) -> None:
    assert read_oom(read_lines(text.encode())) is None
