"""The healthy programs of the held-out set, in one list."""

from __future__ import annotations

from benchmarks.not_learning.held_out import (
    healthy_generative,
    healthy_images,
    healthy_methods,
    healthy_sequences,
    healthy_tables,
)

PROGRAMS = [
    *healthy_tables.PROGRAMS,
    *healthy_sequences.PROGRAMS,
    *healthy_images.PROGRAMS,
    *healthy_generative.PROGRAMS,
    *healthy_methods.PROGRAMS,
]
