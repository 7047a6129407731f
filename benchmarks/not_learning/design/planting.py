"""How a faulty program states what was planted in it, and the symptoms that several faults share."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.not_learning.program import Program, Watch

UNLEARNT = ("H828", "H832")
"""Not better than a constant, and a plateau."""

STILL = ("H823", *UNLEARNT)
"""Moreover the weights do not move."""

BLOWN = ("H801", "H802", "H804", "H826", "H827")
"""Spikes, divergence, and what is not finite after it."""

Train = Callable[[Watch, int], None]


def plants(programs: list[Program], *causes: str, shows: tuple[str, ...] = ()) -> Callable[[Train], Train]:
    """Return a decorator that adds a faulty program to a list, under the name of its function.

    Args:
        programs: The list.
        causes: Ids of the rules that name the fault; none where the catalogue has no number for it.
        shows: Ids of its legitimate symptoms.
    """

    def add(train: Train) -> Train:
        detects = (*causes, *shows)
        programs.append(Program(name=train.__name__, healthy=False, causes=causes, detects=detects, train=train))
        return train

    return add
