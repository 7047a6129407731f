"""Ways to spoil a training: learning rates, weights, moments and batches gone wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.spikes_runs import Training


def _nothing(_: Training, __: int) -> None:
    pass


def _unchanged(_: int) -> float:
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One way to spoil a run.

    Args:
        name: In a few words.
        strike: Called before each step from the planted one on, with the training and the steps since then.
        spoils_batches: So many batches from the planted step on come out of a broken pipeline.
        lr_factor: The learning rate times this, by the steps since the planted one.
    """

    name: str
    strike: Callable[[Training, int], None] = _nothing
    spoils_batches: int = 0
    lr_factor: Callable[[int], float] = _unchanged


def _scale_a_matrix(training: Training, since: int) -> None:
    if since == 0:
        matrices = [p for p in training.model.parameters() if p.ndim >= 2]
        with torch.no_grad():
            matrices[len(matrices) // 2].mul_(100.0)


def _break_moments(training: Training, since: int) -> None:
    """Zero Adam's second moment, or multiply the momentum of SGD by 1,000."""
    for optimizer, _ in training.players.values() if since == 0 else ():
        for state in optimizer.state.values():
            if "exp_avg_sq" in state:
                state["exp_avg_sq"].zero_()
            else:
                state["momentum_buffer"].mul_(1000.0)


FAULTS = (
    Fault(name="lr x 30 from then on", lr_factor=lambda _: 30.0),
    Fault(name="lr x 1000 for one step", lr_factor=lambda since: 1000.0 if since == 0 else 1.0),
    Fault(name="lr x 100 for five steps", lr_factor=lambda since: 100.0 if since < 5 else 1.0),
    Fault(name="one weight matrix x 100", strike=_scale_a_matrix),
    Fault(name="broken moments", strike=_break_moments),
    Fault(name="20 broken batches", spoils_batches=20),
    Fault(name="lr growing by 2 % a step", lr_factor=lambda since: 1.02**since),
)
