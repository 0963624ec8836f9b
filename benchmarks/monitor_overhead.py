"""What watching costs: Trainer steps of about 20 ms with and without HFGpuMonitor, interleaved, beside nvitop and W&B.

Whole runs: each round runs every variant once, in a new order; a variant's cost is its time per step over that of the plain run of the
same round, as trimmed mean and standard error over the rounds. In and out: in one run the monitor (callbacks, hook, sampling thread) is
taken out and put back every ten steps, and each turn is compared with its neighbour, which leaves the machine's drift out. Both by wall
clock and by CPU time of this process. The monitor's own seconds are counted as well: CPU time inside its callbacks, its hook and its
sampling thread, over the steps' time. Then a week of samples and windows is simulated, and the memory that the monitor holds is compared
with that after an hour.

With --log every round and turn is kept in a file, and what is printed rests on all that the file holds: short pieces add up.

usage: python benchmarks/monitor_overhead.py [--rounds 15] [--turns 400] [--steps 110] [--log FILE] [--no-own]      the last line is JSON
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.util import find_spec
from itertools import pairwise
from math import exp, log
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import psutil
import torch
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments

from hfopt.monitor import session
from hfopt.monitor.callback import HFGpuMonitor
from hfopt.monitor.diagnose import Judge
from hfopt.monitor.fault_guard import Faults
from hfopt.monitor.host_usage import HostReading
from hfopt.monitor.log import Journal
from hfopt.monitor.metrics import find_callers
from hfopt.monitor.sampler import RING, Sampler
from hfopt.monitor.window import gpu_windows, merge
from hfopt.schema import GpuReading, Phases, RunFacts, Window

TARGET_STEP_S = 0.020
LIMIT = 0.01
TURN_STEPS, TURNS_OF_A_RUN = 10, 100


class Sentences(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "input_ids": torch.full((32,), index % 90 + 1),
            "attention_mask": torch.ones(32, dtype=torch.long),
            "labels": torch.tensor(index % 2),
        }


class Stopwatch(TrainerCallback):  # type: ignore[misc]
    """Wall and CPU time from the end of the tenth step to the end of the last."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 10:
            self.began = (time.perf_counter(), time.process_time())
        self.ended, self.steps = (time.perf_counter(), time.process_time()), state.global_step - 10

    def per_step(self) -> tuple[float, float]:
        return (self.ended[0] - self.began[0]) / self.steps, (self.ended[1] - self.began[1]) / self.steps


def model(layers: int) -> Any:
    config = transformers.BertConfig(vocab_size=100, hidden_size=96, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=192)
    return transformers.BertForSequenceClassification(config)


def run(folder: Path, trained: Any, steps: int, callbacks: list[Any]) -> tuple[float, float]:
    stopwatch = Stopwatch()
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):  # noqa: PTH123
        Trainer(trained, arguments, train_dataset=Sentences(), callbacks=[*callbacks, stopwatch]).train()
    return stopwatch.per_step()


def layers_for_target(folder: Path) -> int:
    """So many layers that a step takes about 20 ms here, found in two rounds since a part of a step does not grow with them."""
    layers = 2
    for _ in range(2):
        wall, _cpu = run(folder, model(layers), 25, [])
        layers = max(1, round(layers * TARGET_STEP_S / wall))
    return layers


@contextlib.contextmanager
def nvitop_collector() -> Iterator[None]:
    from nvitop import ResourceMetricCollector

    stopped = False
    collector = ResourceMetricCollector(root_pids={os.getpid()}, interval=1.0)
    collector.daemonize(lambda metrics: not stopped, interval=1.0)
    yield
    stopped = True


@contextlib.contextmanager
def wandb_system_metrics() -> Iterator[None]:
    import wandb

    with tempfile.TemporaryDirectory() as folder:
        started = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True, x_stats_sampling_interval=1.0))
        yield
        started.finish()


def variants() -> dict[str, tuple[Callable[[], list[Any]], Callable[[], AbstractContextManager[None]]]]:
    found: dict[str, tuple[Callable[[], list[Any]], Callable[[], AbstractContextManager[None]]]] = {
        "plain": (list, contextlib.nullcontext),
        "hfopt": (lambda: [HFGpuMonitor()], contextlib.nullcontext),
    }
    if find_spec("nvitop"):
        found["nvitop"] = (list, nvitop_collector)
    if find_spec("wandb"):
        found["wandb"] = (list, wandb_system_metrics)
    return found


def whole_runs(rounds: int, steps: int, trained: Any, folder: Path) -> Iterator[dict[str, Any]]:
    """One row a round: wall and CPU seconds per step of every variant."""
    order = random.Random(time.time_ns())
    for _ in range(rounds):
        names = list(variants())
        order.shuffle(names)
        row: dict[str, Any] = {}
        for name in names:
            callbacks, around = variants()[name]
            with around():
                row[name] = run(folder, trained, steps, callbacks())
            gc.collect()
        yield {"kind": "round", **row}


class InAndOut(TrainerCallback):  # type: ignore[misc]
    """Takes the monitor out of the run and puts it back, in the order in, out, out, in; one log falls into each turn."""

    def __init__(self, monitor: HFGpuMonitor) -> None:
        self.monitor, self.handler = monitor, None
        self.turns: list[tuple[bool, float, float]] = []
        self.inside = True
        self.began = (0.0, 0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.handler, _trainer = find_callers()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        watched = self.monitor._session
        if state.global_step % TURN_STEPS or watched is None or self.handler is None:
            return
        now = (time.perf_counter(), time.process_time())
        if state.global_step > 2 * TURN_STEPS:
            self.turns.append((self.inside, now[0] - self.began[0], now[1] - self.began[1]))
        if state.global_step == TURN_STEPS:
            self._sample_only_inside(watched._sampler)
        inside = state.global_step // TURN_STEPS % 4 in (0, 1)
        if self.inside and not inside:
            self.handler.callbacks = [other for other in self.handler.callbacks if other is not self.monitor]
            watched._inputs.detach()
        elif inside and not self.inside:
            self.handler.callbacks = [*self.handler.callbacks, self.monitor]
            watched._inputs.attach(model)
            watched.clock.event("end")  # what passed outside is nothing the monitor should judge
        self.inside = inside
        self.began = (time.perf_counter(), time.process_time())

    def _sample_only_inside(self, sampler: Sampler) -> None:
        tick, tell = sampler.tick, sampler._tell
        sampler.tick = lambda: tick() if self.inside else sampler.latest  # type: ignore[method-assign, assignment, return-value]
        sampler._tell = lambda sample: tell(sample) if self.inside else None  # type: ignore[method-assign]


def in_and_out(turns: int, trained: Any, folder: Path) -> dict[str, Any]:
    monitor = HFGpuMonitor()
    switch = InAndOut(monitor)
    run(folder, trained, TURN_STEPS * (turns + 3), [switch, monitor])
    return {"kind": "turns", "turns": switch.turns}


def figures(ratios: list[float]) -> dict[str, float]:
    """What the ratios are over 1 and its standard error: the mean of their logarithms without the tenth at either end.

    Logarithms, for the mean of ratios of noisy times is above 1 where nothing differs; trimmed, for other work comes in bursts.
    """
    logs = sorted(log(ratio) for ratio in ratios)
    cut = len(logs) // 10
    inner = logs[cut : len(logs) - cut]
    drawn_in = [min(max(value, inner[0]), inner[-1]) for value in logs]
    error = stdev(drawn_in) / len(logs) ** 0.5 * len(logs) / len(inner) if len(logs) > 1 else float("nan")
    return {"overhead": round(exp(mean(inner)) - 1, 5), "standard_error": round(error, 5), "count": len(logs)}


def paired(turns: list[tuple[bool, float, float]], clock: int) -> list[float]:
    """Each turn inside over its neighbour outside."""
    pairs = [(one, other) if one[0] else (other, one) for one, other in pairwise(turns) if one[0] != other[0]]
    return [inner[clock] / outer[clock] for inner, outer in pairs]


def summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    rounds = [row for row in rows if row["kind"] == "round"]
    answer: dict[str, Any] = {}
    for name in rounds[0] if rounds else ():
        if name != "kind":
            both = [[row[name][clock] / row["plain"][clock] for row in rounds if name in row] for clock in (0, 1)]
            step_ms = round(1e3 * median(row[name][0] for row in rounds if name in row), 2)
            answer[name] = {"step_ms": step_ms, "wall": figures(both[0]), "cpu": figures(both[1])}
    turns = [row["turns"] for row in rows if row["kind"] == "turns"]
    if turns:
        by_clock = [[ratio for one in turns for ratio in paired(one, clock)] for clock in (1, 2)]
        step_ms = round(1e3 * median(turn[1] for one in turns for turn in one if not turn[0]) / TURN_STEPS, 2)
        answer["hfopt, in and out"] = {"step_ms": step_ms, "wall": figures(by_clock[0]), "cpu": figures(by_clock[1])}
    return answer


def measured(rounds: int, turns: int, steps: int, file: Path | None) -> dict[str, Any]:
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file is not None and file.exists() else []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        if file is not None:
            with file.open("a") as stream:
                stream.write(json.dumps(row) + "\n")

    if rounds or turns:
        with tempfile.TemporaryDirectory() as folder:
            trained = model(layers_for_target(Path(folder)))
            run(Path(folder), trained, 20, [HFGpuMonitor()])
            for done in range(0, turns, TURNS_OF_A_RUN):
                keep(in_and_out(min(TURNS_OF_A_RUN, turns - done), trained, Path(folder)))
            for row in whole_runs(rounds, steps, trained, Path(folder)):
                keep(row)
    return summed(rows)


def counting(method: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Adds the seconds of each call to spent[0] and the call to spent[1]."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        began_s = time.thread_time()
        try:
            return method(*args, **kwargs)
        finally:
            spent[0] += time.thread_time() - began_s
            spent[1] += 1

    return counted


def accounted(steps: int) -> dict[str, float]:
    """CPU seconds inside the monitor over as many steps of 20 ms, less those of the counting, once the run is under way.

    What is spent once (the start, the summary, the first windows, which are free of its budget) is not a step's cost.
    """
    session._GRACE_S = 0.0
    spent, threads, empty = [0.0, 0.0], [0.0], [0.0, 0.0]
    nothing = counting(lambda: None, empty)
    for _ in range(2000):
        nothing()
    monitor = HFGpuMonitor()
    for name in dir(monitor):
        if name.startswith("on_") and name not in ("on_init_end", "on_train_begin", "on_train_end"):
            setattr(monitor, name, counting(getattr(monitor, name), spent))

    class Threads(TrainerCallback):  # type: ignore[misc]
        """Counts the sampling thread, and the hook from the moment it is there."""

        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 0:
                for key, hook in list(model._forward_pre_hooks.items()):
                    model._forward_pre_hooks[key] = counting(hook, spent)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            thread = next((one for one in threading.enumerate() if one.name == "hfopt-sampler"), None)
            if thread is not None and thread.ident is not None:
                threads[0] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))

    with tempfile.TemporaryDirectory() as folder:
        wall, _cpu = run(Path(folder), model(2), steps, [monitor, Threads()])
    sampling = threads[0] / (wall * steps)  # of a second
    inside_s = spent[0] - spent[1] * empty[0] / empty[1]
    own_s = inside_s / steps + sampling * TARGET_STEP_S
    return {"us_per_step": round(1e6 * own_s, 1), "share": round(own_s / TARGET_STEP_S, 5), "sampler_share": round(sampling, 5)}


class Quiet:
    """Sources that answer at once, always the same."""

    def read(self) -> Any:
        return self.answer

    def __init__(self, answer: Any) -> None:
        self.answer = answer


def week() -> dict[str, float]:
    """What is held after an hour and after a week: one sample a second, one window each ten seconds. Objects and resident memory."""
    card = GpuReading(uuid="GPU-0", sm_util=0.9, used_bytes=1 << 30, total_bytes=1 << 34, power_w=200.0, power_limit_w=250.0)
    faults = Faults(lambda message: None)
    sampler = Sampler(gpus=Quiet((card,)), host=Quiet(HostReading(cpu_util=0.5)), faults=faults)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "monitor.jsonl", rank=0, world_size=1, csv=False, max_bytes=1 << 20, faults=faults)
        judge = Judge(RunFacts(device="cuda", cores=8.0), journal, lambda text: None, 30)
        total: Window | None = None
        held: list[tuple[int, float]] = []
        for second in range(7 * 24 * 3600 + 1):
            sample = sampler.tick()
            if second % 10 == 9:
                phases = Phases(forward_backward_s=9.0, optimizer_s=1.0)
                window = Window(
                    first_step=second, last_step=second + 9, steps=10, seconds=10.0, phases=phases, gpus=gpu_windows([sample], {})
                )
                total = merge([total, window]) if total else window
                judge.add(window)
                judge.recent(())
                if second % 1000 == 9:
                    journal.window(window)
            if second in (RING + 100, 7 * 24 * 3600):
                gc.collect()
                held.append((len(gc.get_objects()), psutil.Process().memory_info().rss / 2**20))
        journal.close()
        disk = sum(file.stat().st_size for file in Path(folder).iterdir()) / 2**20
    (hour, hour_mib), (full, full_mib) = held
    return {
        "objects_after_an_hour": hour,
        "objects_after_a_week": full,
        "grown_mib": round(full_mib - hour_mib, 2),
        "log_mib": round(disk, 2),
    }


def show(costs: dict[str, Any]) -> None:
    print(f"{'':<20}{'ms per step':>12}{'wall clock':>20}{'CPU time':>20}   against what ran beside it without, ± standard error")
    for name, cost in costs.items():
        shown = [
            f"{100 * one['overhead']:>+9.2f} ± {100 * one['standard_error']:.2f} % ({one['count']})" for one in (cost["wall"], cost["cpu"])
        ]
        print(f"{name:<20}{cost['step_ms']:>12.2f}{shown[0]:>26}{shown[1]:>26}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15, help="of whole runs, each variant once")
    parser.add_argument("--turns", type=int, default=400, help="of ten steps, with the monitor in or out")
    parser.add_argument("--steps", type=int, default=110, help="of a whole run")
    parser.add_argument("--log", type=Path, help="keep the rows here; those already in it count too")
    parser.add_argument("--no-own", action="store_true", help="neither the monitor's own seconds nor the week")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # a step that needs every core would measure the scheduler
    costs = measured(options.rounds, options.turns, options.steps, options.log)
    show(costs)
    own = {} if options.no_own else accounted(5 * options.steps)
    memory = {} if options.no_own else week()
    if own:
        print(f"hfopt's own CPU time is {100 * own['share']:.3f} % of a {1e3 * TARGET_STEP_S:.0f} ms step ({own['us_per_step']:.0f} µs)")
        print(f"objects: {memory['objects_after_an_hour']} after an hour, {memory['objects_after_a_week']} after a simulated week")
    reached = [cost["wall"]["overhead"] for name, cost in costs.items() if name.startswith("hfopt")]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    within = all(one <= LIMIT for one in reached)
    print(json.dumps({"device": device, "costs": costs, "own": own, "memory": memory, "limit": LIMIT, "within_limit": within}))


if __name__ == "__main__":
    main()
