"""Real hangs of a real training, observed as `holdfast run` does.

Noticed, and blamed on the right line.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from benchmarks.hang_cases import MECHANISMS, RANKS, names
from benchmarks.hang_detection import Row
from tests.faults.programs.forked_hangs import row_of
from tests.own_process import in_own_process

from holdfast.supervise.watch.py_spy import find_py_spy

pytestmark = pytest.mark.skipif(not find_py_spy(), reason="py-spy is not installed")
_NOW = ("lock held at fork/worker", "regex/dataset", "rank sleeps")
# Py-spy does not show built-in functions of the interpreter: it is called a loop
_UNSURE = "endless sum"
_EACH = [
    next(case for case in names() if case.startswith(f"{name}/"))
    for name in MECHANISMS
    if name != _UNSURE and not any(case.startswith(f"{name}/") for case in _NOW)
]


_CASES = [*_NOW, *_EACH, *(name for name in RANKS if name not in _NOW)]
_AT_ONCE = 8  # nearly all that they do is to stand still
_GROUPS = [
    tuple(_CASES[first :: -(-len(_CASES) // _AT_ONCE)])
    for first in range(-(-len(_CASES) // _AT_ONCE))
]


def _check(row: Row) -> None:
    assert row.found, (row.case, row.words)
    assert (row.kind_right, row.frame_right, row.phase_right) == (True, True, True), (
        row.case,
        row.words,
    )
    assert row.rank_right is not False, (row.case, row.words)


@pytest.mark.slow
@pytest.mark.parametrize("cases", _GROUPS, ids=", ".join)
def test_hangs_are_reported_with_their_kind_phase_and_line(cases: tuple[str, ...]) -> None:
    """Whatever it waits for and wherever.

    In the dataset, a worker, the model, a callback, another rank.
    """
    with ThreadPoolExecutor(len(cases)) as pool:
        for row in pool.map(partial(in_own_process, row_of), cases):
            _check(row)


@pytest.mark.slow
def test_a_worker_of_our_own_loader_is_left_to_the_loader() -> None:
    """It replaces the worker itself, and loses less by it than a restart would."""
    row = in_own_process(row_of, "socket/healed worker")
    _check(row)
    assert row.remedy == "wait"


def test_each_mechanism_is_planted_where_its_signature_says() -> None:
    """The cases are more than sixty, each is different, and every kind but that of a GPU is
    among them.
    """
    cases = [*names(), *RANKS]
    assert len(cases) == len(set(cases)) >= 60
    kinds = {mechanism.kind for mechanism in MECHANISMS.values()} | {
        case.kind for case in RANKS.values()
    }
    assert {
        "lock",
        "queue",
        "collective",
        "native code",
        "OpenMP",
        "loader",
        "stopped",
        "I/O",
        "pipe",
    } <= kinds
