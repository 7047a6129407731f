"""Will training a recogniser of LibriSpeech fit, and how.

A forecast, without a GPU and without data.

    holdfast plan recipes/asr/forecast.py:build --device T4 --precision fp32 --global-batch-size 32

Does not: train, see ``train``. A length is one of frames, of which a second has 100. All rows of a
larger batch are taken as long as the longest: set `FRAMES` to what that is in your data.
"""

from __future__ import annotations

from typing import Any

import torch

from recipes.asr.data import CHARACTERS
from recipes.asr.model import Recogniser, ctc

# 16 s; a long utterance of LibriSpeech, the longest of which last about twice as long
FRAMES = 1600
_FRAMES_PER_CHARACTER = 7  # about: LibriSpeech is read at some 14 characters a second
_N_MELS = 80


def build(micro_batch_size: int = 2, length: int = FRAMES) -> dict[str, Any]:
    """Return model, optimizer, loss function and a sample batch, of the sizes that the README
    names.

    Args:
        micro_batch_size: Utterances in the sample batch; each is a tenth shorter than the one
            before.
        length: Frames of the longest.
    """
    model = Recogniser(n_mels=_N_MELS, channels=512, blocks=4, dropout=0.1).train()
    frames = torch.tensor([max(2, round(length * 0.9**row)) for row in range(micro_batch_size)])
    characters = (frames // _FRAMES_PER_CHARACTER).clamp(min=1)
    batch = {
        "features": torch.randn(micro_batch_size, length, _N_MELS),
        "frames": frames,
        "labels": torch.randint(1, len(CHARACTERS) + 1, (micro_batch_size, int(characters.max()))),
        "characters": characters,
    }
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01),
        "loss_fn": lambda batch: ctc(model, batch),
        "batch": batch,
    }
