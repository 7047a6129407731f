"""Limits are learned per phase above a floor, or are as told.

Wrong settings are refused with what is right.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import PolicyError
from holdfast.recorder.progress import ProcessPhase
from holdfast.supervise.watch.limits import FLOORS, HangLimits, LearnedLimits, phase_name


def test_settings_are_read_as_people_write_them() -> None:
    """Case, underscores and hyphens do not matter, ``all`` fills what is not named, and ``off``
    is never.
    """
    limits = HangLimits.parse(
        ["Data_Wait=120", "forward/backward = 9s", "saving=off", "all=60", "moving=5"]
    )
    assert limits.floor(ProcessPhase.DATA_WAIT) == 120
    assert limits.floor(ProcessPhase.FORWARD_BACKWARD) == 9
    assert limits.floor(ProcessPhase.SAVING) == math.inf
    assert limits.floor(ProcessPhase.EVALUATION) == limits.floor(ProcessPhase.STARTING) == 60
    assert limits.moving_seconds == 5


def test_every_phase_can_be_set_by_its_name() -> None:
    """The name that events show is the name that the command line takes."""
    for phase in ProcessPhase:
        assert HangLimits.parse([f"{phase_name(phase)}=7"]).floor(phase) == 7


@pytest.mark.parametrize(
    ("setting", "rule", "word"),
    [
        ("data wait", "H726", "PHASE=SECONDS"),
        ("", "H726", "PHASE=SECONDS"),
        ("data waits=3", "H727", "'data wait'"),
        ("=3", "H727", "saving"),
        *((f"saving={bad}", "H728", "seconds") for bad in ("soon", "-1", "0", "nan", "")),
    ],
)
def test_a_wrong_setting_is_refused_with_what_is_right(setting: str, rule: str, word: str) -> None:
    """Each mistake has its rule, and the message says what is allowed."""
    with pytest.raises(PolicyError) as caught:
        HangLimits.parse([setting])
    assert caught.value.rule == rule
    assert word in str(caught.value)


def test_a_limit_follows_the_longest_and_only_of_its_phase() -> None:
    """Eight times the longest, never below the floor; a phase that comes once keeps its floor."""
    learned = LearnedLimits(HangLimits())
    learned.add_duration(ProcessPhase.DATA_WAIT, 1.0, 0.0)
    assert learned.limit(ProcessPhase.DATA_WAIT) == FLOORS[ProcessPhase.DATA_WAIT]
    learned.add_duration(ProcessPhase.DATA_WAIT, 10.0, 1.0)
    assert learned.limit(ProcessPhase.DATA_WAIT) == 80.0
    assert learned.limit(ProcessPhase.OPTIMIZER) == FLOORS[ProcessPhase.OPTIMIZER]
    learned.add_duration(ProcessPhase.FIRST_STEP, 1_000.0, 1.0)
    assert learned.limit(ProcessPhase.FIRST_STEP) == FLOORS[ProcessPhase.FIRST_STEP]


def test_what_comes_with_each_step_is_forgotten_and_what_comes_seldom_is_not() -> None:
    """One bad hour does not blind the watchdog for good, but a slow evaluation once a day is
    remembered.
    """
    learned = LearnedLimits(HangLimits())
    learned.add_duration(ProcessPhase.DATA_WAIT, 100.0, 0.0)
    learned.add_duration(ProcessPhase.EVALUATION, 500.0, 0.0)
    for number in range(1, 4_000):
        learned.add_duration(ProcessPhase.DATA_WAIT, 0.1, 4.0 * number)
        if number % 1_000 == 0:
            learned.add_duration(ProcessPhase.EVALUATION, 1.0, 4.0 * number)
    assert learned.limit(ProcessPhase.DATA_WAIT) == FLOORS[ProcessPhase.DATA_WAIT]
    assert learned.limit(ProcessPhase.EVALUATION) == 4_000.0


@given(st.lists(st.tuples(st.sampled_from(ProcessPhase), st.floats(0, 1e5)), max_size=50))
def test_a_limit_is_never_below_its_floor_nor_below_the_longest_in_its_window(
    ended: list[tuple[ProcessPhase, float]],
) -> None:
    """Whatever was seen within an hour, what was healthy then is no hang now."""
    learned = LearnedLimits(HangLimits())
    for number, (phase, seconds) in enumerate(ended):
        learned.add_duration(phase, seconds, float(number))
    for phase, seconds in ended:
        if phase not in (ProcessPhase.STARTING, ProcessPhase.FIRST_STEP, ProcessPhase.ENDING):
            assert learned.limit(phase) >= seconds
        assert learned.limit(phase) >= FLOORS[phase]
