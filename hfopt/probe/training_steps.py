"""Real optimizer steps of one candidate by the real Trainer, measured.

What a dry run measures: the device's peak memory, the time of a step, the wait for its data. Real optimizer steps of one candidate by the
real Trainer on the longest batches, then an evaluation of a batch or two, measured.
"""

from __future__ import annotations

import dataclasses
import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from hfopt.compat.transformers_patches import let_gradients_through
from hfopt.errors import DryRunError
from hfopt.facts.oom_errors import RAISED_AS, is_oom
from hfopt.model.batch import with_decoder_inputs
from hfopt.model.builder import skeleton
from hfopt.model.from_config import from_job
from hfopt.model.loading import card_loads
from hfopt.model.losses import REFERENCE
from hfopt.probe.dry_run import Device, Extent, training_arguments
from hfopt.schema import Candidate, EvaluationPeak, TrainJob, Workload

_FEW_STEPS = 4


class CudaMeter:
    """PyTorch's own counters; what the process holds beside them (context, other processes) is read from the driver."""

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def empty(self) -> None:
        """As if nothing had been on the device yet."""
        gc.collect()
        torch.cuda.empty_cache()
        self.reset()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def peaks(self) -> dict[str, int]:
        reserved = torch.cuda.max_memory_reserved()
        free, total = torch.cuda.mem_get_info()
        beside = max(0, total - free - torch.cuda.memory_reserved())
        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": reserved,
            "peak_device_bytes": reserved + beside,
        }


class CpuMeter:
    """Resident memory of this process; 'allocated' is what came on top of Python and its imports."""

    def __init__(self) -> None:
        self.reset()
        self._before = self._peak()

    def reset(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size
        except OSError:
            return

    def empty(self) -> None:
        gc.collect()
        self.reset()

    def synchronize(self) -> None:
        pass

    def peaks(self) -> dict[str, int]:
        peak = self._peak()
        return {"peak_allocated_bytes": max(0, peak - self._before), "peak_reserved_bytes": peak, "peak_device_bytes": peak}

    @staticmethod
    def _peak() -> int:
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
        except (OSError, StopIteration):
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else peak * 1024


class MeasuredSteps(transformers.TrainerCallback):  # type: ignore[misc]
    """When each optimizer step began and ended, with the device idle at its end; after `enough_s` and a few steps it ends the run."""

    def __init__(self, meter: CpuMeter | CudaMeter, *, enough_s: float | None = None) -> None:
        self._meter, self._enough_s = meter, enough_s
        self.step_s: list[float] = []
        self.cpu_s: list[float] = []
        self.wait_s: list[float] = []
        self._began = self._ended = time.perf_counter()
        self._cpu_began = time.process_time()

    @property
    def steps(self) -> int:
        return len(self.step_s)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._ended = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.perf_counter()
        self.wait_s.append(self._began - self._ended)
        self._cpu_began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._meter.synchronize()
        self._ended = time.perf_counter()
        self.step_s.append(self._ended - self._began)
        self.cpu_s.append(time.process_time() - self._cpu_began)
        if self._enough_s is not None and self.steps >= _FEW_STEPS and sum(self.step_s) >= self._enough_s:
            control.should_training_stop = True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What the parent asks for."""

    job: TrainJob
    device: Device
    extent: Extent
    eager: bool = False  # nothing will be compiled in it


class _Samples(torch.utils.data.Dataset):  # type: ignore[misc]
    """As many samples as asked; what they are is decided when the batch is made."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


def make_trainer(
    workload: Workload, model: Any, order: Order, choice: tuple[Candidate, EvaluationPeak | None], output: Path, clock: MeasuredSteps
) -> Any:
    candidate, evaluation = choice
    run = min(candidate.accumulation, order.extent.micro_batches or candidate.accumulation)
    fields = [field.name for field in dataclasses.fields(transformers.TrainingArguments) if field.init]
    chosen = training_arguments(
        order.job,
        dataclasses.replace(candidate, accumulation=run),
        device=order.device,
        steps=order.extent.steps,
        output_dir=str(output),
        fields=fields,
        evaluation=evaluation,
    )
    args = transformers.TrainingArguments(**chosen)
    compute_loss = workload.compute_loss

    class DryTrainer(transformers.Trainer):  # type: ignore[misc]
        """With the workload's own loss, where it has one; it may run a few of a step's micro-batches while it holds all of them."""

        held: Any = None

        def get_batch_samples(self, iterator: Any, count: int, *rest: Any) -> Any:
            batches, items = super().get_batch_samples(iterator, candidate.accumulation if count == run else count, *rest)
            self.held = batches[run:]
            return batches[:run], items

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
            if compute_loss is None:
                return super().compute_loss(model, inputs, return_outputs=return_outputs, **options)
            loss = compute_loss(model, inputs)
            return (loss, {"loss": loss}) if return_outputs else loss

        def prediction_step(self, model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
            if compute_loss is None:
                return super().prediction_step(model, inputs, *rest, **options)
            with torch.no_grad(), self.compute_loss_context_manager():
                return compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None

    smoothed = bool(args.label_smoothing_factor)
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model

    def collate(samples: list[Any]) -> dict[str, Any]:
        batch = workload.make_batch(len(samples))
        return with_decoder_inputs(batch, bare) if smoothed else batch

    if candidate.checkpointing.on and candidate.checkpointing.use_reentrant:
        let_gradients_through(model)
    window = candidate.per_device_batch * candidate.accumulation
    keeps = evaluation is not None and evaluation.keeps_predictions
    trainer = DryTrainer(
        model=model,
        args=args,
        train_dataset=_Samples(window * order.extent.steps),
        eval_dataset=_Samples((2 if keeps else 1) * args.per_device_eval_batch_size),
        data_collator=collate,
        compute_metrics=(lambda predictions: {}) if keeps else None,  # then the Trainer keeps what they would be computed from
        callbacks=[clock],
    )
    if (reference := getattr(model, REFERENCE, None)) is not None:  # it computes in the Trainer's precision too
        trainer.accelerator.prepare_model(reference, evaluation_mode=True)
    if (scaler := getattr(trainer.accelerator, "scaler", None)) is not None:
        scaler._init_scale = 1.0  # a step skipped for overflow would allocate no optimizer state
    return trainer


def build_on(workload: Workload, device: Device) -> Any:
    """On a card, parameters appear one by one as `.to("cuda")` would put them: no host memory, no slow initialisation on the host."""
    if device == "cpu":
        return workload.build_model()
    model = skeleton(workload.build_model)
    done: Materialised = {}
    for load in card_loads(model):
        torch.empty(load.block_bytes // 2, dtype=torch.float16, device="cuda")
        for parameter in load.weights:
            _on_card(parameter, done)
    _materialise(model, done)
    return model


Materialised = dict[int, tuple[nn.Parameter, nn.Parameter]]


def _on_card(parameter: nn.Parameter, done: Materialised) -> nn.Parameter:
    """Tied parameters once."""
    if id(parameter) not in done:
        new_data = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cuda")
        if new_data.is_floating_point():
            new_data.normal_(0, 0.02)
        new = nn.Parameter(new_data, requires_grad=parameter.requires_grad)
        new.__dict__.update(parameter.__dict__)
        done[id(parameter)] = parameter, new
    return done[id(parameter)][1]


def _materialise(module: nn.Module, done: Materialised) -> None:
    """In the order of nn.Module._apply: children first, then parameters, then buffers."""
    for child in module.children():
        _materialise(child, done)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = _on_card(parameter, done)
    for name, buffer in module._buffers.items():
        if buffer is not None:  # on meta: the scales of packed weights, made with them and nothing but zeros
            module._buffers[name] = torch.zeros_like(buffer, device="cuda") if buffer.is_meta else buffer.to("cuda")


def measure(order: Order, choice: Callable[[], tuple[Candidate, EvaluationPeak | None]], output: Path) -> dict[str, Any]:
    """One dry run; `choice` waits for the candidate and how to evaluate. Any error but memory's leaves this function."""
    transformers.logging.set_verbosity_error()
    if order.device != "cpu" and not torch.cuda.is_available():
        raise DryRunError("there is no CUDA device here to run on")
    workload = from_job(order.job)
    assert transformers.Trainer and transformers.TrainingArguments, "imported now, while there is time"
    meter: CpuMeter | CudaMeter = CpuMeter() if order.device == "cpu" else CudaMeter()
    clock = MeasuredSteps(meter, enough_s=order.extent.enough_s)
    facts: dict[str, Any] = {"outcome": "ok"}
    phase = "loading the model"
    try:
        model = build_on(workload, order.device)
        candidate, evaluation = choice()
        if candidate.attn_implementation not in (None, order.job.model.attn_implementation):
            del model
            meter.empty()
            spec = dataclasses.replace(order.job.model, attn_implementation=candidate.attn_implementation)
            workload = from_job(dataclasses.replace(order.job, model=spec))
            model = build_on(workload, order.device)
        trainer = make_trainer(workload, model, order, (candidate, evaluation), output, clock)
        phase = "the training steps"
        trainer.train()
        trainer.held = None
        facts |= meter.peaks()
        if order.job.settings.evaluation.runs:
            meter.reset()
            phase = "the evaluation step"
            trainer.evaluate()
            facts["eval_peak_reserved_bytes"] = meter.peaks()["peak_reserved_bytes"]
    except RAISED_AS as error:
        if not is_oom(error):
            raise
        facts |= {"outcome": "oom", "message": f"out of memory in {phase}, step {clock.steps + 1}: {brief(error)}", **meter.peaks()}
    if order.device == "cpu" and len(clock.cpu_s) > 1:
        facts["cpu_s"] = min(clock.cpu_s[1:])
    if order.device != "virtual" and len(clock.step_s) > 1:
        facts |= {"step_s": min(clock.step_s[1:]), "data_wait_s": statistics.median(clock.wait_s[1:])}  # what else runs only adds time
    return facts


def brief(error: BaseException) -> str:
    return str(error).partition(" Including non-PyTorch")[0].partition("\n")[0] or type(error).__name__
