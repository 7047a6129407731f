"""All healthy programs of the design set."""

from __future__ import annotations

from benchmarks.not_learning.design import (
    healthy_representation,
    healthy_sequences,
    healthy_supervised,
    healthy_techniques,
    healthy_unusual,
)

PROGRAMS = [
    *healthy_supervised.PROGRAMS,
    *healthy_techniques.PROGRAMS,
    *healthy_sequences.PROGRAMS,
    *healthy_representation.PROGRAMS,
    *healthy_unusual.PROGRAMS,
]
