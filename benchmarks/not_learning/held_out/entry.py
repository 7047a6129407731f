"""How a function of this folder becomes a program of the corpus and scores itself; no program lives here.

A train function returns its score, measured after the watch has ended: 0 is perfect, 1 is what the trivial answer
gets (the majority class, the mean, the untrained model). The evaluation of the rules ignores it; `verify` reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.not_learning.program import Program, Watch

Train = Callable[[Watch, int], Any]


def healthy(train: Train) -> Program:
    """Return the healthy program that `train` is."""
    return Program(name=train.__name__, healthy=True, train=train)


def faulty(train: Train, *, causes: str, also: str = "") -> Program:
    """Return the faulty program that `train` is; `causes` and `also`, its symptoms, are like ``"836 838"``."""
    named = tuple(f"H{number}" for number in causes.split())
    symptoms = tuple(f"H{number}" for number in also.split())
    return Program(name=train.__name__, healthy=False, causes=named, detects=(*named, *symptoms), train=train)


def error_score(outputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of wrong answers over the majority class's; outputs ``(n, classes)``, labels ``(n,)``."""
    wrong = (outputs.argmax(-1) != labels).double().mean()
    return float(wrong / (1 - labels.bincount().max() / len(labels)))


def squared_score(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the mean squared error over the variance of the targets; both of the same shape."""
    if outputs.shape != targets.shape:
        raise ValueError(f"outputs are {tuple(outputs.shape)}, targets are {tuple(targets.shape)}")
    return float((outputs.detach() - targets).square().mean() / targets.var(correction=0))
