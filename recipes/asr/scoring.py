"""How much of what was said is recognised: the best path's text, and the edits to the right one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recipes.asr.data import FRAMES_EACH, decode
from recipes.asr.model import Recogniser, ctc

_SHOWN_FRAMES = 250  # of the model's output in a picture: 5 s


def best_path(scores: torch.Tensor, frames: torch.Tensor) -> list[str]:
    """Return the text of the likeliest label of each frame, repeats and blanks removed.

    Args:
        scores: Shape ``(batch, frames, labels)``.
        frames: Of each row, shape ``(batch,)``.
    """
    labels = scores.argmax(-1)
    return [
        decode(torch.unique_consecutive(row[:count]).tolist())
        for row, count in zip(labels, frames.tolist(), strict=True)
    ]


def error_rates(said: Sequence[str], heard: Sequence[str]) -> dict[str, float]:
    """Return the edits from what was heard to what was said, as a share of the characters and
    words of the latter.
    """
    from torchmetrics.functional.text import char_error_rate, word_error_rate

    return {
        "character_error_rate": float(char_error_rate(list(heard), list(said))),
        "word_error_rate": float(word_error_rate(list(heard), list(said))),
    }


def evaluate(model: Recogniser, batches: Iterable[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Return mean loss, error rates of characters and words over held-out batches, and one example.

    Args:
        model: In evaluation, without gradients.
        batches: Of `holdfast.DataLoader`, on the model's device.
    """
    said, heard = list[str](), list[str]()
    loss, characters = 0.0, 0
    for batch in batches:
        scores, frames = model(batch["features"], batch["frames"])
        count = int(batch["characters"].sum())
        loss, characters = loss + float(ctc(model, batch).mean) * count, characters + count
        said += map(decode, batch["labels"].tolist())
        heard += best_path(scores, frames)
    if not said:
        return {}
    return {
        "held_out_loss": loss / characters,
        **error_rates(said, heard),
        "said": said[0],
        "heard": heard[0],
    }


def picture(features: torch.Tensor, scores: torch.Tensor) -> NDArray[np.float32]:
    """Return an image of a sentence's beginning.

    Features above, probability of each label below, from 0 to 1.

    Args:
        features: Shape ``(frames, n_mels)``.
        scores: Logarithms of probabilities, shape ``(frames / 2, labels)``.
    """
    scores = scores[:_SHOWN_FRAMES]
    frames = FRAMES_EACH * len(scores)
    shown = torch.zeros(frames, features.shape[1])
    shown[: min(frames, len(features))] = features[:frames].cpu()
    above = (shown.T.flip(0) + 2) / 4  # two standard deviations to either side
    below = scores.exp().cpu().T.repeat_interleave(FRAMES_EACH, 1)
    image = torch.cat([above, torch.ones(1, frames), below]).clamp(0, 1)
    return image.repeat_interleave(6, 0).repeat_interleave(4, 1).numpy().astype(np.float32)
