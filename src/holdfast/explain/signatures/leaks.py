"""The signature ids for memory leaks: memory that is kept alive from step to step.

The entries are in ``leaks.yaml``. This module imports no other module, so that the training process
can import it at little cost.
"""

from __future__ import annotations

# The kinds of leaks in the order of their ids, which start at H1501 for host memory and at H1521
# for device memory.
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
    """Return the signature id for a leak.

    Args:
        kind: One of `KINDS`.
        on_host: True for a leak in host memory, False for a leak in device memory.

    Raises:
        ValueError: If `kind` is not one of `KINDS`.
    """
    first = _FIRST_ON_HOST if on_host else _FIRST_ON_DEVICE
    return f"H{first + KINDS.index(kind)}"
