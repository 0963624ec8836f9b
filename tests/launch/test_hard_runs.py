"""`hfopt run` where the machine or the script is hard on it: what the script would have done alone, it does under `hfopt run`."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hfopt.launch import attach, supervisor
from hfopt.launch.handoff import HANDOFF, Handoff, RunStart

ROOT = Path(__file__).parents[2]
SITE = ROOT / "hfopt" / "site"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """With a temporary folder of its own, which is to be empty afterwards."""
    (tmp_path / "tmp").mkdir()
    return {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"}


def script(folder: Path, text: str, name: str = "quick.py") -> str:
    (folder / name).write_text("import json, os, signal, subprocess, sys, time\nfrom pathlib import Path\n" + text)
    return str(folder / name)


def started(env: dict[str, str], *words: str, **more: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hfopt", "run", *words]
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def ended(env: dict[str, str], *words: str, code: int = 0, **more: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "hfopt", "run", *words], env=env, capture_output=True, text=True, timeout=300, check=False, **more
    )
    assert done.returncode == code, done.stderr
    return done


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_what_was_ignored_when_it_began_stays_ignored(number: signal.Signals, tmp_path: Path, env: dict[str, str]) -> None:
    """As `nohup hfopt run train.py &` asks for."""
    quick = script(tmp_path, "print('ready', flush=True); print(sys.stdin.readline(), signal.getsignal(signal.SIGHUP), flush=True)")
    process = started(env, quick, preexec_fn=lambda: signal.signal(number, signal.SIG_IGN))
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, err = process.communicate("done\n")
    assert (process.returncode, "done" in out) == (0, True), err


FAILS = """
from types import SimpleNamespace
from hfopt.launch.handoff import Handoff, RunStart
from hfopt.schema import RunFailure
out = Path(sys.argv[1])
handoff, begun = Handoff.here(), out / "begun"
seen = int(begun.read_text()) if begun.exists() else 0
args = SimpleNamespace(
    output_dir=str(out / "run"), per_device_train_batch_size=8, gradient_accumulation_steps=1, dataloader_num_workers=0,
)
handoff.started(RunStart.of(args))
begun.write_text(str(seen + 1))
if seen < int(sys.argv[2]):
    handoff.failed(RunFailure(action="restart", reason="memory ran out in the optimizer step", output_dir=args.output_dir, changes={}))
    sys.exit(1)
print("ORDERS", os.environ.get("HFOPT_ORDERS"))
"""


def whole(folder: Path) -> Path:
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file({"a": torch.zeros(3)}, folder / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"a": torch.zeros(3)}, folder / name)
    (folder / "trainer_state.json").write_text('{"global_step": 500}')
    return folder


def test_the_checkpoint_of_an_earlier_run_in_the_same_folder_is_not_resumed(tmp_path: Path, env: dict[str, str]) -> None:
    whole(tmp_path / "run" / "checkpoint-500")
    done = ended(env, "--no-plan", script(tmp_path, FAILS), str(tmp_path), "1")
    assert '"checkpoint": null' in done.stdout and "from the start" in done.stderr, done.stderr
    assert "checkpoint-500: it was there before this run began" in done.stderr


ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def heeding() -> None:
    """The tests themselves may have been started to ignore some of them (nohup), and what is ignored stays ignored."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)


def test_nothing_is_left_of_a_run_that_is_ended_at_any_moment(tmp_path: Path, env: dict[str, str]) -> None:
    """Also between two starts, when no child is there to be told."""
    rolls, quick = random.Random(3), script(tmp_path, FAILS)
    for number in range(8):
        process = started(env, "--no-plan", "--restarts", "100000", quick, str(tmp_path), "100000", preexec_fn=heeding)
        marker = tmp_path / "begun"
        while not marker.exists() or not marker.read_text():
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(rolls.uniform(0.0, 1.0))
        process.send_signal(rolls.choice(ENDING))
        process.communicate()
        assert process.returncode != 0, number
        assert not list((tmp_path / "tmp").iterdir()), number
        marker.unlink()


def test_what_a_script_leaves_running_goes_on_after_its_good_end(tmp_path: Path, env: dict[str, str]) -> None:
    """A tracker that still uploads, a TensorBoard: alone the script would have left it behind too."""
    daemon = "child = subprocess.Popen(['sleep', '300'], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
    done = ended(env, script(tmp_path, daemon + "print(child.pid)"))
    left = psutil.Process(int(done.stdout))
    assert left.is_running() and left.name() == "sleep"
    left.kill()
    failed = ended(env, script(tmp_path, daemon + "print(child.pid); sys.exit(3)"), code=3)
    assert not psutil.pid_exists(int(failed.stdout)), "ranks of a launcher that was killed hold their cards"


def test_a_hard_exit_with_threads_keeps_its_code(tmp_path: Path, env: dict[str, str]) -> None:
    done = ended(env, script(tmp_path, "import threading; threading.Thread(target=time.sleep, args=(600,)).start(); os._exit(7)"), code=7)
    assert done.returncode == 7


WORKERS = """
import multiprocessing
def look(_):
    import sitecustomize
    return [entry for entry in sys.path], getattr(sitecustomize, "MINE", None), "hfopt" in sys.modules
if __name__ == "__main__":
    found = {"script": look(0)}
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            found[method] = pool.map(look, [0])[0]
    print(json.dumps(found))
"""


def test_workers_and_the_users_own_sitecustomize_and_path_are_as_alone(tmp_path: Path, env: dict[str, str]) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("MINE = 'mine'\n")
    env["PYTHONPATH"] = f"{own}:{ROOT}"
    del env["TMPDIR"]  # the forkserver's socket lies there, and a socket's path may take 107 characters
    quick = script(tmp_path, WORKERS)
    alone = json.loads(subprocess.run([sys.executable, quick], env=env, capture_output=True, text=True, check=True).stdout)
    assert json.loads(ended(env, quick).stdout) == alone
    assert set(alone) == {"script", "spawn", "forkserver"} and all(words[1:] == ["mine", False] for words in alone.values())


def test_hfopt_is_found_where_the_child_has_none_and_brings_nothing_else(tmp_path: Path) -> None:
    home = tmp_path / "packages"
    home.mkdir()
    (home / "hfopt").symlink_to(ROOT / "hfopt")
    (home / "colorsys.py").write_text("raise ImportError('of another Python')\n")
    (home / "neighbour.py").touch()
    code = (
        f"import sys; sys.path.insert(0, {str(SITE)!r}); import sitecustomize, colorsys, hfopt.errors, importlib.util as found\n"
        "print(hfopt.__file__, found.find_spec('neighbour'))"
    )
    env = {HANDOFF: str(tmp_path / "handoff.json"), "HFOPT_HOME": str(home), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == f"{home / 'hfopt' / '__init__.py'} None\n", done.stderr


def test_a_package_is_run_by_its_name(tmp_path: Path, env: dict[str, str]) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    script(package, "from . import part; os.chdir('/'); print(__package__, part.NAME, sys.argv[1:])", "__main__.py")
    (package / "part.py").write_text("NAME = 'part'\n")
    assert ended(env, "-m", "package", "--lr", "1", cwd=tmp_path).stdout == "package part ['--lr', '1']\n"


HANGS = """
from types import SimpleNamespace
from hfopt.launch.handoff import Handoff, RunStart
from hfopt.launch.heartbeat import Heart
out = Path(sys.argv[1])
handoff = Handoff.here()
args = SimpleNamespace(
    output_dir=str(out / "run"), per_device_train_batch_size=8, gradient_accumulation_steps=1, dataloader_num_workers=0,
)
handoff.started(RunStart.of(args))
heart = Heart(handoff.path.parent, rank=0, after_s=2.0)
if not (out / "hung").exists():
    (out / "hung").touch()
    def collate(): time.sleep(600)
    collate()
heart.stop()
print("ORDERS", os.environ.get("HFOPT_ORDERS"))
"""


def test_a_rank_that_hangs_is_ended_and_resumed_where_that_was_asked_for(tmp_path: Path, env: dict[str, str]) -> None:
    words = ["hfopt", "run", "--no-plan", "--hang-after", "2", "--restart-hung", script(tmp_path, HANGS), str(tmp_path)]
    quicker = "import sys; from hfopt.launch import supervisor; supervisor.GRACE_S = 1.0\n"
    quicker += f"sys.argv = {words!r}; from hfopt.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", quicker], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "ORDERS {" in done.stdout, done.stderr
    assert "has made no step for 2 s; it is in" in done.stderr and "in collate" in done.stderr
    assert "collate" in (tmp_path / "run" / "hfopt" / "hang-rank0.txt").read_text()


def test_a_script_that_never_fits_ends_after_its_limit(tmp_path: Path, env: dict[str, str]) -> None:
    done = ended(env, "--no-plan", "--restarts", "2", script(tmp_path, FAILS), str(tmp_path), "1000", code=1)
    assert (tmp_path / "begun").read_text() == "3"
    assert "2 restarts did not help" in done.stderr and "To change: gradient_checkpointing: true" in done.stderr


def test_a_handoff_whose_folder_went_away_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Folders below /tmp are swept after some days; a run may be longer."""
    monkeypatch.setenv(HANDOFF, str(tmp_path / "gone" / "handoff.json"))
    handoff = Handoff.here()
    assert handoff is not None
    args = SimpleNamespace(output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=1, dataloader_num_workers=0)
    handoff.started(RunStart.of(args))
    assert handoff.start is None and "cannot be reached" in capsys.readouterr().err


def test_a_plan_that_cannot_be_written_is_in_force_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    watched: list[Any] = []
    (tmp_path / "hfopt").touch()
    monkeypatch.setattr(attach, "_decision", lambda trainer, options: attach.Decision(lines=("hfopt: planned: x",)))
    monkeypatch.setattr(attach, "apply_changes", lambda *_, **__: None)
    monkeypatch.setattr(attach, "_watch", lambda trainer, plan: watched.append(trainer))
    args = SimpleNamespace(output_dir=str(tmp_path), world_size=1)
    monkeypatch.setattr(attach, "effective_config", lambda args: {})
    attach._planned_harmlessly(SimpleNamespace(args=args, is_world_process_zero=lambda: True), searching=False)
    said = capsys.readouterr().err
    assert watched and "its own settings" not in said and "could not be written" in said


@pytest.mark.parametrize("name", ["rng_state.pth", "scaler.pt"])
def test_a_random_state_or_scale_that_is_cut_short(name: str, tmp_path: Path) -> None:
    folder = whole(tmp_path / "checkpoint-2")
    assert supervisor.what_is_wrong(folder) is None
    (folder / name).write_bytes(b"PK")
    assert supervisor.what_is_wrong(folder) == f"{name} is cut short or empty"
    (folder / name).unlink()
    assert supervisor.what_is_wrong(folder) == ("rng_state.pth is missing" if name == "rng_state.pth" else None)
