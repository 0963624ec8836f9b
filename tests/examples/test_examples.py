"""Every example runs as its README says, on this machine, and prints what it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def run(*command: str) -> str:
    """What it printed for people and for programs."""
    result = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=570)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "Traceback" not in result.stderr
    return result.stdout + result.stderr


def script(name: str, folder: Path, *more: str) -> str:
    return run(f"examples/{name}/train.py", str(folder), *more)


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in {text[-3000:]}"
    return float(found[1])


def test_every_example_has_a_readme_and_a_test() -> None:
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert len(folders) >= 9
    index = (EXAMPLES / "README.md").read_text()
    for name in folders:
        assert f"({name}/README.md)" in index and f"examples/{name}/" in (EXAMPLES / name / "README.md").read_text()
        assert f"def test_{name}(" in Path(__file__).read_text()


@pytest.mark.slow
def test_text_classification(tmp_path: Path) -> None:
    text = script("text_classification", tmp_path)
    assert "Effective batch 32 as before: 8 × 4 → 32 × 1" in text
    assert number(r"accuracy (\S+) after 48 steps", text) > 0.9
    assert "hfopt: 47 steps in" in text and (tmp_path / "hfopt" / "monitor.jsonl").exists()


@pytest.mark.slow
def test_lora_causal_lm(tmp_path: Path) -> None:
    text = script("lora_causal_lm", tmp_path)
    assert "GeForce RTX 4090" in text and "gradient_checkpointing         true → false" in text
    first, last = re.findall(r"trained 32,768 parameters at 16 × 1: loss (\S+) -> (\S+)", text)[0]
    assert float(last) < float(first)


@pytest.mark.slow
def test_vit(tmp_path: Path) -> None:
    text = script("vit", tmp_path)
    assert "Effective batch 32 as before: 4 × 8" in text
    first, last = re.findall(r"loss (\S+) -> (\S+) in 24 steps", text)[0]
    assert float(last) < float(first)


@pytest.mark.slow
def test_custom_compute_loss(tmp_path: Path) -> None:
    text = script("custom_compute_loss", tmp_path)
    assert text.count("the step runs again in pieces of 4; effective batch still 32") >= 3
    assert number(r"relative difference of the weights: (\S+)", text) < 1e-5


@pytest.mark.slow
def test_slow_dataset(tmp_path: Path) -> None:
    text = script("slow_dataset", tmp_path)
    assert "found before: input_bound" in text
    before, after = re.findall(r"^data wait +(\S+) % +(\S+) %", text, re.M)[0]
    assert float(after) < 0.6 * float(before)
    assert number(r"dataloader_num_workers +0 → (\d+)", text) >= 2
    assert number(r"samples/s +\S+ +\S+ +\+(\S+) % +better", text) > 30
    assert "hfopt: before and after" in (tmp_path / "before_and_after.html").read_text()


@pytest.mark.slow
def test_survive_oom(tmp_path: Path) -> None:
    text = script("survive_oom", tmp_path)
    roomy, tight = ([float(word) for word in line.split(",")] for line in re.findall(r"losses with(?:out)? room: +\[(.+)\]", text))
    assert roomy == pytest.approx(tight, abs=5e-4)
    assert "hfopt: out of memory at step 0" in text and "effective batch is still 128" in text


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    text = run(*TORCHRUN, "examples/two_ranks/train.py", str(tmp_path))
    sums = dict(re.findall(r"rank (\d): step 6, sum of the weights (\S+)", text))
    assert set(sums) == {"0", "1"} and sums["0"] == sums["1"]
    assert "pieces of 4; effective batch still 32" in text


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_rehearse_a100() -> None:
    text = run("-m", "hfopt", "rehearse", "--gpu", "a100-40gb", "--", sys.executable, "examples/rehearse_a100/train.py", "--batch", "32")
    assert 15 < number(r"fits: 3 steps rehearsed; (\S+) GiB of 39.50 GiB stay free", text) < 30


@pytest.mark.slow
def test_notebook(tmp_path: Path) -> None:
    text = run("examples/notebook/run.py", str(tmp_path))
    assert all(f"In [{cell}]" in text for cell in range(1, 6))
    assert "4 × 8 → 32 × 1" in text and "samples/s predicted" in text and "finished at step 30 of 30" in text
