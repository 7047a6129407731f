"""`Certainty`: how sure a verdict is of the cause that it names.

Each word promises how many of the verdicts with it name the right cause:

==========  ===========================================================
certain     at least 97 in 100
likely      at least 80 in 100
a guess     no promise: look at the evidence, and at what is missing
==========  ===========================================================

``evals/world`` measures these shares on reports that were not used to write the signatures.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias, get_args

Certainty: TypeAlias = Literal["certain", "likely", "a guess"]
CERTAINTIES: tuple[Certainty, ...] = get_args(Certainty)


def rank_of(certainty: Certainty) -> int:
    """Return a sort key: 0 for "certain", and more for the less certain words."""
    return CERTAINTIES.index(certainty)


def least_of(certainties: Iterable[Certainty]) -> Certainty:
    """Return the least certain of at least one certainty."""
    return max(certainties, key=rank_of)


def lowered(certainty: Certainty) -> Certainty:
    """Return the next less certain word, because some evidence contradicts the cause."""
    return CERTAINTIES[min(rank_of(certainty) + 1, len(CERTAINTIES) - 1)]
