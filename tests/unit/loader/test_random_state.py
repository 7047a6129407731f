"""Random state: captured, put back, and carried through a checkpoint, for python, numpy and
torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.loader import random_state
from holdfast.loader.random_state import LazySeeding, RandomState, capture, isolated, restore


def _draw() -> tuple[Any, ...]:
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(np.random.randn()),
        float(torch.rand(())),
        float(torch.randn(())),
    )


@pytest.mark.parametrize(
    "disturb",
    [
        lambda: random.seed(1),
        lambda: np.random.seed(1),
        lambda: torch.manual_seed(1),
        lambda: [np.random.rand() for _ in range(1000)],
        lambda: np.random.set_state(np.random.RandomState(9).get_state()),
    ],
)
def test_isolation_holds_whatever_happens_inside(disturb: Callable[[], object]) -> None:
    """Seeds, draws and foreign states inside leave the stream outside as it was, also after an
    error.
    """
    state = capture()
    expected = _draw()
    restore(state)
    with isolated():
        disturb()
    with pytest.raises(LookupError), isolated():
        disturb()
        raise LookupError
    assert _draw() == expected


def test_a_device_that_is_gone_is_passed_over() -> None:
    """A state from a machine with more devices can be restored on this one."""
    state = capture()
    expected = _draw()
    elsewhere = RandomState(
        state.python, state.numpy, state.cpu, {"cuda:97": torch.zeros(16, dtype=torch.uint8)}
    )
    restore(elsewhere)
    assert _draw() == expected


def test_the_state_of_pythons_generator_is_never_a_stale_one() -> None:
    """Whatever is drawn, seeded or set between, the state captured is the one that
    `random.getstate` shows.
    """
    assert random_state._READS_RAW, "the layout of this Python is known"
    for change in (
        random.random,
        lambda: random.gauss(0, 1),  # makes a pair
        lambda: random.gauss(0, 1),  # uses its second half: no word changes
        lambda: random.seed(5),
        lambda: random.seed(5),
        lambda: random.getrandbits(20000),
        lambda: random.setstate(random.Random(9).getstate()),
    ):
        before = capture().python
        change()
        assert capture().python == random.getstate()
        assert capture().python is capture().python
        restore(
            RandomState(before, *(getattr(capture(), name) for name in ("numpy", "cpu", "devices")))
        )
        assert random.getstate() == before
        change()


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        np.random.random,
        lambda: random.gauss(0, 1),
        np.random.randn,
        lambda: random.getrandbits(32 * 624),  # all words that the generator holds
        lambda: np.random.bytes(4 * 624),
    ],
)
@pytest.mark.parametrize("half", [False, True])
def test_a_generator_that_is_drawn_from_is_seeded_from_then_on(
    draw: Callable[[], Any], half: bool
) -> None:
    """Until then both are left alone; half of a pair of normal numbers is drawn from them too."""
    random.seed(1)
    np.random.seed(1)
    if half:
        random.gauss(0, 1)
        np.random.randn()
    lazy = LazySeeding()
    before = random.getstate(), np.random.get_state()[1].tolist()
    stand = lazy.generator_states()
    lazy.seed(7)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    draw()
    assert lazy.was_drawn(stand)
    lazy.seed(7)
    first = random.random(), np.random.random()
    lazy.seed(7)
    assert (random.random(), np.random.random()) == first
    assert not lazy.was_drawn(lazy.generator_states())
