"""The ids of what is known about memory that is kept from step to step.

The entries are in ``leaks.yaml``.

Light, since the training process itself imports it.
"""

from __future__ import annotations

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
"""In the order of their signatures.

H1501 and on in host memory, H1521 and on in that of a device.
"""
_TO_DEVICE = 20


def signature_of(kind: str, *, on_host: bool) -> str:
    """Return the id of the signature of a leak, by one of `KINDS`.

    `on_host`: the memory is not that of a device.
    """
    return f"H{1501 + KINDS.index(kind) + (0 if on_host else _TO_DEVICE)}"
