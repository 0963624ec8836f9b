"""Scripts in the shapes people write, unchanged: planned at their first train(), and the loss is that of the script alone so configured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

COMMON = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "max_steps": 3,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "save_strategy": "no",
    "disable_tqdm": True,
}
SHAPES = {
    "text_classifier": ("text_classifier.py", {"model_name_or_path": "bert", "train_file": "pairs.json"}),
    "causal": ("language_model.py", {"model_name_or_path": "llama", "train_file": "lines.txt"}),
    "masked": ("language_model.py", {"model_name_or_path": "bert_mlm", "train_file": "lines.txt", "masked": True}),
    "stream": ("language_model.py", {"model_name_or_path": "llama", "train_file": "lines.txt", "stream": True}),
    "summarizer": ("summarizer.py", {"model_name_or_path": "t5", "train_file": "pairs.json", "label_smoothing_factor": 0.1}),
    "image": ("image_classifier.py", {}),
    "sft": ("preferences.py", {"model_name_or_path": "llama", "train_file": "texts.json", "bf16": False, "use_peft": True}),
    "dpo": ("preferences.py", {"model_name_or_path": "llama", "train_file": "preferences.json", "bf16": False, "method": "dpo"}),
    "embedder": ("embedder.py", {}),
}
SHAPES |= {
    method: ("preferences.py", {"model_name_or_path": "llama", "train_file": "preferences.json", "bf16": False, "method": method})
    for method in ("reward", "kto", "cpo", "orpo")
}
TASKS = ("ner", "qa", "swag", "ctc", "audio", "speech", "segmentation", "detection", "mae", "mim", "clip", "plain")
SHAPES |= {task: ("many_tasks.py", {}) for task in TASKS}
NEUTRAL = {"causal", "stream", "summarizer", "image", "sft", "dpo", "qa", "mae", "mim", "plain", "reward"}
"""The accumulation may be traded; the others' gradients would change."""


def command_line(shape: str, tiny: Path, output: Path, **more: Any) -> list[str]:
    script, own = SHAPES[shape]
    settings = {**COMMON, **own, **more}
    if script == "many_tasks.py":
        settings["output_dir"] = output
        return [script, shape, *(word for key, value in settings.items() for word in (f"--{key}", str(value)))]
    if shape in ("image", "embedder"):
        positional = (
            [str(output), str(tiny / "vit")] if shape == "image" else [str(output), str(tiny / "encoder"), str(tiny / "pairs.json")]
        )
        return [script, *positional, *(word for key, value in settings.items() for word in (f"--{key}", json.dumps(value)))]
    settings["output_dir"] = output
    for name in ("model_name_or_path", "train_file"):
        settings[name] = tiny / settings[name]
    settings["cache"] = output.parent / "cache"
    return [script, *(word for key, value in settings.items() for word in (f"--{key}", str(value)))]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_the_loss_is_that_of_the_script_alone_with_the_planned_config(
    shape: str, tiny: Path, desk: Any, attached: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    alone, run = desk.folder / "alone", desk.folder / "run"
    with attached():
        desk.run(*command_line(shape, tiny, run))
    said = capfd.readouterr().err
    assert "hfopt: planned" in said, said
    planned = desk.planned(run)
    traded = {"per_device_train_batch_size", "gradient_accumulation_steps"} & planned.keys()
    assert bool(traded) == (shape in NEUTRAL)
    settings = {**COMMON, **planned}
    assert settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] == 8
    assert (run / "hfopt" / "monitor.jsonl").is_file()
    desk.run(*command_line(shape, tiny, alone, **planned))
    assert "hfopt" not in capfd.readouterr().err
    assert desk.loss(run) == pytest.approx(desk.loss(alone), rel=1e-6)
