"""`hfopt run`: what a process cannot survive is restarted from its checkpoint and ends where the undisturbed run does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from hfopt.cgroup import Kills, killed_for_memory, oom_kills
from hfopt.cli.run import resolved
from hfopt.errors import HfoptError
from hfopt.launch import supervisor
from hfopt.launch.handoff import Handoff, RestartOrders, RunStart
from hfopt.process import child_process

SCRIPT = Path(__file__).parent / "training_script.py"
ROOT = Path(__file__).parents[2]


def hfopt_run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    started = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env}
    return subprocess.run(
        [sys.executable, "-m", "hfopt", "run", "--no-plan", *words], capture_output=True, text=True, env=started, timeout=300, check=False
    )


def results(output: str) -> list[dict[str, Any]]:
    """Two ranks may print on one line."""
    return [json.loads(found) for found in re.findall(r"RESULT (\{[^{}]*\})", output)]


@pytest.mark.slow
def test_an_oom_in_the_optimizer_is_resumed_with_the_same_product(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    config = tmp_path / "config.yaml"
    config.write_text("# tuned by hand\nper_device_train_batch_size: 8 # fits\ngradient_accumulation_steps: 2\nlearning_rate: 5.0e-5\n")
    plain = hfopt_run(str(SCRIPT), str(tmp_path / "plain"), "none")
    run = hfopt_run(str(SCRIPT), str(tmp_path), "optimizer", str(config))
    assert (plain.returncode, run.returncode) == (0, 0), run.stderr
    (expected,), (result,) = results(plain.stdout), results(run.stdout)
    assert (result["batch"], result["used_batch"], result["accumulation"]) == (4, 4, 4)
    assert result["step"] == expected["step"] == 5
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert result["weights"] == pytest.approx(expected["weights"], rel=1e-9)
    assert "the optimizer step had begun" in run.stderr
    assert "Restart 1 of at most 3, resuming from" in run.stderr
    assert "checkpoint-2" in run.stderr
    replanned = config.with_name("config_replanned.yaml").read_text()
    assert yaml.safe_load(replanned)["per_device_train_batch_size"] == 4
    assert replanned.startswith("# tuned by hand\n")
    assert "hfopt" not in plain.stderr


@pytest.mark.slow
def test_restarts_have_a_limit_and_a_bug_has_none(tmp_path: Path) -> None:
    hopeless = hfopt_run("--restarts", "1", str(SCRIPT), str(tmp_path), "hopeless")
    assert hopeless.returncode == 1
    assert hopeless.stderr.count("Restart 1 of at most 1") == 1
    assert "1 restart did not help" in hopeless.stderr
    bug = hfopt_run(str(SCRIPT), str(tmp_path / "other"), "bug")
    assert bug.returncode == 7
    assert "Restart" not in bug.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("trouble", "world"), [("exchange", 2), ("exchange", 4), ("optimizer", 2)])
def test_all_ranks_end_and_resume_when_one_cannot_go_on(tmp_path: Path, trouble: str, world: int) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world), str(SCRIPT)]
    run = hfopt_run(*launcher, str(tmp_path), trouble)
    assert run.returncode == 0, run.stderr[-3000:]
    ranks = results(run.stdout)
    assert [rank["step"] for rank in ranks] == [5] * world
    assert all(rank["batch"] * rank["accumulation"] * world == (8 if trouble == "exchange" else 16) for rank in ranks)
    assert all(rank["batch"] * world == 4 for rank in ranks)
    assert ("gradients were being exchanged" in run.stderr) == (trouble == "exchange")


QUICK = "import sys, os, signal, time, pathlib\n"


def test_the_exit_code_signals_and_input_pass_through(tmp_path: Path) -> None:
    script = tmp_path / "quick.py"
    script.write_text(QUICK + "print(sys.stdin.read().upper(), sys.argv[1:]); sys.exit(5)")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "hfopt", "run", str(script), "--restarts", "-x"]
    done = subprocess.run(command, input="hello", capture_output=True, text=True, env=env, timeout=60, check=False)
    assert done.returncode == 5
    assert done.stdout.startswith("HELLO ['--restarts', '-x']")
    script.write_text(QUICK + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); print('ready', flush=True); time.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-m", "hfopt", "run", str(script)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=env
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 9
    process.stdout.close()
    script.write_text(QUICK + "os.kill(os.getpid(), signal.SIGKILL)")
    killed = subprocess.run([sys.executable, "-m", "hfopt", "run", str(script)], capture_output=True, env=env, timeout=60, check=False)
    assert killed.returncode == 128 + signal.SIGKILL


def test_what_to_execute(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert resolved([str(script), "--lr", "1"]) == [sys.executable, str(script), "--lr", "1"]
    assert resolved(["-m", "package"]) == [sys.executable, "-m", "package"]
    assert Path(resolved(["sh", "-c", "true"])[0]).is_absolute()
    for wrong, said in [
        (["missing.py"], "no such script"),
        (["no-such-launcher"], "no such program"),
        (["--atempts"], "no such option"),
        (["-m"], "needs"),
    ]:
        with pytest.raises(HfoptError, match=said):
            resolved(wrong)


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/user.slice/app", "user.slice/app/memory.events"),
        ("4:memory:/jobs/7", "memory/jobs/7/memory.oom_control"),
        ("0::/", "memory.events"),
    ],
)
def test_the_kernels_count_of_kills(tmp_path: Path, line: str, file: str) -> None:
    own = tmp_path / "cgroup"
    own.write_text(f"{line}\n")
    (tmp_path / "vmstat").write_text("nr_free_pages 12\noom_kill 7\n")
    assert oom_kills(tmp_path, own, tmp_path / "none") == Kills(own=None, system=None)
    events = tmp_path / file
    events.parent.mkdir(parents=True, exist_ok=True)
    events.write_text("low 0\noom 4\noom_kill 3\n")
    assert oom_kills(tmp_path, own, tmp_path / "vmstat") == Kills(own=3, system=7)


@pytest.mark.parametrize(
    ("own", "system", "code", "killed"),
    [
        ((3, 4), (7, 8), 1, True),  # a launcher whose rank was killed
        ((3, 3), (7, 8), 137, True),  # in a cgroup below ours
        ((3, 3), (7, 8), 1, False),  # somebody else's process
        ((3, 3), (7, 7), 137, False),  # killed, but not for memory
        ((None, None), (7, 8), 137, True),
        ((None, None), (None, None), 137, False),
    ],
)
def test_who_was_killed_for_memory(own: Any, system: Any, code: int, killed: bool) -> None:
    before, after = (Kills(own=own[when], system=system[when]) for when in (0, 1))
    assert killed_for_memory(before, after, code) is killed


@pytest.mark.parametrize(
    ("workers", "batch", "changes"),
    [
        (4, 8, {"dataloader_num_workers": 2}),
        (0, 8, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}),
        (0, 9, {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 6}),
        (0, 1, {}),
    ],
)
def test_a_process_killed_by_the_kernel_is_restarted_with_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, batch: int, changes: dict[str, int]
) -> None:
    note = Handoff(path=tmp_path / "handoff.json")
    settings = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 2, "dataloader_num_workers": workers}
    (tmp_path / "handoff.json.alive").write_text(json.dumps({"output_dir": str(tmp_path / "out"), **settings}))
    monkeypatch.setattr(supervisor, "oom_kills", lambda: Kills(own=5, system=5))
    verdict = supervisor._verdict(note, 137, Kills(own=4, system=4))
    assert verdict is not None
    assert verdict.changes == changes
    assert verdict.hopeless == (not changes)


@pytest.mark.slow
def test_a_run_that_the_kernel_killed_resumes_and_ends_where_the_undisturbed_one_does(tmp_path: Path) -> None:
    """SIGKILL in the middle of a step, as the OOM killer sends it. The kernel's counter is a file of ours, for a test may not use up
    the machine's memory; all else is real."""
    (tmp_path / "plain").mkdir()
    counter = tmp_path / "kills"
    counter.write_text("0")
    plain = hfopt_run(str(SCRIPT), str(tmp_path / "plain"), "none")
    kernel = (
        "import sys; from pathlib import Path; from hfopt.launch import supervisor as launch; from hfopt.cgroup import Kills\n"
        f"launch.oom_kills = lambda: Kills(own=int(Path({str(counter)!r}).read_text()), system=None)\n"
        f"sys.argv = ['hfopt', 'run', '--no-plan', {str(SCRIPT)!r}, {str(tmp_path)!r}, 'killed']\n"
        "from hfopt.cli import main; main()"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", kernel], capture_output=True, text=True, env=env, timeout=300, check=False)
    assert (plain.returncode, run.returncode) == (0, 0), run.stderr[-3000:]
    (expected,), (result,) = results(plain.stdout), results(run.stdout)
    assert (result["batch"], result["used_batch"], result["accumulation"]) == (4, 4, 4)
    assert result["step"] == expected["step"] == 5
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert result["weights"] == pytest.approx(expected["weights"], rel=1e-9)
    assert "the kernel's OOM killer ended it" in run.stderr and "checkpoint-2" in run.stderr


def test_what_is_ended_after_the_time_of_grace_has_not_succeeded() -> None:
    child = child_process.Child([sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ))
    assert child.run(lambda: True, grace_s=1.0) == 128 + signal.SIGTERM


def test_a_signal_that_comes_while_the_child_is_being_started_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen

    def interrupted(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)  # handled before the next line, when nobody is there to pass it on to
        return start(*args, **options)

    monkeypatch.setattr(child_process.subprocess, "Popen", interrupted)
    child = child_process.Child([sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ))
    assert child.run(lambda: False, grace_s=1.0) == 128 + signal.SIGTERM
    assert child.asked_to_end


@pytest.mark.parametrize(("number", "reaches"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_at_a_terminal_its_own_keys_are_not_sent_twice(number: signal.Signals, reaches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    child = child_process.Child(["true"], {})
    child._shares_terminal = True
    running: Any = SimpleNamespace(pid=4321, poll=lambda: None)
    monkeypatch.setattr(child_process.os, "kill", lambda *words: sent.append(words))
    child._pass_on(running, number)
    assert sent == ([(4321, number)] if reaches else [])


def test_whoever_ends_before_being_ended_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    asked: list[str] = []

    def gone(how: str) -> None:
        asked.append(how)
        raise psutil.NoSuchProcess(4321)

    ended: Any = SimpleNamespace(terminate=lambda: gone("terminate"), kill=lambda: gone("kill"))
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [ended, ended])
    monkeypatch.setattr(psutil, "wait_procs", lambda left, timeout: ([], left))
    child_process.end_descendants(0.0)
    assert asked == ["terminate", "terminate", "kill", "kill"], "one that is gone does not spare the next"


def test_a_script_that_changes_its_folder_is_still_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor looks for checkpoints from its own working directory."""
    monkeypatch.chdir(tmp_path)
    args = SimpleNamespace(output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=1, dataloader_num_workers=0)
    assert RunStart.of(args).output_dir == str(tmp_path / "out")


def test_the_last_word_of_a_run_that_never_fits_says_what_to_change() -> None:
    verdict = supervisor.OomVerdict(reason="the optimizer step had begun")
    changes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16}
    said = supervisor._the_end(verdict, RestartOrders(output_dir="x", changes=changes), 3)
    assert "3 restarts did not help (the last with per_device_train_batch_size 1, gradient_accumulation_steps 16)" in said
    assert "To change: gradient_checkpointing: true, a shorter maximum length" in said
    checkpointed = RestartOrders(output_dir="x", changes={**changes, "gradient_checkpointing": True})
    assert "gradient_checkpointing: true," not in supervisor._the_end(verdict, checkpointed, 3)


@pytest.mark.slow
def test_a_short_soak_leaves_nothing_behind() -> None:
    """Seed 13 draws a failed backward, then one in the optimizer step after the newest checkpoint was cut short."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--minutes", "0.2", "--every", "2", "--seed", "13"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600, check=False)
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, (found, done.stderr[-2000:])
    assert found["faults"]["backward"] and found["faults"]["optimizer"]
