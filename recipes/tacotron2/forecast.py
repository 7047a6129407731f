"""Will Tacotron 2 of the paper's size fit, and how: a forecast, without a GPU and without data.

    holdfast plan recipes.tacotron2.forecast:build --device T4 --precision fp32

Does not: train. A length is one of frames, of 256 samples each; a text has a symbol for every six
of them. Each decoder step is traced, so that a plan takes time in proportion to the length.
"""

from __future__ import annotations

from typing import Any

import torch

from holdfast import Loss
from recipes.tacotron2.losses import Weights, losses_of
from recipes.tacotron2.model import Tacotron2
from recipes.tacotron2.sizes import PAPER

# No clip of LJSpeech lasts longer than 10.1 s: what `build_longest` plans for
LJSPEECH_FRAMES = 870
FRAMES_PER_SYMBOL = 6  # about: LJSpeech reads 14 characters in a second of 86 frames
_FRAMES = 200
_SEGMENT_STEPS = 50


def build(micro_batch_size: int = 2, length: int = _FRAMES) -> dict[str, Any]:
    """Return model, optimizer, loss function and a sample batch.

    Args:
        micro_batch_size: Utterances in the sample batch.
        length: Frames of each.
    """
    model = Tacotron2(PAPER, segment_steps=_SEGMENT_STEPS).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6, weight_decay=1e-6)

    def loss_fn(batch: dict[str, torch.Tensor]) -> dict[str, Loss]:
        return losses_of(model(**batch), batch, Weights())

    symbols = max(2, length // FRAMES_PER_SYMBOL)
    batch = {
        "text": torch.randint(1, PAPER.symbols, (micro_batch_size, symbols)),
        "text_lengths": torch.full((micro_batch_size,), symbols),
        "mel": torch.randn(micro_batch_size, length, PAPER.n_mels),
        "mel_lengths": torch.full((micro_batch_size,), length),
    }
    return {"model": model, "optimizer": optimizer, "loss_fn": loss_fn, "batch": batch}


def build_longest(micro_batch_size: int = 2) -> dict[str, Any]:
    """Return the same with the longest clips of LJSpeech; see `build`."""
    return build(micro_batch_size, LJSPEECH_FRAMES)
