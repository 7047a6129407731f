"""Evaluation that leaves no trace in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from holdfast.data.random_state import capture, restore


@contextmanager
def evaluating(models: Sequence[nn.Module], devices: Sequence[torch.device]) -> Iterator[None]:
    """Switch to evaluation without gradients; modes and random state come back, however the context is left."""
    modules = [module for model in models for module in model.modules()]
    modes = [module.training for module in modules]
    random_state = capture(devices)
    try:
        for model in models:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        restore(random_state)
