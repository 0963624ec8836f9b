"""A plan and a run made by hand, and a real browser to open pages in."""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_jobs import made_job

from hfopt.schema import (
    BatchPoint,
    Candidate,
    Change,
    Checkpointing,
    Chosen,
    DataSpec,
    Gpu,
    Hardware,
    Host,
    LoaderPlan,
    MemoryPeak,
    ModelSpec,
    PlanCharts,
    PlanFacts,
    Priced,
    Rejection,
    RunMark,
    RunPoint,
    RunView,
    StepTime,
    TimelinePoint,
)
from hfopt.units import GIB

HOSTILE = "</script><img src=x onerror=\"document.title='pwned'\">"

FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update --disable-sync"
PROBE = """
const errors = [];
addEventListener('error', e => errors.push(String(e.message)), true);
console.error = (...words) => errors.push(words.join(' '));
addEventListener('unhandledrejection', e => errors.push(String(e.reason)));
addEventListener('securitypolicyviolation', e => errors.push(`${e.violatedDirective} ${e.blockedURI}`));
const rgb = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
const light = text => rgb(text).map(c => c / 255).map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const tell = () => {
  const paper = light(getComputedStyle(document.body).backgroundColor);
  const against = text => (Math.max(light(text), paper) + 0.05) / (Math.min(light(text), paper) + 0.05);
  const texts = [...document.querySelectorAll('h1, td, .tile span')].map(place => getComputedStyle(place).color);
  texts.push(...[...document.querySelectorAll('.xtick text, .legendtext')].map(place => getComputedStyle(place).fill));
  parent.postMessage(JSON.stringify({
    errors, title: document.title, images: document.images.length, dark: paper < 0.2, contrast: Math.min(...texts.map(against)),
    fold: Math.max(0, ...[...document.querySelectorAll('.overview li, .overview .verdict, .overview .chart')]
      .map(place => place.getBoundingClientRect().bottom)),
    width: innerWidth, overflow: document.documentElement.scrollWidth - innerWidth,
    charts: [...document.querySelectorAll('.js-plotly-plot')].map(chart => chart.querySelectorAll('svg path').length),
    words: document.body.innerText + [...document.querySelectorAll('svg text')].map(place => place.textContent).join(' '),
    requests: performance.getEntriesByType('resource').length,
  }), '*');
};
const wait = () => document.body.dataset.drawn === undefined ? setTimeout(wait, 50) : setTimeout(tell, 300);
addEventListener('load', wait);
"""


def _priced(batch: int, accumulation: int, device_gib: float, rate: float) -> Priced:
    return Priced(
        candidate=Candidate(per_device_batch=batch, accumulation=accumulation, precision="bf16"),
        memory=MemoryPeak(batch=batch, allocated_bytes=int(device_gib * GIB), reserved_bytes=int(device_gib * GIB), context_bytes=0),
        time=StepTime(step_s=96 / rate, busy_s=48 / rate, samples_per_s=rate, tokens_per_s=None, mfu=None, bound="compute"),
    )


def _chosen(priced: Priced) -> Chosen:
    loader = LoaderPlan(
        workers=2, prefetch_factor=2, pin_memory=True, persistent_workers=True, sample_s=1e-3, measured=False, reason="by modality"
    )
    return Chosen(candidate=priced.candidate, memory=priced.memory, time=priced.time, loader=loader, fits=True)


@pytest.fixture
def facts() -> PlanFacts:
    job = made_job(
        path="c.yaml",
        section=(),
        trainer="Trainer",
        raw={},
        model=ModelSpec(name=HOSTILE),
        data=DataSpec(),
        per_device_batch=32,
        accumulation=3,
    )
    slow = Candidate(per_device_batch=96, accumulation=1, precision="bf16", checkpointing=Checkpointing(every_n_layers=1))
    return PlanFacts(
        job=job,
        hardware=Hardware(gpus=(Gpu(name="RTX 3070", memory_bytes=8 * GIB),), host=Host(cores=2, ram_bytes=GIB, ram_free_bytes=GIB)),
        effective_batch=96,
        budget_bytes=7 * GIB,
        before=_chosen(_priced(32, 3, 3.0, 100.0)),
        after=_chosen(_priced(48, 2, 4.25, 150.0)),
        changes=(Change(key="per_device_train_batch_size", before=32, after=48, reason=HOSTILE),),
        alternatives=(_priced(24, 4, 2.5, 120.0),),
        rejected=(Rejection(candidate=slow, reason="does not fit"),),
    )


@pytest.fixture
def charts() -> PlanCharts:
    timeline = tuple(
        TimelinePoint(
            position=i / 20,
            bytes_by_category={"context": GIB // 4, "weights": GIB, "optimizer": 2 * GIB, "activations": min(i, 20 - i) * GIB // 4},
            moment=f"{HOSTILE} {i}",
            phase="forward" if i <= 10 else "backward" if i < 18 else "optimizer",
        )
        for i in range(21)
    )
    batches = tuple(
        BatchPoint(
            batch=batch,
            checkpointing=every > 0,
            every_n_layers=every,
            device_bytes=(batch * (2 - every) + 20) * GIB // 16,
            samples_per_s=150.0 * batch / (batch + 10),
            fits=batch * (2 - every) + 20 <= 16 * 7,
            may_be_chosen=96 % batch == 0,
            chosen=batch == 48 and every == 1,
        )
        for every in (0, 1)
        for batch in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
    )
    return PlanCharts(timeline=timeline, peak=timeline[10], batches=batches, device_bytes=8 * GIB, budget_bytes=7 * GIB)


@pytest.fixture
def run() -> RunView:
    """Forty minutes on a card; data becomes slow after ten, and memory runs out once."""
    points = []
    for i in range(40):
        wait = 0.02 if i < 10 else 0.4
        figures = {
            "gpu_util": 96 - 100 * wait,
            "gpu_util_min": 90 - 100 * wait,
            "gpu_util_max": 99.0,
            "cpu_util": 20.0,
            "gpu_memory_used_gib": 12 + min(i, 10) / 2,
            "memory_reserved_gib": 11.0,
            "data_wait": wait,
            "gpu_power_w": 140 - 100 * wait,
            "samples_per_s": 26 * (1 - wait),
        }
        shares = {"data wait": wait, "forward+backward": 0.9 - wait, "optimizer": 0.1}
        points.append(RunPoint(until_s=60.0 * (i + 1), last_step=100 * (i + 1), figures=figures, shares=shares))
    marks = (
        RunMark(title="input_bound", words=HOSTILE, step=1001, at_s=600.0),
        RunMark(title="out of memory", words="in backward with 16 samples", step=2000, at_s=1200.0),
    )
    return RunView(
        name=HOSTILE,
        what="BertModel on A10",
        ending="finished at step 4000",
        begin_s=5.0,
        points=tuple(points),
        marks=marks,
        figures={"samples_per_s": 18.0, "data_wait": 0.3, "gpu_util": 65.0, "mfu": 0.4},
        card_bytes=24 * GIB,
        power_limit_w=150.0,
    )


Browser = Callable[..., dict[str, Any]]


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    """Opens a page in headless Chromium at a width and returns what its own scripts saw: errors, charts drawn, overflow, contrast."""
    program = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")

    def look(page: bytes, width: int, *, dark: bool = False) -> dict[str, Any]:
        (tmp_path / "probed.html").write_text(page.decode().replace("<head>", f"<head><script>{PROBE}</script>", 1))
        frame = tmp_path / "frame.html"  # Chromium's smallest window is 500 px wide: a phone is a frame of that width
        frame.write_text(
            f'<iframe src="probed.html" style="width:{width}px;height:900px;border:0"></iframe><pre id="probe"></pre>'
            "<script>onmessage = e => document.getElementById('probe').textContent = e.data</script>"
        )
        own = [f"--user-data-dir={tmp_path / 'profile'}", f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
        command = [program, *FLAGS.split(), *own, "--virtual-time-budget=10000", "--dump-dom", frame.as_uri()]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        seen: dict[str, Any] = json.loads(html.unescape(result.stdout.split('<pre id="probe">')[1].split("</pre>")[0]))
        return seen

    return look
