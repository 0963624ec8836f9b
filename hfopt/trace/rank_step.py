"""The Trainer's step on one rank of several, and the tracer of that rank.

DDP (torch/nn/parallel/distributed.py, torch/csrc/distributed/c10d/reducer.cpp): gradients are copied into buckets that live as long as the
model. Until the first backward has shown the order, all parameters of a dtype share one bucket; then they are cut into buckets of 25 MiB,
the first of 1 MiB. The Trainer leaves `gradient_as_bucket_view` off, so gradients stand beside their buckets.

FSDP2: computes in the mixed precision's dtype without autocast, updates this rank's shards, and, unless `sync_each_batch` is set, keeps
whole gradients through the accumulation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from hfopt.errors import TraceError
from hfopt.schema import Sharding, StepSettings, Workload
from hfopt.trace.fsdp import ShardRecorder, fake_world, fully_sharded, local, refusal
from hfopt.trace.op_cost import cost
from hfopt.trace.recorder import Recorder
from hfopt.trace.tracer import Tracer, kernels_of, prepared
from hfopt.trace.trainer_step import TrainerLoop, make_optimizer, parameter_groups, trainer_script
from hfopt.trace.zero import Zero2Loop, in_compute_dtype
from hfopt.trace.zero3 import Zero3Loop
from hfopt.units import MIB

FIRST_BUCKET_BYTES = 1 * MIB  # dist._DEFAULT_FIRST_BUCKET_BYTES
BUCKET_BYTES = 25 * MIB  # DistributedDataParallel(bucket_cap_mb=25)


class DdpLoop(TrainerLoop):
    def begin(self) -> None:
        self._buckets: list[int] = []
        by_dtype: dict[torch.dtype, int] = {}
        for parameter in self._trained():
            by_dtype[parameter.dtype] = by_dtype.get(parameter.dtype, 0) + parameter.nbytes
        self._take(list(by_dtype.values()))

    def before_step(self, step: int) -> None:
        if step == 1:
            for block in self._buckets:
                self.session.recorder.release(block)
            self._take(bucket_sizes([(p.dtype, p.nbytes) for p in reversed(self._trained())]))

    def _trained(self) -> list[torch.Tensor]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _take(self, sizes: list[int]) -> None:
        recorder = self.session.recorder
        self._buckets = [recorder.allocate(size, "gradient_bucket") for size in sizes]
        recorder.trace.categories.update(dict.fromkeys(self._buckets, "gradients"))


def bucket_sizes(gradients: list[tuple[Any, int]]) -> list[int]:
    """compute_bucket_assignment_by_size: a bucket is closed when it has reached its limit; each dtype has its own."""
    sizes: list[int] = []
    open_buckets: dict[Any, int] = {}
    limits: dict[Any, int] = {}
    for dtype, size in gradients:
        open_buckets[dtype] = open_buckets.get(dtype, 0) + size
        if open_buckets[dtype] >= limits.get(dtype, FIRST_BUCKET_BYTES):
            sizes.append(open_buckets.pop(dtype))
            limits[dtype] = BUCKET_BYTES
    return [*sizes, *open_buckets.values()]


class FsdpLoop(TrainerLoop):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.autocast_dtype = None  # the units' MixedPrecisionPolicy casts weights and inputs instead

    def begin(self) -> None:
        assert self.settings.sharding is not None
        self._offloads = self.settings.sharding.offload_parameters
        self._pairs = [(parameter, local(parameter)) for parameter in self.model.parameters() if parameter.requires_grad]
        self._hooks = (
            [parameter.register_post_accumulate_grad_hook(self._to_host) for parameter, _ in self._pairs] if self._offloads else []
        )

    def make_optimizer(self) -> Any:
        """On this rank's shards themselves: the same kernels as over DTensors, without their dispatch."""
        groups = [{**group, "params": [local(p) for p in group["params"]]} for group in parameter_groups(self.model)]
        return make_optimizer(self.model, self.settings.optim, self.settings.optim_args, groups=groups)

    @contextlib.contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        assert self.settings.sharding is not None
        if is_last or self.settings.sharding.sync_each_batch:
            yield
            return
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def updated_parameters(self) -> list[torch.Tensor]:
        return [shard for _, shard in self._pairs]

    def _optimizer_step(self, optimizer: Any) -> torch.Tensor:
        for parameter, shard in self._pairs:
            shard.grad = local(parameter.grad)
        recorder = self.session.recorder
        recorder.recording = recorder.recording and not self._offloads  # offloaded shards are updated on the host
        try:
            return super()._optimizer_step(optimizer)
        finally:
            recorder.recording = True

    def _to_host(self, parameter: torch.Tensor) -> None:
        recorder = self.session.recorder
        shard = local(parameter.grad)
        recorder.forget(shard.untyped_storage()._cdata)
        recorder.leave_on_host(shard)

    def zero_grad(self) -> None:
        self.model.zero_grad()
        for _, shard in self._pairs:
            shard.grad = None


LOOPS: dict[str, type[TrainerLoop]] = {"ddp": DdpLoop, "fsdp2": FsdpLoop, "zero2": Zero2Loop, "zero3": Zero3Loop}


WARM_UP_BATCH = 1


@contextmanager
def rank_tracer(workload: Workload, settings: StepSettings, sharding: Sharding) -> Iterator[Tracer]:
    """The tracer of one rank; under FSDP2 after a step that is thrown away: the first one sets up what the later ones reuse."""
    engine = sharding.engine
    in_parts, on_host = engine == "zero3", engine in ("zero2", "zero3") or (engine == "fsdp2" and sharding.offload_parameters)
    build = prepared(workload, settings)
    recorder: type[Recorder] = Recorder
    with ExitStack() as world:
        if engine in ("zero2", "zero3"):
            build = in_compute_dtype(build, settings.precision, made_in_parts=in_parts)
        elif engine == "fsdp2":
            recorder = ShardRecorder
            build = fully_sharded(build, settings, sharding, world.enter_context(fake_world(sharding.world_size)))
        tracer = Tracer(
            build, workload.make_batch, kernels_of(settings), cost=cost, recorder=recorder, weights_on_host=on_host, loads_onto_card=False
        )
        if engine == "fsdp2":
            try:
                tracer.record(trainer_script(settings, workload.compute_loss, steps=1), WARM_UP_BATCH)
            except TraceError as error:
                raise refusal(error, workload.model_class) from error
        yield tracer
