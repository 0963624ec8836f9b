"""A compiled step's estimate against the whole model, compiled on the virtual GPU: what PyTorch's own allocator counted.

usage: python benchmarks/compiled_accuracy.py [--only TEXT] [--layers N] [--batch N] [--dry-run] [--log FILE]

Six models × bf16 × checkpointing, and the modes; the estimate compiles shallow models at batch 8 and 16, the run is the whole model at
another batch. --layers makes the whole model shallower, because compiling twelve layers takes a minute or two of a core. Runs use the
estimate's own worker, which writes kernels and does not make them; --dry-run takes a plan's dry run instead, with Triton's kernels made.
One process at a time but for the estimate's two children. With --log a second run goes on where the first was stopped. The last line is
one JSON object. Nothing here was measured on a real card.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hfopt.config.read_job import load
from hfopt.config.settings import step_settings
from hfopt.errors import DryRunError
from hfopt.memory.step_memory import estimate
from hfopt.model.from_config import from_job
from hfopt.probe.compiled_step import FIRST_MEASURED, compiled_runs, compiled_step
from hfopt.probe.dry_run import dry_run
from hfopt.schema import Candidate, Gpu, StepSettings, TrainJob
from hfopt.units import GIB, MIB

CARD = Gpu(name="Virtual card", vendor="nvidia", memory_bytes=200 * GIB, capability=(8, 6), sms=28, power_limit_w=170)
CHECKPOINTED = "gradient_checkpointing: true\n"
EACH_SECOND = CHECKPOINTED + "gradient_checkpointing_kwargs: {every_n_layers: 2}\n"


@dataclass(frozen=True, kw_only=True)
class CompiledCase:
    model: str
    length: int
    batch: int
    more: str = ""
    layers: int | None = None

    @property
    def title(self) -> str:
        kind = {"": "plain", CHECKPOINTED: "checkpointed", EACH_SECOND: "every 2nd layer checkpointed"}.get(self.more, self.more.strip())
        depth = "" if self.layers is None else f", {self.layers} layers"
        return f"{self.model.rpartition('/')[2]} {kind}{depth}, batch {self.batch}"

    def job(self) -> tuple[TrainJob, StepSettings]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "train.yaml"
            common = f"max_seq_length: {self.length}\nper_device_train_batch_size: {self.batch}\nbf16: true\ntorch_compile: true\n"
            path.write_text(f"model_name_or_path: {self.model}\n{common}{self.more}")
            job = load(path).job
        assert job is not None, "a config of this benchmark is a job"
        if self.layers is not None:
            job = replace(job, model=replace(job.model, overrides={"num_hidden_layers": self.layers}))
        return job, replace(step_settings(job.settings, capability=(8, 6), multiprocessors=28), torch_compile=True)


MODELS = (
    CompiledCase(model="google-bert/bert-base-uncased", length=128, batch=24),
    CompiledCase(model="google/vit-base-patch16-224", length=128, batch=24),
    CompiledCase(model="openai-community/gpt2", length=256, batch=24),
    CompiledCase(model="HuggingFaceTB/SmolLM2-135M", length=256, batch=24),
    CompiledCase(model="Qwen/Qwen2.5-0.5B", length=256, batch=24),
    CompiledCase(model="google-t5/t5-small", length=128, batch=24),
)


def matrix() -> Iterator[CompiledCase]:
    for case, more in itertools.product(MODELS, ("", CHECKPOINTED)):
        yield replace(case, more=more)
    for mode in ("reduce-overhead", "max-autotune-no-cudagraphs"):
        yield replace(MODELS[0], more=f"torch_compile_mode: {mode}\n")
    yield replace(MODELS[3], more=EACH_SECOND)


def whole(case: CompiledCase, *, by_dry_run: bool) -> dict[str, int]:
    """What PyTorch's allocator counted in the whole model's steps; `collected` is the least that a run takes whose garbage is collected
    at once: the step that compiles holds it in any case."""
    job, settings = case.job()
    if not by_dry_run:
        (facts,) = compiled_runs(job, CARD, settings, [((None, case.batch),)])
        run = facts["runs"][0]
        measured = run["peaks"][FIRST_MEASURED[settings.compile_mode] :]
        allocated, reserved = (max(counted) for counted in zip(*measured, strict=True))
        collected = max(run["peaks"][1][0], allocated - run["uncollected_bytes"])
        return {"allocated": allocated, "reserved": reserved, "collected": min(collected, allocated)}
    candidate = Candidate(
        per_device_batch=case.batch, accumulation=1, precision="bf16", checkpointing=settings.checkpointing, torch_compile=True
    )
    trial = dry_run(job, candidate, device="virtual", gpu=CARD, steps=5, timeout_s=3600)
    if trial.outcome != "ok" or trial.peak_allocated_bytes is None or trial.peak_reserved_bytes is None:
        raise DryRunError(trial.message or trial.outcome)
    return {"allocated": trial.peak_allocated_bytes, "reserved": trial.peak_reserved_bytes}


def predicted(case: CompiledCase) -> tuple[dict[str, int], float]:
    """What the estimate says of the same, and the CPU seconds it took."""
    job, settings = case.job()
    workload, began = from_job(job), _cpu_s()
    replay = compiled_step(job, CARD, workload, settings, estimate(workload, settings.eager)).curve.replay(case.batch)
    return {"allocated": replay.allocated_bytes, "reserved": replay.reserved_bytes}, _cpu_s() - began


def _cpu_s() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose title contains this")
    parser.add_argument("--layers", type=int, help="of the whole model, instead of its own")
    parser.add_argument("--batch", type=int, help="of the whole model's run")
    parser.add_argument("--dry-run", action="store_true", help="compare with a plan's dry run")
    parser.add_argument("--log", type=Path, help="runs are kept here, one JSON object a line")
    arguments = parser.parse_args()
    known: dict[str, Any] = {}
    if arguments.log is not None and arguments.log.exists():
        known = {entry["case"]: entry["run"] for entry in map(json.loads, arguments.log.read_text().splitlines())}
    errors: list[tuple[float, float]] = []
    failed = 0
    for plain in matrix():
        case = replace(plain, layers=arguments.layers, batch=arguments.batch or plain.batch)
        if arguments.only not in case.title:
            continue
        key = json.dumps([asdict(case), arguments.dry_run], sort_keys=True)
        try:
            if key not in known:
                known[key] = whole(case, by_dry_run=arguments.dry_run)
                if arguments.log is not None:
                    with arguments.log.open("a") as log:
                        log.write(json.dumps({"case": key, "run": known[key]}) + "\n")
            found, seconds = predicted(case)
        except DryRunError as error:
            failed += 1
            print(f"{case.title:60} failed: {error}", flush=True)
            continue
        run = known[key]
        errors.append((100 * (found["allocated"] / run["allocated"] - 1), 100 * (found["reserved"] / run["reserved"] - 1)))
        parts = zip(("allocated", "reserved"), errors[-1], strict=True)
        shown = "   ".join(f"{name} {run[name] / MIB:8.0f} MiB {error:+6.2f} %" for name, error in parts)
        collected = run.get("collected", run["allocated"])
        least = f"   collected at once {collected / MIB:.0f} MiB" if collected < run["allocated"] else ""
        print(f"{case.title:60} {shown}   {seconds:.0f} s of CPU{least}", flush=True)
    result = {
        "n": len(errors),
        "failed": failed,
        "allocated_within_3pct": sum(abs(error) <= 3 for error, _ in errors),
        "allocated_under_by_more_than_3pct": sum(error < -3 for error, _ in errors),
        "reserved_under_by_more_than_3pct": sum(error < -3 for _, error in errors),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
