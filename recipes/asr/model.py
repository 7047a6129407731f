"""The recogniser: two convolutions, recurrent blocks in both directions, one score for each
character and frame.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from holdfast import Loss
from recipes.asr.data import CHARACTERS, FRAMES_EACH


class RecurrentBlock(nn.Module):
    """A GRU in both directions beside a way straight through, normalised before it.

    Args:
        channels: Of input and output.
        dropout: Share of the GRU's output that is set to 0 in training.
    """

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.gru = nn.GRU(channels, channels // 2, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        """Return frames ``(batch, frames, channels)``.

        What lies behind the end of a row stays out of it.
        """
        packed = pack_padded_sequence(
            self.norm(x), frames.cpu(), batch_first=True, enforce_sorted=False
        )
        made, _ = pad_packed_sequence(
            self.gru(packed)[0], batch_first=True, total_length=x.shape[1]
        )
        return x + self.dropout(made)


class Recogniser(nn.Module):
    """Scores of characters over time.

    Args:
        n_mels: Bands of the features.
        channels: Of all layers; even.
        blocks: Recurrent ones.
        dropout: As `RecurrentBlock`.
    """

    def __init__(self, *, n_mels: int, channels: int, blocks: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Conv1d(n_mels, channels, 5, stride=FRAMES_EACH, padding=2)
        self.second = nn.Conv1d(channels, channels, 5, padding=2)
        self.blocks = nn.ModuleList(RecurrentBlock(channels, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(channels)
        self.out = nn.Linear(channels, len(CHARACTERS) + 1)

    def forward(
        self, features: torch.Tensor, frames: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logarithms of probabilities, and how many frames of each row count.

        Args:
            features: Shape ``(batch, frames, n_mels)``, 0 behind the end of a row.
            frames: Of each row, shape ``(batch,)``.

        Returns:
            Shapes ``(batch, frames / 2, characters + 1)`` and ``(batch,)``.
        """
        frames = (frames + FRAMES_EACH - 1) // FRAMES_EACH
        x = functional.gelu(self.first(features.transpose(1, 2)))
        inside = torch.arange(x.shape[2], device=x.device) < frames[:, None]
        x = functional.gelu(self.second(x * inside[:, None])).transpose(1, 2)
        for block in self.blocks:
            x = block(x, frames)
        return self.out(self.norm(x)).float().log_softmax(-1), frames


def ctc(model: Recogniser, batch: dict[str, Any]) -> Loss:
    """Return CTC's loss.

    A mean over characters, so that any division of a batch adds up to the same.
    """
    scores, frames = model(batch["features"], batch["frames"])
    scores = scores.transpose(0, 1)
    total = functional.ctc_loss(
        scores, batch["labels"], frames, batch["characters"], blank=0, reduction="sum"
    )
    characters = batch["characters"].sum()
    return Loss(total / characters, items=characters)
