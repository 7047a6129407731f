"""Which steps the diagnosis looks at: all of the first, then few, at no fixed distance."""

from __future__ import annotations

FULL_ROUNDS = 30
"""Steps that are observed fully, at first: numerics.md 5.2, tier 1."""
FIRST_WINDOW = 400
"""Steps after which a run is judged as a whole for the first time."""
_LATER_SHARE, _LATEST_SHARE = 10, 50
"""After the first rounds one in so many is observed, numerics.md 5.2, tier 2; fewer after the first window."""


def is_sampled(step: int, optimizers: int) -> bool:
    """Say whether a step is looked at."""
    players = max(1, optimizers)
    if step < FULL_ROUNDS * players:
        return True
    # Multiplicative hashing instead of every tenth: it cannot fall into step with epochs or with several
    # optimizers, and it draws no random number.
    share = _LATER_SHARE if step < FIRST_WINDOW * players else _LATEST_SHARE
    return (step * 2654435761) % 2**32 < 2**32 // share
