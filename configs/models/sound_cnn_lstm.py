"""A small sound classifier as many people write it: convolutions over a log-mel spectrogram, an LSTM over time, a linear head."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

MELS, FRAMES, CLASSES = 64, 313, 10  # 10 s at 16 kHz, a frame every 32 ms


class SoundCnnLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        channels = (1, 32, 64, 128)
        self.features = nn.Sequential(
            *(
                layer
                for before, after in pairwise(channels)
                for layer in (nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU(), nn.MaxPool2d(2))
            )
        )
        self.lstm = nn.LSTM(128 * (MELS // 8), 128, batch_first=True, bidirectional=True)
        self.head = nn.Linear(256, CLASSES)

    def forward(self, input_features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.features(input_features.unsqueeze(1))  # batch, channels, mels, frames
        sequence, _ = self.lstm(found.flatten(1, 2).transpose(1, 2))
        logits = self.head(sequence.mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def build() -> nn.Module:
    return SoundCnnLstm()


def make_batch(samples: int) -> dict[str, torch.Tensor]:
    return {"input_features": torch.rand(samples, MELS, FRAMES), "labels": torch.zeros(samples, dtype=torch.long)}
