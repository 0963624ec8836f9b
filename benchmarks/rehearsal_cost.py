"""What a rehearsal costs: the host time it adds to a script's own start, and the virtual step against the bare launches of the same step.

Both are ratios or differences of CPU seconds within this run, so a busy machine does not change them much. No GPU is needed:
    python benchmarks/rehearsal_cost.py
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from hfopt.hardware.catalog import find
from hfopt.virtual.environment import environment

TRAIN = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
rows = [{"input_ids": torch.ones(64, dtype=torch.long), "labels": torch.tensor(i % 2)} for i in range(24)]
model = BertForSequenceClassification(BertConfig(num_hidden_layers=2, hidden_size=128, num_attention_heads=2, intermediate_size=512))
args = TrainingArguments("out", max_steps=3, per_device_train_batch_size=8, report_to=[], eval_strategy="steps", eval_steps=3, save_steps=3)
Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows).train()
"""
STEP = """
import statistics, time, torch
from transformers import BertConfig, BertForSequenceClassification
model = BertForSequenceClassification(BertConfig()).cuda().train()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
batch = {name: torch.ones(4, 64, dtype=torch.long) for name in ("input_ids", "attention_mask")}
batch["labels"] = torch.zeros(4, dtype=torch.long)
seconds = []
for _ in range(25):
    start = time.process_time()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(**{name: tensor.cuda() for name, tensor in batch.items()}).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    seconds.append(time.process_time() - start)
print(min(seconds[5:]))
"""


def _cpu_s(command: list[str], env: dict[str, str], folder: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=env, cwd=folder, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    env = environment(find("A10"))
    plain = environment(find("A10")) | {"HFOPT_VIRTUAL_VALUES": "0"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN)
        own, rehearsed = [], []
        for _ in range(3):
            own.append(_cpu_s([sys.executable, "train.py"], env, folder))
            command = [sys.executable, "-m", "hfopt", "rehearse", "--gpu", "A10", "--", sys.executable, "train.py"]
            rehearsed.append(_cpu_s(command, env | {"LD_PRELOAD": "", "PYTHONPATH": env["PYTHONPATH"]}, folder))
        alone, with_it = statistics.median(own), statistics.median(rehearsed)
        print(f"script alone {alone:.2f} CPU s, rehearsed {with_it:.2f} CPU s: {with_it - alone:+.2f} s (limit 3 s)")
        step = {
            label: min(
                float(subprocess.run([sys.executable, "-c", STEP], env=e, capture_output=True, text=True, check=True).stdout) for _ in "12"
            )
            for label, e in (("with true values", env), ("bare launches", plain))
        }
    values_s, bare_s = step["with true values"], step["bare launches"]
    print(f"BERT-base step: {1e3 * values_s:.1f} ms with true values, {1e3 * bare_s:.1f} ms bare: × {values_s / bare_s:.2f}")


if __name__ == "__main__":
    main()
