"""Measure how well attention aligns decoder steps with encoder positions.

The measurements are meaningful for models whose input and output are in the same order, such as
speech synthesis models. Under teacher forcing, the loss can look fine even though free-running
synthesis fails. The attention weights reveal such a failure. Rule H852 defines the thresholds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.core.events.run_events import Aligned

# Width of the diagonal band relative to the total length. From Tachibana et al., arXiv 1710.08969,
# section 4.1.
DIAGONAL_WIDTH = 0.2
# Rows are divided by their sum, but at least by this value, so that a row that is masked out stays
# 0. All other rows come from a softmax and sum to about 1.
MASKED_OUT = 1e-6


def report_alignment(
    guard: Any,
    attention: Tensor,
    input_lengths: Tensor,
    output_lengths: Tensor,
    max_decoder_steps: int | None = None,
) -> dict[str, Any]:
    """Measure the alignment of a speech synthesis model, and record it as an event of `guard`.

    Call this during an evaluation. Rule H852 checks the recorded alignment. For the other arguments
    and the return value, see `alignment_facts`.
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
    """Measure how well the attention of a batch is aligned, averaged over its utterances.

    Args:
        attention: Attention weights, shape ``(batch, decoder steps, encoder positions)``. Padding
            is ignored.
        input_lengths: Number of valid encoder positions per utterance, shape ``(batch,)``.
        output_lengths: Number of valid decoder steps (not frames) per utterance, shape
            ``(batch,)``.
        max_decoder_steps: Maximum number of steps of free-running decoding, or None for teacher
            forcing.

    Returns:
        The number of usable utterances (valid lengths, no NaN or Inf), and the mean of each
        measure over them. If there are none, all means are NaN.

        - ``diagonality``: 1 minus the guided-attention loss of Tachibana et al. (arXiv 1710.08969,
          eq. 8). It is 1 on the diagonal, 0.42 for uniform attention, and 0.25 if the attention is
          stuck at the first or last position.
        - ``sharpness``: the largest weight of each step, averaged over steps. This is the focus
          rate of FastSpeech (arXiv 1905.09263).
        - ``entropy``: the entropy of each step divided by its maximum, log N. It is 1 for uniform
          and 0 for perfectly sharp attention.
        - ``monotonic_share``: the share of steps whose strongest position does not precede that of
          the previous step. He et al. (arXiv 1906.00672) require this of every step. The value is
          0.5 for random attention, and 1 for attention that is stuck at one position.
        - ``share_at_max_decoder``: the share of utterances that reached `max_decoder_steps`,
          typically because the model never predicted the stop token.
        - ``utterances``: the number of usable utterances.

    Raises:
        ValueError: The shapes do not match.
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
    """Raise ValueError if the shapes of the attention weights and the lengths do not match."""
    batch = attention.shape[:1]
    if attention.ndim == 3 and input_lengths.shape == output_lengths.shape == batch:
        return
    raise ValueError(
        f"attention has shape {tuple(attention.shape)}, and the lengths have shapes"
        f" {tuple(input_lengths.shape)} and {tuple(output_lengths.shape)}. Pass (batch, decoder,"
        " encoder), (batch,) and (batch,)."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Utterances:
    """The attention of a batch, with its padding masked out.

    Args:
        weights: Attention weights, shape ``(batch, decoder steps, positions)``. Each valid row sums
            to 1.
        positions: Number of valid encoder positions per utterance, shape ``(batch, 1, 1)``.
        steps: Number of valid decoder steps per utterance, shape ``(batch, 1, 1)``.
        step_numbers: All decoder steps, counted from 0, shape ``(1, decoder steps, 1)``.
        position_numbers: All encoder positions, counted from 0, shape ``(positions,)``.
        judged: Whether each utterance is usable (valid lengths, no NaN or Inf), shape ``(batch,)``.
    """

    weights: Tensor
    positions: Tensor
    steps: Tensor
    step_numbers: Tensor
    position_numbers: Tensor
    judged: Tensor

    @classmethod
    def of(cls, attention: Tensor, input_lengths: Tensor, output_lengths: Tensor) -> Utterances:
        """Create utterances from a batch: mask out its padding, and find the usable utterances."""
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
        """Return how close the attention is to the diagonal, from 0 to 1, shape ``(batch,)``."""
        # Compare the centers of steps and positions, both as fractions of the total length.
        position = (self.position_numbers + 0.5) / self.positions.clamp(min=1)
        step = (self.step_numbers + 0.5) / self.steps.clamp(min=1)
        nearness = torch.exp(-(position - step).square() / (2 * DIAGONAL_WIDTH**2))
        return _mean((self.weights * nearness).sum(dim=2), self._valid_steps())

    def sharpness(self) -> Tensor:
        """Return the largest weight of each step, averaged over steps, shape ``(batch,)``."""
        return _mean(self.weights.amax(dim=2), self._valid_steps())

    def entropy(self) -> Tensor:
        """Return the entropy relative to its maximum, averaged over steps, shape ``(batch,)``."""
        entropy = -torch.special.xlogy(self.weights, self.weights).sum(dim=2)
        # With a single position, the largest entropy, log(1), would be 0, so use at least log(2).
        largest = self.positions.clamp(min=2).squeeze(2).log()
        return _mean(entropy / largest, self._valid_steps())

    def monotonic_share(self) -> Tensor:
        """Return the share of steps whose attention does not move back, shape ``(batch,)``."""
        strongest = self.weights.argmax(dim=2)
        forward = (strongest[:, 1:] >= strongest[:, :-1]).float()
        share = _mean(forward, self._valid_steps()[:, 1:])
        # A single step has no previous step, so it counts as monotonic.
        return torch.where(self.steps.flatten() > 1, share, 1.0)

    def _valid_steps(self) -> Tensor:
        """Return which decoder steps are not padding, shape ``(batch, decoder steps)``."""
        return (self.step_numbers < self.steps).squeeze(2)


def _mean(values: Tensor, valid: Tensor) -> Tensor:
    """Return the mean over valid steps, from shape ``(batch, steps)`` to shape ``(batch,)``."""
    return torch.where(valid, values, 0.0).sum(dim=1) / valid.sum(dim=1).clamp(min=1)
