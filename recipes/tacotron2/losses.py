"""The losses of a batch, each a mean over what it is about, so that long utterances count for more
than short ones.

Not here: why an alignment failed (rule H852).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the field's name for it

from holdfast import Loss
from recipes.tacotron2.model import Spoken, padding_of

_GUIDED_WIDTH = 0.2  # Tachibana et al., arXiv 1710.08969, section 4.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How much each loss counts, beside the two of the frames, which count 1.

    Args:
        stop: Of the binary cross-entropy of stopping.
        last_step: Of a last step within it, beside any other.
        guided: Of the guided attention; 0 leaves it out.
    """

    stop: float = 1.0
    last_step: float = 1.0
    guided: float = 0.0


def losses_of(spoken: Spoken, batch: Mapping[str, Tensor], weights: Weights) -> dict[str, Loss]:
    """Return the losses by name.

    ``coarse`` and ``mel`` over frames, ``stop`` and ``guided`` over decoder steps.

    Args:
        spoken: What the model has made.
        batch: What it should be: ``mel``, ``mel_lengths``, ``text_lengths``.
        weights: Of the losses.
    """
    lengths, target = batch["mel_lengths"], batch["mel"]
    steps = steps_of(lengths, target.shape[1] // spoken.stop.shape[1])
    found = {name: _distance(getattr(spoken, name), target, lengths) for name in ("coarse", "mel")}
    found["stop"] = _stopping(spoken.stop, steps, weights)
    if weights.guided:
        found["guided"] = _guided(spoken.attention, batch["text_lengths"], steps, weights.guided)
    return found


def steps_of(frames: Tensor, frames_per_step: int) -> Tensor:
    """Return the decoder steps that numbers of frames take."""
    return (frames + frames_per_step - 1) // frames_per_step


def _mean(each: Tensor, lengths: Tensor, weight: float = 1.0) -> Loss:
    """Return the mean over what is no padding, of shape ``(batch, time)``."""
    kept = each.masked_fill(padding_of(lengths, each.shape[1]), 0.0)
    items = lengths.sum()
    return Loss(mean=weight * kept.sum() / items, items=items)


def _distance(made: Tensor, target: Tensor, lengths: Tensor) -> Loss:
    return _mean(F.mse_loss(made.float(), target, reduction="none").mean(dim=2), lengths)


def _stopping(logits: Tensor, steps: Tensor, weights: Weights) -> Loss:
    last = torch.arange(logits.shape[1], device=steps.device) == steps.unsqueeze(1) - 1
    emphasis = torch.tensor(weights.last_step, device=logits.device)
    each = F.binary_cross_entropy_with_logits(
        logits.float(), last.float(), reduction="none", pos_weight=emphasis
    )
    return _mean(each, steps, weights.stop)


def _guided(attention: Tensor, text_lengths: Tensor, steps: Tensor, weight: float) -> Loss:
    """Return how much of the attention is far from the diagonal (Tachibana et al., equation 8)."""
    _, rows, columns = attention.shape
    row = (torch.arange(rows, device=steps.device) + 0.5).view(1, -1, 1) / steps.view(-1, 1, 1)
    column = (torch.arange(columns, device=steps.device) + 0.5) / text_lengths.view(-1, 1, 1)
    far = 1 - torch.exp(-(column - row).square() / (2 * _GUIDED_WIDTH**2))
    return _mean((attention.float() * far).sum(dim=2), steps, weight)
