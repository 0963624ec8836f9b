"""`hfopt doctor`: what was detected here, and each thing that would slow training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hfopt.cli.json_output import answer_json
from hfopt.cli.output import answer

if TYPE_CHECKING:
    from hfopt.hardware.checkup import Checkup, DoctorOutput, Probe
    from hfopt.schema import Gpu

_MARKS = {"error": "ERROR", "warning": "WARNING", "note": "note"}


def doctor(
    ask_torch: Annotated[bool, typer.Option("--probe", help="Also let the installed torch find the cards, in a child process.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what training would run on here, and what would slow it.

    Ends with 1 if there is something to mend.

    \b
    Examples:
      hfopt doctor                            for people
      hfopt doctor --probe                    torch is asked too; takes some seconds
      hfopt doctor --json                     for a program
      CUDA_VISIBLE_DEVICES=1 hfopt doctor     as a run on that card would see it
    """
    from hfopt.hardware.checkup import checkup

    found = checkup(ask_torch=ask_torch)
    if as_json:
        answer_json("doctor", _as_data(found))
    else:
        answer(_as_text(found))
    if any(problem.severity != "note" for problem in found.problems):
        raise typer.Exit(1)


def _as_data(found: Checkup) -> DoctorOutput:
    from hfopt.hardware.checkup import flash_attention

    return {
        "hardware": found.hardware,
        "software": found.software,
        "nvml_problem": found.nvml_problem,
        "problems": found.problems,
        "probe": found.probe,
        "support": [
            {"uuid": gpu.uuid, "bf16": gpu.supports("bf16"), "tf32": gpu.supports("tf32"), "flash_attention": flash_attention(gpu)}
            for gpu in found.hardware.gpus
        ],
    }


def _as_text(found: Checkup) -> str:
    from hfopt.units import format_bytes

    hardware, software, host = found.hardware, found.software, found.hardware.host
    torch = software.torch
    build = "CPU only" if torch and torch.cpu_only else f"CUDA {torch.cuda}" if torch and torch.cuda else "ROCm" if torch else ""
    lines = [
        *(line for gpu in hardware.gpus for line in _card_lines(gpu)),
        *([] if hardware.gpus else ["device        the CPU"]),
        f"driver        {hardware.driver_version or 'none'}" + (f", CUDA {hardware.cuda_version}" if hardware.cuda_version else ""),
        f"nvidia-ml-py  {software.nvidia_ml_py or 'not installed'}, "
        + (f"no driver reached ({found.nvml_problem})" if found.nvml_problem else "driver reached"),
        f"torch         {f'{torch.version} ({build})' if torch else 'not installed'}",
        *([f"              {_torch_says(found.probe)}"] if found.probe else []),
        f"transformers  {software.transformers or 'not installed'}, accelerate {software.accelerate or 'not installed'}",
        f"extras        {', '.join(f'{name} {number}' for name, number in software.optional.items()) or 'none'}",
        f"processor     {host.cpu_name or 'unknown'}, {host.cores:g} cores usable",
        f"RAM           {format_bytes(host.ram_bytes)}, {format_bytes(host.ram_free_bytes)} free",
        "",
    ]
    for problem in found.problems:
        lines.append(f"{_MARKS[problem.severity]}: {problem.message}")
        lines += [f"  -> {problem.fix}"] if problem.fix else []
    if all(problem.severity == "note" for problem in found.problems):
        lines.append("nothing found that would slow training here")
    return "\n".join(lines) + "\n"


def _card_lines(gpu: Gpu) -> list[str]:
    from hfopt.hardware.checkup import flash_attention
    from hfopt.units import format_bytes

    free = f", {format_bytes(gpu.free_bytes)} free" if gpu.free_bytes is not None else ""
    capability = f", capability {gpu.capability[0]}.{gpu.capability[1]}" if gpu.capability else ""
    lines = [f"GPU {gpu.index if gpu.index is not None else '?':<9} {gpu.name}, {format_bytes(gpu.memory_bytes)}{free}{capability}"]
    if gpu.uuid:
        lines.append(f"              {gpu.uuid}")
    if gpu.vendor == "nvidia":
        tensor_cores = gpu.peak_flops.get("fp16", 0) > gpu.peak_flops.get("fp32", 0)
        fp16 = "yes" if tensor_cores else "in memory only" if gpu.peak_flops else "unknown"
        flash = {True: "yes", False: "no", None: "unknown"}[flash_attention(gpu)]
        lines.append(
            f"              bf16 {_yes(gpu.supports('bf16'))}, tf32 {_yes(gpu.supports('tf32'))}, fp16 {fp16}, flash attention {flash}"
        )
    if gpu.peak_flops and gpu.bandwidth_bytes_per_s:
        peaks = ", ".join(f"{precision} {peak / 1e12:.1f}" for precision, peak in gpu.peak_flops.items())
        lines.append(f"              {gpu.bandwidth_bytes_per_s / 1e9:,.0f} GB/s; dense TFLOP/s: {peaks}")
    return lines


def _torch_says(probe: Probe) -> str:
    if probe.error:
        return f"asked, it fails: {probe.error}"
    if not probe.count:
        return "asked, it finds no GPU"
    flash, bf16 = ({True: "yes", False: "no", None: "unknown"}[answer] for answer in (probe.flash_attention, probe.bf16))
    return f"asked, it finds {probe.count} GPU(s); bf16 {bf16}, flash attention {flash}; built for {', '.join(probe.architectures)}"


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"
