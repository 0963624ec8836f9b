"""Where the command line is run under bad conditions: a full disk, no right to write, a terminal without our signs, Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import pty
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

ROOT = Path(__file__).parents[2]
CONFIG = "model_name_or_path: bert-base-uncased\nper_device_train_batch_size: 4\nlearning_rate: 5e-5  # not a number\n"


def hfopt(*arguments: object, env: dict[str, str] | None = None, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hfopt", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 120, "check": False, **more}
    return subprocess.run(command, env=environment, **streams)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    return file


@pytest.mark.parametrize("arguments", [["gpus"], ["check", "--json"], ["check", "--upgrade"]])
def test_a_full_disk_behind_stdout(config: Path, arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        done = hfopt(*arguments, *([config] if "check" in arguments else []), stdout=full)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "hfopt: cannot write the output: No space left on device"
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_a_file_that_cannot_be_written_whole_is_not_written(config: Path) -> None:
    target = config.with_name("upgraded.yaml")
    target.write_text("what was there before")

    def at_most_ten_bytes() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))

    unmeasured = {"COVERAGE_PROCESS_CONFIG": ""}  # what .ci/coverage would write has no room either
    done = hfopt("check", config, "--upgrade", "-o", target, env=unmeasured, preexec_fn=at_most_ten_bytes)
    assert done.returncode == 2 and "cannot write" in done.stderr and "Traceback" not in done.stderr
    assert target.read_text() == "what was there before"
    assert sorted(path.name for path in config.parent.iterdir()) == ["config.yaml", "upgraded.yaml"]


@pytest.mark.parametrize("place", ["/proc/no.yaml", "config.yaml/no.yaml"])
def test_no_right_to_write(config: Path, place: str) -> None:
    done = hfopt("check", config, "--upgrade", "-o", config.parent / place)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("hfopt: cannot write") and not done.stdout


@pytest.mark.parametrize("option", ["-o", "--json", "--html", "--lock"])
@pytest.mark.parametrize(("place", "said"), [("no/plan", "there is no folder"), (".", "is a folder")])
def test_a_plan_that_could_not_be_written_is_not_made(config: Path, option: str, place: str, said: str) -> None:
    done = hfopt("plan", config, "--gpu", "t4", option, config.parent / place)
    assert done.returncode == 2 and said in done.stderr.splitlines()[0] and "tracing" not in done.stderr and not done.stdout


@pytest.mark.parametrize("terminal", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
@pytest.mark.parametrize("arguments", [["gpus"], ["check", "--json"], ["check"], ["--help"]])
def test_a_terminal_without_our_signs(config: Path, terminal: dict[str, str], arguments: list[str]) -> None:
    config.write_text(CONFIG + "run_name: 'größer × kleiner'\nwarmup_ratio: 0.1\n", encoding="utf-8")
    done = hfopt(*arguments, *([config] if "check" in arguments else []), env=terminal, text=False)
    assert done.returncode in (0, 1), done.stderr
    assert b"Traceback" not in done.stderr and (done.stdout or done.stderr)


def test_a_config_of_two_thousand_keys(tmp_path: Path) -> None:
    lines = [f"my_own_key_{number}: {number}  # kept" for number in range(2000)]
    lines.insert(1000, "per_device_train_batch_size: 8")
    lines.insert(1500, "learning_rate: 5e-5")
    config, target = tmp_path / "large.yaml", tmp_path / "out.yaml"
    config.write_text("\n".join(lines) + "\n")
    done = hfopt("check", config, "--upgrade", "-o", target)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr
    changed = [(old, new) for old, new in zip(lines, target.read_text().splitlines(), strict=True) if old != new]
    assert changed == [("learning_rate: 5e-5", "learning_rate: 5.0e-5")]


GROWTH = """
import gc, sys
from pathlib import Path
import psutil
from hfopt.config.yaml_edit import edit, upgrade
from hfopt.config.read_job import load_bytes
from hfopt.schema import Change
text = Path(sys.argv[1]).read_text()
def once(number):
    source = f"{text}\\nrun_name: run{number}\\nseed: {number}\\noutput_dir: out{number}\\n".encode()
    loaded = load_bytes(source, f"c{number}.yaml")
    upgrade(loaded)
    edit(loaded, [Change(key="per_device_train_batch_size", before=4, after=number % 7 + 1, reason="x")])
sizes = []
for number in range(500):
    once(number)
    if number in (100, 499):
        gc.collect()
        sizes.append((psutil.Process().memory_info().rss, len(gc.get_objects())))
print(sizes[1][0] - sizes[0][0], sizes[1][1] - sizes[0][1])
"""


@pytest.mark.slow
def test_five_hundred_configs_in_a_row_take_no_more_memory(config: Path) -> None:
    command = [sys.executable, "-c", GROWTH, str(config)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=True)
    grown_bytes, grown_objects = map(int, done.stdout.split())
    assert grown_bytes < 4 << 20 and grown_objects < 1000


# ---------------------------------------------------------------------------------------------- Ctrl-C


def family_of(pid: int) -> dict[int, psutil.Process]:
    """It and its children; nothing once it has ended, which a quick machine does before anyone interrupts it."""
    try:
        process = psutil.Process(pid)
        return {one.pid: one for one in [process, *process.children(recursive=True)]}
    except psutil.NoSuchProcess:
        return {}


def interrupted(command: list[str], folder: Path, *, after_s: float, once: Path | None = None) -> tuple[int, str]:
    """Starts it, sends SIGINT to its whole group as a terminal does, and waits; what is left of it afterwards is a failure.

    once: a file that it writes when it has come as far as it should; `after_s` is then only how long to wait for it.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp")}
    (folder / "tmp").mkdir(exist_ok=True)
    family: dict[int, psutil.Process] = {}
    until = time.monotonic() + after_s
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **streams) as process:
        while time.monotonic() < until and process.poll() is None and not (once is not None and once.exists()):
            family |= family_of(process.pid)
            time.sleep(0.05)
        if process.poll() is None:
            family |= family_of(process.pid)
            os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    _, left = psutil.wait_procs(list(family.values()), timeout=60)
    assert not left, left
    return process.returncode, said


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.3, 2.0, 5.0, 8.0])
def test_a_plan_that_is_interrupted_leaves_nothing(config: Path, after_s: float) -> None:
    config.write_text(CONFIG.replace("5e-5", "5.0e-5"))
    target = config.with_name("planned.yaml")
    command = [sys.executable, "-m", "hfopt", "plan", str(config), "--gpu", "T4", "-o", str(target)]
    code, said = interrupted(command, config.parent, after_s=after_s)
    assert code in (0, 1, 130, -signal.SIGINT), said[-2000:]
    left = [path for path in (config.parent / "tmp").rglob("*") if path.is_file()]
    assert not left, left
    written = {path.name for path in config.parent.iterdir() if path.suffix == ".yaml"}
    assert written in ({"config.yaml"}, {"config.yaml", "planned.yaml"})
    assert target.exists() or code != 0
    if target.exists():  # it was quicker, or interrupted after it had written
        assert {*yaml.safe_load(config.read_text())} <= {*yaml.safe_load(target.read_text())}


@pytest.mark.slow
def test_a_run_that_is_interrupted_leaves_no_process(tmp_path: Path) -> None:
    script, running = tmp_path / "train.py", tmp_path / "running"
    script.write_text(
        "import pathlib, subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'], stderr=subprocess.DEVNULL)\n"
        f"try:\n    pathlib.Path({str(running)!r}).touch()\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    sys.exit(130)\n"
    )
    code, said = interrupted([sys.executable, "-m", "hfopt", "run", str(script)], tmp_path, after_s=120, once=running)
    assert running.exists()
    assert code == 130, said[-2000:]
    assert "Traceback" not in said
    assert not [path for path in (tmp_path / "tmp").rglob("*") if path.is_file()]


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_a_rehearsal_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    script, on_card = tmp_path / "train.py", tmp_path / "on_card"
    script.write_text(
        f"import pathlib, torch, time\ntorch.zeros(1 << 20, device='cuda')\npathlib.Path({str(on_card)!r}).touch()\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-m", "hfopt", "rehearse", "--gpu", "T4", str(script)]
    code, said = interrupted(command, tmp_path, after_s=120, once=on_card)
    assert on_card.exists()
    assert code in (1, 130, -signal.SIGINT), said[-2000:]
    assert not [path for path in (tmp_path / "tmp").rglob("*") if path.is_file()]


def test_ctrl_c_ends_a_watch_and_gives_the_terminal_back() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "hfopt", "watch", "--pid", str(os.getpid()), "--interval", "0.2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen(command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    shown = b""
    while b"RAM" not in shown:
        shown += os.read(ours, 4096)
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(OSError):  # EIO: the last writer is gone
        while more := os.read(ours, 4096):
            shown += more
    os.close(ours)
    assert process.wait(timeout=60) == 0
    assert b"Traceback" not in shown and shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l"), "the cursor is shown again"


# ---------------------------------------------------------------------------------------------- who may read what


def test_what_is_cached_is_for_its_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hfopt import files

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        place = files.location("answers") / "one.json"
        files.write_private(place, "{}")
    finally:
        os.umask(before)
    rights = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (place, place.parent, place.parent.parent)}
    assert rights == {"one.json": 0o600, "answers": 0o700, "hfopt": 0o700}
    assert [path.name for path in place.parent.iterdir()] == ["one.json"]
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert files.location("x").is_absolute()


def test_what_is_made_from_a_private_config_is_private(config: Path) -> None:
    config.chmod(0o600)
    target = config.with_name("upgraded.yaml")
    assert hfopt("check", config, "--upgrade", "-o", target).returncode in (0, 1)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    target.chmod(0o640)  # once it is there it keeps its own rights
    assert hfopt("check", config, "--upgrade", "-o", target).returncode in (0, 1)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_without_a_home_the_cache_is_in_the_temporary_folder_and_half_a_file_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hfopt import files

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "home", no_home)
    assert files.location("answers") == tmp_path / f"hfopt-{os.getuid()}" / "answers"
    with pytest.raises(UnicodeEncodeError):
        files.write_private(tmp_path / "answers" / "one.json", "half \ud800")
    assert list((tmp_path / "answers").iterdir()) == []


def test_what_other_code_prints_is_not_in_the_answer(tmp_path: Path) -> None:
    """A model's own file, and what it loads, may print at any time: to Python's stdout, to its descriptor, from a child."""
    (tmp_path / "talking.py").write_text(
        "import os, subprocess\n"
        "import torch\n"
        "print('from Python')\n"
        "os.write(1, b'from below\\n')\n"
        "subprocess.run(['echo', 'from a child'])\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(8, 1)\n"
        "    def forward(self, x):\n"
        "        return {'loss': self.layer(x).sum()}\n"
        "def make_batch(samples):\n"
        "    return {'x': torch.zeros(samples, 8)}\n"
    )
    config = tmp_path / "config.yaml"
    config.write_text("per_device_train_batch_size: 4\noutput_dir: out\n")
    command = ("plan", config, "--model", f"{tmp_path / 'talking.py'}:Model", "--trust-remote-code", "--gpu", "t4", "--no-dry-run")
    done = hfopt(*command, env={"HFOPT_NO_CACHE": "1"})
    assert done.returncode == 0, done.stderr
    assert set(yaml.safe_load(done.stdout)) >= {"per_device_train_batch_size", "output_dir"}
    for words in ("from Python", "from below", "from a child"):
        assert words in done.stderr and words not in done.stdout
