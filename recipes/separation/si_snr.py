"""The scale-invariant signal-to-noise ratio, and the loss that asks for it in the best order of
the sources.
"""

from __future__ import annotations

import torch

from holdfast import Loss
from recipes.separation.model import ConvTasNet


def si_snr(estimate: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return the ratio in dB of each wave, over the last dimension.

    Args:
        estimate: Shape ``(..., samples)``.
        source: What it should be, of the same shape.
    """
    from torchmetrics.functional.audio import scale_invariant_signal_noise_ratio

    return scale_invariant_signal_noise_ratio(estimate, source)


def best_order(estimates: torch.Tensor, sources: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean ratio of each sample in the order of the estimates that is best, and that
    order.

    Args:
        estimates: Shape ``(batch, sources, samples)``.
        sources: Likewise.

    Returns:
        Shapes ``(batch,)`` in dB, and ``(batch, sources)``: which estimate belongs to each source.
    """
    from torchmetrics.functional.audio import permutation_invariant_training

    found: tuple[torch.Tensor, torch.Tensor] = permutation_invariant_training(
        estimates, sources, si_snr
    )
    return found


def separation_loss(
    model: ConvTasNet, batch: tuple[torch.Tensor, torch.Tensor], threshold: float | None = None
) -> Loss:
    """Return the negative ratio in dB, a mean over samples in their best order.

    Args:
        model: That separates.
        batch: Mixtures ``(batch, samples)``, and their sources ``(batch, sources, samples)``.
        threshold: SpeechBrain's gate: a sample whose loss is below has no gradient. There the mean
            is over the others; here over all, so that a step always has one, and any division of a
            batch adds up to the same.
    """
    mixture, sources = batch
    losses = -best_order(model(mixture).float(), sources)[0]
    return Loss(
        (losses if threshold is None else losses.clamp(min=threshold)).mean(), items=len(mixture)
    )
