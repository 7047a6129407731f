"""The marks of tests that need a CUDA device."""

from __future__ import annotations

import pytest
import torch

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device: run `make gpu` on a machine with one"
    ),
]
