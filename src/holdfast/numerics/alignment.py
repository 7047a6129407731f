"""How well an attention aligns its decoder steps with its encoder positions.

Five numbers for a batch.

For models that read from left to right while they write, such as text to speech: the loss under
    teacher forcing can
look fine although free-running synthesis fails, and the attention shows it. Rule H852 says what is
good enough.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from holdfast.core.events.run_events import Aligned

# Width of the diagonal band, relative to the whole length: Tachibana et al., arXiv 1710.08969,
# section 4.1.
_WIDTH = 0.2
# An attention is a softmax, so a row sums to 1; what is far below is a row that was masked away.
_EMPTY = 1e-6


def report_alignment(
    guard: Any,
    attention: Tensor,
    input_lengths: Tensor,
    output_lengths: Tensor,
    max_decoder_steps: int | None = None,
) -> dict[str, Any]:
    """Record the `alignment_facts` of an evaluation of a speech synthesiser in a guarded run,
    for rule H852.
    """
    facts: dict[str, Any] = alignment_facts(
        attention, input_lengths, output_lengths, max_decoder_steps
    )
    guard.emit(Aligned(**facts))
    return facts


@torch.no_grad()
def alignment_facts(
    attention: Tensor,
    input_lengths: Tensor,
    output_lengths: Tensor,
    max_decoder_steps: int | None = None,
) -> dict[str, float]:
    """Measure the attention of a batch, each utterance within its own lengths and with the same
    weight.

    Args:
        attention: Weights, shape ``(batch, decoder steps, encoder positions)``; the padding does
            not count.
        input_lengths: Valid encoder positions, shape ``(batch,)``.
        output_lengths: Valid decoder steps, shape ``(batch,)``; in decoder steps, not in frames.
        max_decoder_steps: Where free-running decoding is cut off; None if it was not free-running.

    Returns:
        Means over the utterances that can be judged (valid lengths, no NaN or Inf); NaN throughout
        if there is none.

        ``diagonality``: 1 minus the guided-attention loss of Tachibana et al. (arXiv 1710.08969,
            eq. 8).
        1 on the diagonal; 0.42 for uniform attention; 0.25 if stuck at the first or the last
        position.
        ``sharpness``: the largest weight of each step, averaged: the focus rate of FastSpeech
            (arXiv 1905.09263).
        ``entropy``: entropy of each step divided by its maximum, log N; 1 for uniform attention, 0
            if sharp.
        ``monotonic_share``: steps whose strongest position does not lie before that of the step
            before. He et al.
        (arXiv 1906.00672) demand all; 0.5 is what chance gives. A stuck attention is monotonic too.
        ``share_at_max_decoder``: utterances that ran into `max_decoder_steps`, as those that miss
            their end do.
        ``utterances``: how many were judged.

    Raises:
        ValueError: If the shapes do not fit each other.
    """
    if (
        attention.ndim != 3
        or not input_lengths.shape == output_lengths.shape == attention.shape[:1]
    ):
        raise ValueError(
            f"attention has shape {tuple(attention.shape)}, the lengths"
            f" {tuple(input_lengths.shape)} and {tuple(output_lengths.shape)}; (batch, decoder,"
            " encoder), (batch,) and (batch,) are needed."
        )
    _, steps, positions = attention.shape
    n = input_lengths.to(attention.device).view(-1, 1, 1)
    t = output_lengths.to(attention.device).view(-1, 1, 1)
    within_lengths = ((n > 0) & (n <= positions) & (t > 0) & (t <= steps)).flatten()
    row, column = (
        torch.arange(steps, device=n.device).view(1, -1, 1),
        torch.arange(positions, device=n.device),
    )
    weights = torch.where((row < t) & (column < n), attention.detach().float(), 0.0)
    usable = within_lengths & weights.isfinite().flatten(1).all(dim=1)
    weights = weights / weights.sum(dim=2, keepdim=True).clamp(min=_EMPTY)
    distance = (column + 0.5) / n.clamp(min=1) - (row + 0.5) / t.clamp(min=1)
    peaks, places = weights.max(dim=2)
    entropy = -torch.special.xlogy(weights, weights).sum(dim=2) / n.clamp(min=2).squeeze(2).log()
    forward = (places[:, 1:] >= places[:, :-1]).float()
    in_step = (row < t).squeeze(2)
    limit = math.inf if max_decoder_steps is None else max_decoder_steps
    each = {
        "diagonality": _mean(
            (weights * torch.exp(-distance.square() / (2 * _WIDTH**2))).sum(dim=2), in_step
        ),
        "sharpness": _mean(peaks, in_step),
        "entropy": _mean(entropy, in_step),
        "monotonic_share": torch.where(t.flatten() > 1, _mean(forward, in_step[:, 1:]), 1.0),
        "share_at_max_decoder": (t.flatten() >= limit).float(),
    }
    sums = [torch.where(usable, values, 0.0).sum() for values in each.values()]
    *totals, count = torch.stack([*sums, usable.sum().float()]).tolist()
    means = {
        name: total / count if count else math.nan for name, total in zip(each, totals, strict=True)
    }
    return {**means, "utterances": count}


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean over chosen steps; shapes ``(batch, steps)`` and ``(batch,)``."""
    return torch.where(chosen, values, 0.0).sum(dim=1) / chosen.sum(dim=1).clamp(min=1)
