"""The ids of the signatures of leaks: memory that is kept alive from step to step.

The entries are in ``leaks.yaml``. This module imports nothing, because the training process itself
imports it.
"""

from __future__ import annotations

# In the order of their signatures: from H1501 in host memory, and from H1521 in device memory.
KINDS = (
    "container",
    "graph",
    "autograd chain",
    "cycle",
    "hooks",
    "exception",
    "cache",
    "linked",
    "value",
    "unknown",
    "trend",
)
_FIRST_ON_HOST = 1501
_FIRST_ON_DEVICE = 1521


def signature_of(kind: str, *, on_host: bool) -> str:
    """Return the id of the signature of a leak.

    Args:
        kind: One of `KINDS`.
        on_host: Whether host memory leaks rather than device memory.

    Raises:
        ValueError: If `kind` is not one of `KINDS`.
    """
    first = _FIRST_ON_HOST if on_host else _FIRST_ON_DEVICE
    return f"H{first + KINDS.index(kind)}"
