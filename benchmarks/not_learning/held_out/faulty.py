"""The faulty programs of the held-out set, in one list."""

from __future__ import annotations

from benchmarks.not_learning.held_out import (
    faulty_data,
    faulty_layers,
    faulty_losses,
    faulty_paths,
    faulty_rates,
    faulty_shapes,
    faulty_stepping,
    faulty_tables,
)

PROGRAMS = [
    *faulty_losses.PROGRAMS,
    *faulty_shapes.PROGRAMS,
    *faulty_paths.PROGRAMS,
    *faulty_stepping.PROGRAMS,
    *faulty_rates.PROGRAMS,
    *faulty_layers.PROGRAMS,
    *faulty_data.PROGRAMS,
    *faulty_tables.PROGRAMS,
]
