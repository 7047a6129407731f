"""Measure how well attention aligns decoder steps with encoder positions.

This is for models whose input and output have the same order, such as speech synthesisers. Under
teacher forcing the loss can look fine although free-running synthesis fails; the attention shows
the failure. The thresholds are in rule H852.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.core.events.run_events import Aligned

# Width of the diagonal band relative to the whole length: Tachibana et al., arXiv 1710.08969,
# section 4.1.
DIAGONAL_WIDTH = 0.2
# Attention weights come from a softmax, so each row sums to 1. A row that sums to much less was
# masked out.
MASKED_OUT = 1e-6


def report_alignment(
    guard: Any,
    attention: Tensor,
    input_lengths: Tensor,
    output_lengths: Tensor,
    max_decoder_steps: int | None = None,
) -> dict[str, Any]:
    """Record a speech synthesiser's alignment from an evaluation in a guarded run.

    Rule H852 judges it. The arguments and the result are those of `alignment_facts`.
    """
    alignment: dict[str, Any] = alignment_facts(
        attention, input_lengths, output_lengths, max_decoder_steps
    )
    guard.emit(Aligned(**alignment))
    return alignment


@torch.no_grad()
def alignment_facts(
    attention: Tensor,
    input_lengths: Tensor,
    output_lengths: Tensor,
    max_decoder_steps: int | None = None,
) -> dict[str, float]:
    """Measure the attention of a batch; every utterance counts equally.

    Args:
        attention: Weights, shape ``(batch, decoder steps, encoder positions)``. Padding is ignored.
        input_lengths: Valid encoder positions, shape ``(batch,)``.
        output_lengths: Valid decoder steps, shape ``(batch,)``; in decoder steps, not in frames.
        max_decoder_steps: The step at which free-running decoding is cut off; None for teacher
            forcing.

    Returns:
        Means over the usable utterances (valid lengths, no NaN or Inf), or NaN for all values if
        there are none:

        - ``diagonality``: 1 minus the guided-attention loss of Tachibana et al. (arXiv 1710.08969,
          eq. 8). 1 on the diagonal; 0.42 for uniform attention; 0.25 if stuck at the first or the
          last position.
        - ``sharpness``: the largest weight of each step, averaged: the focus rate of FastSpeech
          (arXiv 1905.09263).
        - ``entropy``: entropy of each step divided by its maximum, log N; 1 for uniform attention,
          0 for a sharp one.
        - ``monotonic_share``: share of steps whose strongest position does not precede that of the
          previous step. He et al. (arXiv 1906.00672) require this of every step; chance gives 0.5.
          Attention that is stuck at one position is monotonic too.
        - ``share_at_max_decoder``: share of utterances that reached `max_decoder_steps`, typically
          because the model never predicted the stop token.
        - ``utterances``: how many were usable.

    Raises:
        ValueError: If the shapes do not match each other.
    """
    _check_shapes(attention, input_lengths, output_lengths)
    utterances = Utterances.of(attention, input_lengths, output_lengths)
    limit = math.inf if max_decoder_steps is None else max_decoder_steps
    measures = {
        "diagonality": utterances.diagonality(),
        "sharpness": utterances.sharpness(),
        "entropy": utterances.entropy(),
        "monotonic_share": utterances.monotonic_share(),
        "share_at_max_decoder": (utterances.steps.flatten() >= limit).float(),
    }
    judged = utterances.judged
    sums = [torch.where(judged, values, 0.0).sum() for values in measures.values()]
    # Move all means to the host in one transfer.
    *totals, count = torch.stack([*sums, judged.sum().float()]).tolist()
    means = {
        name: total / count if count else math.nan
        for name, total in zip(measures, totals, strict=True)
    }
    return {**means, "utterances": count}


def _check_shapes(attention: Tensor, input_lengths: Tensor, output_lengths: Tensor) -> None:
    batch = attention.shape[:1]
    if attention.ndim == 3 and input_lengths.shape == output_lengths.shape == batch:
        return
    raise ValueError(
        f"attention has shape {tuple(attention.shape)}, the lengths {tuple(input_lengths.shape)}"
        f" and {tuple(output_lengths.shape)}; (batch, decoder, encoder), (batch,) and (batch,) are"
        " needed."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Utterances:
    """The attention of a batch, with its padding masked out.

    Args:
        weights: Attention weights; each row sums to 1, shape ``(batch, decoder steps, positions)``.
        positions: Valid encoder positions, shape ``(batch, 1, 1)``.
        steps: Valid decoder steps, shape ``(batch, 1, 1)``.
        step_numbers: Shape ``(1, decoder steps, 1)``.
        position_numbers: Shape ``(positions,)``.
        judged: Which utterances are usable: valid lengths, no NaN or Inf, shape ``(batch,)``.
    """

    weights: Tensor
    positions: Tensor
    steps: Tensor
    step_numbers: Tensor
    position_numbers: Tensor
    judged: Tensor

    @classmethod
    def of(cls, attention: Tensor, input_lengths: Tensor, output_lengths: Tensor) -> Utterances:
        """Mask the padding of a batch, and find its usable utterances."""
        device = attention.device
        _, most_steps, most_positions = attention.shape
        positions = input_lengths.to(device).view(-1, 1, 1)
        steps = output_lengths.to(device).view(-1, 1, 1)
        step_numbers = torch.arange(most_steps, device=device).view(1, -1, 1)
        position_numbers = torch.arange(most_positions, device=device)
        is_valid = (step_numbers < steps) & (position_numbers < positions)
        weights = torch.where(is_valid, attention.detach().float(), 0.0)
        fits = (positions > 0) & (positions <= most_positions) & (steps > 0) & (steps <= most_steps)
        return cls(
            weights=weights / weights.sum(dim=2, keepdim=True).clamp(min=MASKED_OUT),
            positions=positions,
            steps=steps,
            step_numbers=step_numbers,
            position_numbers=position_numbers,
            judged=fits.flatten() & weights.isfinite().flatten(1).all(dim=1),
        )

    def diagonality(self) -> Tensor:
        """Return the weight near the diagonal of each utterance, shape ``(batch,)``."""
        position = (self.position_numbers + 0.5) / self.positions.clamp(min=1)
        step = (self.step_numbers + 0.5) / self.steps.clamp(min=1)
        nearness = torch.exp(-(position - step).square() / (2 * DIAGONAL_WIDTH**2))
        return _mean((self.weights * nearness).sum(dim=2), self._valid_steps())

    def sharpness(self) -> Tensor:
        """Return the mean largest weight of each utterance, shape ``(batch,)``."""
        return _mean(self.weights.amax(dim=2), self._valid_steps())

    def entropy(self) -> Tensor:
        """Return the mean entropy relative to its maximum, shape ``(batch,)``."""
        entropy = -torch.special.xlogy(self.weights, self.weights).sum(dim=2)
        largest = self.positions.clamp(min=2).squeeze(2).log()
        return _mean(entropy / largest, self._valid_steps())

    def monotonic_share(self) -> Tensor:
        """Return the share of steps that do not move backwards, shape ``(batch,)``."""
        strongest = self.weights.argmax(dim=2)
        forward = (strongest[:, 1:] >= strongest[:, :-1]).float()
        share = _mean(forward, self._valid_steps()[:, 1:])
        return torch.where(self.steps.flatten() > 1, share, 1.0)

    def _valid_steps(self) -> Tensor:
        return (self.step_numbers < self.steps).squeeze(2)


def _mean(values: Tensor, valid: Tensor) -> Tensor:
    """Return the mean over valid steps; shapes ``(batch, steps)`` and ``(batch,)``."""
    return torch.where(valid, values, 0.0).sum(dim=1) / valid.sum(dim=1).clamp(min=1)
