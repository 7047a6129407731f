"""The faulty programs of this set."""

from __future__ import annotations

from benchmarks.not_learning.held_out_2 import (
    faulty_data,
    faulty_forwards,
    faulty_losses,
    faulty_paths,
    faulty_scales,
    faulty_steps,
)

PROGRAMS = [
    *faulty_data.PROGRAMS,
    *faulty_forwards.PROGRAMS,
    *faulty_losses.PROGRAMS,
    *faulty_paths.PROGRAMS,
    *faulty_scales.PROGRAMS,
    *faulty_steps.PROGRAMS,
]
