"""A plan from kept traces is the fresh one, to the byte; it imports neither torch nor transformers, and believes no tampered trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hfopt.errors import NothingFits, WorkloadError
from hfopt.job import subject as request
from hfopt.memory import trace_store
from hfopt.planner import Plan, Request, plan
from hfopt.planner.comparison import compare_cards
from hfopt.planner.memory_table import memory_table, read_subject
from hfopt.schema.outputs import CardRank
from hfopt.store import Store

BERT = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 192,
    "vocab_size": 500,
    "max_position_embeddings": 128,
}
YAML = """\
model_name_or_path: {folder}/model
output_dir: out
max_seq_length: 64
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
eval_strategy: epoch
"""
CARDS = ("rtx 3070", "a100-80gb", "rtx 5090")
RANK: CardRank = {"best_for": [], "as_good_for": [], "on_pareto_front": True, "within_limits": "yes", "job_commands": []}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(BERT))
    path = tmp_path / "train.yaml"
    path.write_text(YAML.format(folder=tmp_path))
    return path


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store is on, in a folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HFOPT_NO_CACHE", "0")
    return tmp_path / "cache" / "hfopt" / "traces"


@pytest.fixture
def nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def forbid() -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise AssertionError("this was kept, and is asked again")

        monkeypatch.setattr(request, "_built", fail)
        monkeypatch.setattr(trace_store, "estimate", fail)

    return forbid


def fresh(config: Path, monkeypatch: pytest.MonkeyPatch, **wishes: Any) -> Plan:
    with monkeypatch.context() as patch:
        patch.setenv("HFOPT_NO_CACHE", "1")
        return plan(config, Request(dry_run=False, **wishes))


def figures(made: Plan) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(made.to_json(), default=str))
    return data


@pytest.mark.slow
def test_a_plan_from_kept_traces_is_the_fresh_one(
    config: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, nothing_is_traced: Callable[[], None]
) -> None:
    expected = {card: fresh(config, monkeypatch, gpu=card) for card in CARDS}
    other = fresh(config, monkeypatch, gpu="rtx 4090", effective_batch=64, headroom=0.2)
    first = plan(config, Request(gpu=CARDS[0], dry_run=False))
    assert figures(first) == figures(expected[CARDS[0]])
    nothing_is_traced()
    for card in CARDS:
        made = plan(config, Request(gpu=card, dry_run=False))
        assert figures(made) == figures(expected[card])
        assert made.edited().data == expected[card].edited().data
    assert figures(plan(config, Request(gpu="rtx 4090", dry_run=False, effective_batch=64, headroom=0.2))) == figures(other)


@pytest.mark.slow
def test_estimate_and_compare_are_answered_from_them(
    config: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, nothing_is_traced: Callable[[], None]
) -> None:
    wishes = Request(gpu="rtx 3070")
    monkeypatch.setenv("HFOPT_NO_CACHE", "1")
    table, rows = memory_table(read_subject(str(config), wishes), wishes), compare_cards(config, CARDS, Request(dry_run=False))
    monkeypatch.setenv("HFOPT_NO_CACHE", "0")
    memory_table(read_subject(str(config), wishes), wishes)
    compare_cards(config, CARDS, Request(dry_run=False))
    nothing_is_traced()
    again = memory_table(read_subject(str(config), wishes), wishes)
    assert (again.rows, again.largest, again.evaluation, again.notes) == (table.rows, table.largest, table.evaluation, table.notes)
    compared = compare_cards(config, CARDS, Request(dry_run=False))
    assert [row.to_json(RANK) for row in compared] == [row.to_json(RANK) for row in rows]


@pytest.mark.slow
def test_what_fits_nowhere_is_answered_from_them(
    config: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, nothing_is_traced: Callable[[], None]
) -> None:
    def answer(card: str) -> tuple[str, str | None]:
        with pytest.raises(NothingFits) as nothing:
            plan(config, Request(gpu=card, vram_gib=0.2, dry_run=False))
        return str(nothing.value), nothing.value.hint

    first = answer("rtx 3070")
    nothing_is_traced()
    assert answer("rtx 3070") == first
    assert "GeForce RTX 4090" in answer("rtx 4090")[0]


CHILD = """
import sys
from hfopt.cli import main
for arguments in {commands}:
    sys.argv = ["hfopt", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (arguments, end.code)
    assert not {{"torch", "transformers"}} & sys.modules.keys(), arguments
"""


@pytest.mark.slow
def test_a_second_question_imports_neither_torch_nor_transformers(config: Path, kept: Path) -> None:
    plan(config, Request(gpu="rtx 3070", dry_run=False))
    wishes = Request(gpu="rtx 3070")
    memory_table(read_subject(str(config), wishes), wishes)
    commands = [
        ["plan", str(config), "--gpu", "rtx 4090", "--verbose"],
        ["plan", str(config), "--gpu", "a100-80gb", "--effective-batch", "16", "--headroom", "0.1", "--diff"],
        ["compare", str(config), "--gpus", "3070,4090,a100-80gb"],
        ["estimate", str(config), "--gpu", "rtx 3090", "--batch-sizes", "1,8"],
    ]
    ended = subprocess.run(
        [sys.executable, "-c", CHILD.format(commands=commands)], capture_output=True, text=True, env={**os.environ}, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "per_device_train_batch_size" in ended.stdout
    assert "without a rehearsal" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("damage", [lambda data: data[:200], lambda data: data[:-9] + b"tampered!"], ids=["cut", "changed"])
def test_a_damaged_trace_is_traced_again(
    config: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    first = plan(config, Request(gpu="rtx 3070", dry_run=False))
    names = set(kept.iterdir())
    for path in names:
        path.write_bytes(damage(path.read_bytes()))
    assert figures(plan(config, Request(gpu="rtx 3070", dry_run=False))) == figures(first)
    assert set(kept.iterdir()) == names and all(entry.label for entry in Store(kept).entries())


@pytest.mark.slow
def test_another_model_config_is_another_job(config: Path, kept: Path) -> None:
    before = plan(config, Request(gpu="rtx 3070", dry_run=False))
    (config.parent / "model" / "config.json").write_text(json.dumps({**BERT, "num_hidden_layers": 4}))
    after = plan(config, Request(gpu="rtx 3070", dry_run=False))
    assert after.facts.before.memory.allocated_bytes > before.facts.before.memory.allocated_bytes


def test_code_of_the_users_own_is_not_kept(tmp_path: Path, kept: Path) -> None:
    config = tmp_path / "train.yaml"
    lines = "output_dir: o\nper_device_train_batch_size: 2\ntrust_remote_code: true\n"
    config.write_text(f"model_name_or_path: {tmp_path}/own.py:make\n{lines}")
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return {'loss': super().forward(x).mean()}\n"
        "def make():\n    return Net(64, 64)\n"
        "def make_batch(size):\n    return {'x': torch.zeros(size, 64)}\n"
    )
    plan(config, Request(gpu="rtx 3070", dry_run=False))
    assert not kept.exists() or not list(kept.iterdir())


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("output_dir: o\n", "which model is trained is not stated"),
        ("output_dir: o\nmodel_name_or_path: ./gone\n", "unknown model"),
        ("output_dir: o\nmodel_name_or_path: gone/config.json\n", "no config.json"),
    ],
)
def test_a_mistake_is_told_before_anything_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_is_traced: Callable[[], None], lines: str, said: str
) -> None:
    nothing_is_traced()
    config = tmp_path / "train.yaml"
    config.write_text(f"{lines}per_device_train_batch_size: 8\n")
    with pytest.raises(WorkloadError, match=said):
        plan(config, Request(gpu="rtx 3070"))
