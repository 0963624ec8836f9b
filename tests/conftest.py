"""What every test shares: where the virtual GPU can run, and the rule that a skipped test is a failure where it should have run."""

from __future__ import annotations

import os
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from nvml_standin import NvmlStandin, compile_standin

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["HFOPT_NO_CACHE"] = "1"  # a test traces for itself; those of the store switch it on, in a folder of their own
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores, and OpenMP's threads would wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what runs in the background, and children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")


def _why_no_virtual_gpu() -> str | None:
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return "torch is not installed"
    if not (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists():
        return "virtual GPU: this torch is a CPU-only build"
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        return "virtual GPU: no C compiler"
    return None


def _has_real_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


TRAINER_TIER = (
    "examples",
    "launch",
    "monitor/test_callback",
    "oom/test_evaluation_batches",
    "oom/test_protect",
    "oom/test_shortage",
    "planner/test_configs",
    "planner/test_python_api",
    "planner/test_start",
    "probe",
    "process",
    "virtual",
)
"""Files whose tests train with real Trainers or start real programs. Of them, what is not marked slow is the tier `-m trainer`."""


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why_not = _why_no_virtual_gpu()
    here = Path(__file__).parent
    for item in items:
        name = item.path.relative_to(here).as_posix() if item.path.is_relative_to(here) else ""
        if name.startswith(TRAINER_TIER) and not item.get_closest_marker("slow"):
            item.add_marker("trainer")
        if why_not and item.get_closest_marker("virtual_gpu"):
            item.add_marker(pytest.mark.skip(reason=why_not))
        if item.get_closest_marker("gpu") and not _has_real_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a real NVIDIA card"))


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_standin(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml_standin(nvml_library: Path, tmp_path: Path) -> NvmlStandin:
    """A pretended NVIDIA driver without cards; see tests/support/nvml_standin.py."""
    return NvmlStandin(nvml_library, tmp_path)


_skipped_but_required: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Also where xdist shares the tests among processes: this hook sees the reports of all."""
    if report.skipped and not hasattr(report, "wasxfail") and "gpu" not in report.keywords:
        _skipped_but_required.append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A whole module that is left out never comes to a test of its own."""
    if report.skipped:
        _skipped_but_required.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With HFOPT_NO_SKIPS=1 (CI) only tests that need a real card may be skipped."""
    if os.environ.get("HFOPT_NO_SKIPS") == "1" and _skipped_but_required and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("HFOPT_NO_SKIPS") == "1" and _skipped_but_required:
        terminalreporter.section("skipped, but should have run")
        for nodeid in _skipped_but_required:
            terminalreporter.write_line(nodeid)
