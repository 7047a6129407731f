"""Compiled models, run as they are written: where a step is looked at, and not made."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Run compiled modules as they are written, if anything was compiled at all."""
    set_stance = getattr(torch.compiler, "set_stance", None)
    if set_stance is None or "torch._dynamo" not in sys.modules:
        yield
        return
    with warnings.catch_warnings(), set_stance("force_eager"):
        # A compiled module warns that global hooks fire once more for its wrapper; that changes no path here.
        warnings.filterwarnings("ignore", message="Using `torch.compile")
        yield
