"""All faulty programs of the design set."""

from __future__ import annotations

from benchmarks.not_learning.design import faulty_data, faulty_losses, faulty_rates, faulty_wiring

PROGRAMS = [
    *faulty_wiring.PROGRAMS,
    *faulty_rates.PROGRAMS,
    *faulty_losses.PROGRAMS,
    *faulty_data.PROGRAMS,
]
