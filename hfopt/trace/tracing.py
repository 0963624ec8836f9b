"""The tracer for a workload: of one device, or of one rank in a world that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from hfopt.errors import TraceError
from hfopt.schema import StepSettings, Workload
from hfopt.trace.kernels import Kernels
from hfopt.trace.op_costs import cost
from hfopt.trace.preparation import prepared
from hfopt.trace.session import Tracer
from hfopt.trace.trace import Recorder
from hfopt.trace.trainer_step import trainer_script

WARM_UP_BATCH = 1


@contextmanager
def tracer_of(workload: Workload, settings: StepSettings) -> Iterator[Tracer]:
    """Ready to record; under FSDP2 after a step that is thrown away: the first one sets up what the later ones reuse."""
    build, sharding = prepared(workload, settings), settings.sharding
    kernels = Kernels(capability=settings.capability, multiprocessors=settings.multiprocessors)
    recorder: type[Recorder] = Recorder
    engine = None if sharding is None else sharding.engine
    on_host = sharding is not None and (engine in ("zero2", "zero3") or (engine == "fsdp2" and sharding.offload_parameters))
    with ExitStack() as world:
        if engine in ("zero2", "zero3"):
            from hfopt.trace.zero import in_compute_dtype

            build = in_compute_dtype(build, settings.precision, made_in_parts=engine == "zero3")
        elif sharding is not None and engine == "fsdp2":
            from hfopt.trace.fsdp import fully_sharded, refusal
            from hfopt.trace.recorder import ShardRecorder
            from hfopt.trace.world import fake_world

            recorder = ShardRecorder
            build = fully_sharded(build, sharding, settings.precision, world.enter_context(fake_world(sharding.world_size)))
        tracer = Tracer(build, workload.make_batch, kernels, cost=cost, recorder=recorder, weights_on_host=on_host)
        if engine == "fsdp2":
            try:
                tracer.record(trainer_script(settings, workload.compute_loss, steps=1), WARM_UP_BATCH)
            except TraceError as error:
                raise refusal(error, workload.model_class) from error
        yield tracer
