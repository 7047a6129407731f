"""The marks of tests that need a CUDA device, and what they count there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs a CUDA device: run `make gpu` on a machine with one",
    ),
]


def waits(function: Callable[[], Any]) -> int:
    """Return how often the host waits for the device while a function runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(each.message) for each in caught)
