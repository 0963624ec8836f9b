"""What one sample of each modality costs on one core: the measurement behind the table in hfopt/pricing/dataloader.py.

usage: python benchmarks/sample_costs.py      (a few seconds; the last line is one JSON object, seconds per sample)
"""

from __future__ import annotations

import io
import json
import math
import random
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from transformers import WhisperFeatureExtractor

from hfopt.pricing.dataloader import measure_cost


def _jpeg(seed: int) -> bytes:
    """A photograph-like picture: smooth colour and noise, 500×375, quality 85."""
    generator = np.random.default_rng(seed)
    small = generator.integers(0, 255, (24, 32, 3), dtype=np.uint8)
    picture = np.asarray(Image.fromarray(small).resize((500, 375)), dtype=np.int16) + generator.integers(-12, 12, (375, 500, 3))
    stream = io.BytesIO()
    Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=85)
    return stream.getvalue()


class Images:
    def __init__(self) -> None:
        self.files = [_jpeg(seed) for seed in range(32)]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        picture = Image.open(io.BytesIO(self.files[index])).convert("RGB").resize((256, 256)).crop((16, 16, 240, 240))
        return (torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255 - 0.5) / 0.5


class Waves:
    def __init__(self, seconds: float, extractor: Any = None) -> None:
        generator = np.random.default_rng(0)
        self.waves = [(generator.standard_normal(int(16000 * seconds)) * 8000).astype(np.int16).tobytes() for _ in range(8)]
        self.extractor = extractor

    def __len__(self) -> int:
        return len(self.waves)

    def __getitem__(self, index: int) -> torch.Tensor:
        wave = np.frombuffer(self.waves[index], dtype=np.int16).astype(np.float32) / 32768
        if self.extractor is not None:
            return torch.as_tensor(self.extractor(wave, sampling_rate=16000).input_features[0])
        halved = np.interp(np.arange(0, len(wave), 1.5), np.arange(len(wave)), wave)  # 24 kHz to 16 kHz
        return torch.from_numpy((halved - halved.mean()) / halved.std()).float()


def _text() -> tuple[Any, Any]:
    chosen = random.Random(0)
    table = datasets.Dataset.from_dict({"input_ids": [[1] * chosen.randint(20, 256) for _ in range(2000)]})

    def pad(rows: list[dict[str, list[int]]]) -> torch.Tensor:
        longest = max(len(row["input_ids"]) for row in rows)
        return torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])

    return table, pad


def main() -> None:
    torch.set_num_threads(1)
    table, pad = _text()
    cases = {
        "text": (table, pad),
        "image": (Images(), torch.stack),
        "audio": (Waves(10), torch.stack),
        "spectrogram": (Waves(30, WhisperFeatureExtractor()), torch.stack),
    }
    found = {}
    for name, (dataset, collate) in cases.items():
        cost = measure_cost(dataset, collate, budget_s=3.0)
        assert cost is not None and math.isfinite(cost.mean_s)
        found[name] = {"mean_s": cost.mean_s, "deviation_s": cost.deviation_s}
        print(f"{name:12} {cost.mean_s * 1e3:8.3f} ms  ± {cost.deviation_s * 1e3:.3f}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
