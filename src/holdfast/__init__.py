"""holdfast keeps PyTorch training runs alive, correct and within memory, and explains failures.

Importing this package does not import torch. Each public name is imported on first access.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.checkpoint.store import latest
    from holdfast.core.errors import (
        BatchError,
        CheckpointError,
        HoldfastError,
        LoaderError,
        NonFiniteError,
        OutOfMemoryError,
        PolicyError,
        RunDirectoryError,
    )
    from holdfast.core.events.event import Event
    from holdfast.core.policy.policy import Policy
    from holdfast.core.version import __version__
    from holdfast.guard.guard import Guard
    from holdfast.guard.result import StepResult
    from holdfast.guard.splitting.two_pass import TwoPass
    from holdfast.learning.learning_rate import advise_learning_rate
    from holdfast.learning.watch import watch
    from holdfast.loader.loader import DataLoader
    from holdfast.numerics.loss import Loss
    from holdfast.recorder.scalars import log

# The module that defines each public name, relative to this package.
_HOMES = {
    "BatchError": "core.errors",
    "CheckpointError": "core.errors",
    "DataLoader": "loader.loader",
    "Event": "core.events.event",
    "Guard": "guard.guard",
    "HoldfastError": "core.errors",
    "LoaderError": "core.errors",
    "Loss": "numerics.loss",
    "NonFiniteError": "core.errors",
    "OutOfMemoryError": "core.errors",
    "Policy": "core.policy.policy",
    "PolicyError": "core.errors",
    "RunDirectoryError": "core.errors",
    "StepResult": "guard.result",
    "TwoPass": "guard.splitting.two_pass",
    "__version__": "core.version",
    "advise_learning_rate": "learning.learning_rate",
    "latest": "checkpoint.store",
    "log": "recorder.scalars",
    "watch": "learning.watch",
}

__all__ = [
    "BatchError",
    "CheckpointError",
    "DataLoader",
    "Event",
    "Guard",
    "HoldfastError",
    "LoaderError",
    "Loss",
    "NonFiniteError",
    "OutOfMemoryError",
    "Policy",
    "PolicyError",
    "RunDirectoryError",
    "StepResult",
    "TwoPass",
    "__version__",
    "advise_learning_rate",
    "latest",
    "log",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"holdfast.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"holdfast.{name} needs torch, which is not installed for {sys.executable}\n"
            "Fix: install the build for your machine (pytorch.org/get-started), 2.11 or later.",
            name="torch",
        ) from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
