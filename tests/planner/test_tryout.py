"""Where a winner can be tried, and the child that is ready before the winner is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_jobs import made_job

from hfopt.compat.versions import TorchBuild
from hfopt.errors import VirtualGpuError
from hfopt.planner import trials
from hfopt.planner.trials import Tryout, where_to_try
from hfopt.schema import Candidate, DataSpec, Gpu, Hardware, Host, ModelSpec, TrainJob, Trial
from hfopt.units import GIB

HOST = Host(cores=2, ram_bytes=GIB, ram_free_bytes=GIB)
CARD = Gpu(name="card", memory_bytes=8 * GIB, capability=(8, 6), sms=46)
HERE = Hardware(gpus=(CARD,), host=HOST)
ELSEWHERE = replace(HERE, hypothetical=True)
JOB = made_job(
    path="c.yaml", section=(), trainer="Trainer", raw={}, model=ModelSpec(name="m"), data=DataSpec(), per_device_batch=8, accumulation=1
)
PLAIN = Candidate(per_device_batch=8, accumulation=1, precision="bf16")


class FakePrepared:
    started: list[FakePrepared] = []  # noqa: RUF012 - the list is the test's record

    def __init__(self, job: TrainJob, **options: Any) -> None:
        self.options, self.closed, self.asked = options, False, 0
        FakePrepared.started.append(self)

    def run(self, candidate: Candidate, *, evaluation: Any = None, meanwhile: Callable[[], object]) -> Trial:
        self.asked += 1
        meanwhile()
        return Trial(device="virtual", candidate=candidate, outcome="ok")

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> FakePrepared:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture(autouse=True)
def no_real_child(monkeypatch: pytest.MonkeyPatch) -> None:
    FakePrepared.started = []
    monkeypatch.setattr(trials, "Prepared", FakePrepared)
    monkeypatch.setattr(trials, "available", lambda: None)


def test_where() -> None:
    assert where_to_try(JOB, HERE) == "cuda"
    assert where_to_try(JOB, replace(HERE, gpus=())) == "cpu"
    assert where_to_try(JOB, ELSEWHERE) == "virtual"
    assert where_to_try(JOB, replace(ELSEWHERE, gpus=(replace(CARD, capability=None),))) is None
    assert where_to_try(JOB, replace(ELSEWHERE, gpus=(replace(CARD, vendor="amd"),))) is None
    assert where_to_try(replace(JOB, world_size=2), HERE) is None


def test_the_child_is_started_before_the_winner_is_known_and_serves_one() -> None:
    with Tryout(lambda text: None) as trying:
        trying.prepare(JOB, ELSEWHERE)
        trying.start()
        assert len(FakePrepared.started) == 1 and FakePrepared.started[0].asked == 0
        for _ in range(2):
            trial = trying(PLAIN)
            assert trial is not None and trial.outcome == "ok"
    assert [(child.asked, child.closed) for child in FakePrepared.started] == [(1, True), (1, True)]
    assert FakePrepared.started[0].options["context_bytes"] > 0


def test_a_call_that_only_the_stand_in_lacks_says_nothing_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Trial(device="virtual", candidate=PLAIN, outcome="error", message="cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may …")
    monkeypatch.setattr(FakePrepared, "run", lambda self, candidate, evaluation, meanwhile: failed)
    with Tryout(lambda text: None, asked=True) as trying:
        trying.prepare(JOB, ELSEWHERE)
        assert trying(PLAIN) is None and trying.note == "not rehearsed: the virtual GPU has no CUDNN call that this model makes"
    with Tryout(lambda text: None, asked=True) as trying:
        trying.prepare(JOB, HERE)
        assert trying(PLAIN) == failed  # on the card itself it fails


@pytest.mark.parametrize(("hardware", "asked"), [(ELSEWHERE, ["ahead"]), (HERE, [])], ids=["rehearsed", "timed here"])
def test_other_work_goes_on_beside_a_rehearsal_and_not_beside_a_measurement(hardware: Hardware, asked: list[str]) -> None:
    heard: list[str] = []
    with Tryout(lambda text: None, asked=True) as trying:
        trying.prepare(JOB, hardware)
        assert trying(PLAIN, None, lambda: heard.append("ahead")) is not None and heard == asked
        assert FakePrepared.started[0].closed == (hardware is HERE), "what it holds on the card is the next one's"
    assert FakePrepared.started[0].closed


def test_a_child_that_was_not_asked_is_ended() -> None:
    with Tryout(lambda text: None) as trying:
        trying.prepare(JOB, ELSEWHERE)
        trying.start()
    assert [(child.asked, child.closed) for child in FakePrepared.started] == [(0, True)]


def test_what_the_virtual_gpu_cannot_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with Tryout(lambda text: None) as trying:
        trying.prepare(JOB, ELSEWHERE)
        trying.start()
        monkeypatch.setattr(trials, "find_spec", lambda name: None)
        assert trying(replace(PLAIN, use_liger_kernel=True)) is None
        assert trying.note is not None and "liger-kernel" in trying.note
        monkeypatch.setattr(trials, "find_spec", lambda name: object())
        assert trying(replace(PLAIN, use_liger_kernel=True)) is not None, "its Python runs there, its kernels do nothing"
        assert trying(replace(PLAIN, attn_implementation="flash_attention_2")) is None
        assert trying(replace(PLAIN, attn_implementation="sdpa")) is not None


def test_a_virtual_gpu_that_cannot_be_built_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise VirtualGpuError("gcc said no")

    monkeypatch.setattr(trials, "Prepared", fails)
    trying = Tryout(lambda text: None)
    trying.prepare(JOB, ELSEWHERE)
    trying.start()
    assert trying(PLAIN) is None and trying.note == "not rehearsed: gcc said no"


@pytest.mark.parametrize("hardware", [HERE, ELSEWHERE], ids=["here", "elsewhere"])
def test_a_card_without_kernels_in_the_installed_torch_is_not_tried(hardware: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "torch_build", lambda: TorchBuild(version="2.15.0+cu132", cuda="13.2"))
    tryout = Tryout(lambda text: None)
    tryout.prepare(JOB, replace(hardware, gpus=(replace(CARD, capability=(6, 1)),)))
    assert tryout(PLAIN) is None and FakePrepared.started == []
    assert tryout.note is not None and "no kernels" in tryout.note


def test_a_rehearsal_is_made_where_something_is_traced_or_it_is_asked_for() -> None:
    """It imports torch, which a plan from kept traces need not."""
    with Tryout(lambda text: None) as trying:
        trying.prepare(JOB, ELSEWHERE)
        assert trying(PLAIN) is None and trying.note == trials.NOT_REHEARSED
        trying.start()
        trying.start()
        assert len(FakePrepared.started) == 1 and trying(PLAIN) is not None
    with Tryout(lambda text: None, asked=True) as trying:
        trying.prepare(JOB, ELSEWHERE)
        assert trying(PLAIN) is not None
    with Tryout(lambda text: None, asked=False) as trying:
        trying.prepare(JOB, HERE)
        trying.start()
        assert trying(PLAIN) is None and trying.note is None


def test_a_device_that_is_here_is_always_tried() -> None:
    with Tryout(lambda text: None) as trying:
        trying.prepare(JOB, HERE)
        assert len(FakePrepared.started) == 1
        assert trying(PLAIN) is not None


def test_the_rehearsal_of_the_same_question_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HFOPT_NO_CACHE", "0")
    job = replace(JOB, model=ModelSpec(name="bert-base-uncased"))

    def tried(job: TrainJob, hardware: Hardware, candidate: Candidate, *, start: bool) -> Trial | None:
        with Tryout(lambda text: None) as trying:
            trying.prepare(job, hardware)
            if start:
                trying.start()
            return trying(candidate)

    first = tried(job, ELSEWHERE, PLAIN, start=True)
    assert first is not None and tried(job, ELSEWHERE, PLAIN, start=False) == first
    assert tried(job, ELSEWHERE, replace(PLAIN, per_device_batch=4), start=False) is None
    assert tried(job, replace(ELSEWHERE, gpus=(replace(CARD, sms=40),)), PLAIN, start=False) is None
    assert tried(replace(job, raw={"optim": "sgd"}), ELSEWHERE, PLAIN, start=False) is None


@pytest.mark.parametrize(
    ("hardware", "may_compile", "eager"), [(ELSEWHERE, False, True), (ELSEWHERE, True, False), (HERE, False, False)], ids=str
)
def test_only_a_rehearsal_that_compiles_nothing_goes_without_the_compiler(hardware: Hardware, may_compile: bool, eager: bool) -> None:
    tryout = Tryout(lambda text: None, asked=True, may_compile=may_compile)
    tryout.prepare(JOB, hardware)
    assert [one.options["eager"] for one in FakePrepared.started] == [eager]
