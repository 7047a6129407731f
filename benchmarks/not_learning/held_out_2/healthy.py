"""The healthy programs of this set."""

from __future__ import annotations

from benchmarks.not_learning.held_out_2 import (
    healthy_generative,
    healthy_images,
    healthy_methods,
    healthy_sequences,
    healthy_tables,
)

PROGRAMS = [
    *healthy_generative.PROGRAMS,
    *healthy_images.PROGRAMS,
    *healthy_methods.PROGRAMS,
    *healthy_sequences.PROGRAMS,
    *healthy_tables.PROGRAMS,
]
