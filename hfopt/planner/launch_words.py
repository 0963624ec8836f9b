"""The exact command that starts a planned config on several devices; the script's name is the user's."""

from __future__ import annotations

from pathlib import Path

from hfopt.planner.request import Request, Subject

PORT = 29500  # torchrun's own


def commands(subject: Subject, request: Request) -> tuple[str, ...]:
    """With accelerate and with torchrun; both read FSDP and DeepSpeed settings from the TrainingArguments."""
    per_node = max(1, len(subject.hardware.gpus))
    config = Path(subject.job.path).name if subject.job.path else "config.yaml"
    if request.nodes == 1:
        return (
            f"accelerate launch --multi_gpu --num_processes {per_node} train.py {config}",
            f"torchrun --nproc_per_node {per_node} train.py {config}",
        )
    machines = f"--num_machines {request.nodes} --machine_rank RANK --main_process_ip HOST --main_process_port {PORT}"
    meeting = f"--rdzv_backend c10d --rdzv_endpoint HOST:{PORT}"
    return (
        f"accelerate launch --multi_gpu --num_processes {per_node * request.nodes} {machines} train.py {config}",
        f"torchrun --nnodes {request.nodes} --nproc_per_node {per_node} {meeting} train.py {config}",
    )
