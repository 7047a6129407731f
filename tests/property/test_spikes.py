"""The spike detector.

NaN leaves no trace, scale means nothing, and a restored detector goes on as the old one.
"""

from __future__ import annotations

import json
import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.policy.kinds import Objective
from holdfast.numerics.spikes import Level, SpikeDetector

_SETTINGS = settings(deadline=None, max_examples=40)
_BAD = (math.nan, math.inf, -math.inf)
Pair = tuple[float, float]


@st.composite
def _series(draw: st.DrawFn) -> list[Pair]:
    """Return losses and norms with spikes, shifts of the level, and now and then zeros or
    negative losses.
    """
    chance = random.Random(draw(st.integers(0, 2**32)))
    scatter = draw(st.sampled_from([0.001, 0.1, 0.5, 1.5]))
    offset = draw(st.sampled_from([0.0, 0.0, 0.0, 2.0]))
    shift_at, shift = draw(st.integers(100, 500)), draw(st.sampled_from([1.0, 3.0, 100.0]))
    spikes = draw(st.floats(0.0, 0.1))
    pairs = []
    for step in range(450):
        spike = 10.0 ** chance.uniform(0, 4) if chance.random() < spikes else 1.0
        level = spike * (shift if step > shift_at else 1.0)
        loss = level * math.exp(chance.gauss(0, scatter)) - offset
        pairs.append((loss, level * math.exp(chance.gauss(0, scatter)) * (chance.random() > 0.01)))
    return pairs


def _run(detector: SpikeDetector, pairs: list[Pair]) -> list[tuple[Level, int | None]]:
    """Return the level of each finite step and the suspicion after it; hard steps are skipped."""
    found = []
    for loss, norm in pairs:
        level = detector.judge("all", loss, norm)
        if level is not Level.HARD:
            detector.accepted("all", loss, norm)
        if math.isfinite(loss) and math.isfinite(norm):
            found.append((level, detector.suspicious_since()))
        else:
            assert level is Level.CALM
    return found


@_SETTINGS
@given(_series(), st.integers(0, 2**32), st.floats(0.0, 0.5))
def test_values_that_are_not_finite_leave_no_trace(
    pairs: list[Pair], seed: int, share: float
) -> None:
    """With NaN and Inf strewn in anywhere, every other step is judged as without them."""
    chance = random.Random(seed)
    strewn: list[Pair] = []
    for pair in pairs:
        while chance.random() < share:
            bad = chance.choice(_BAD)
            strewn.append(chance.choice([(bad, pair[1]), (pair[0], bad), (bad, bad)]))
        strewn.append(pair)
    assert _run(SpikeDetector(objective="minimize"), strewn) == _run(
        SpikeDetector(objective="minimize"), pairs
    )


@_SETTINGS
@given(_series(), st.integers(-60, 60), st.integers(-60, 60))
def test_the_scale_of_losses_and_norms_means_nothing(
    pairs: list[Pair], loss_power: int, norm_power: int
) -> None:
    """Losses times one power of two and norms times another, which rounds nothing, are judged
    alike.
    """
    scaled = [(loss * 2.0**loss_power, norm * 2.0**norm_power) for loss, norm in pairs]
    assert _run(SpikeDetector(objective="minimize"), scaled) == _run(
        SpikeDetector(objective="minimize"), pairs
    )


@_SETTINGS
@given(
    _series(),
    st.integers(0, 449),
    st.integers(0, 449),
    st.sampled_from(["minimize", "adversarial"]),
)
def test_a_restored_detector_goes_on_as_the_old_one(
    pairs: list[Pair], cut: int, earlier: int, objective: Objective
) -> None:
    """Through JSON and back at any step, the rest is judged alike, also after a rollback."""
    old = SpikeDetector(objective=objective)
    _run(old, pairs[: min(cut, earlier)])
    saved = json.dumps(old.state_dict())
    _run(old, pairs[min(cut, earlier) : cut])
    text = json.dumps(old.state_dict(), allow_nan=False)
    new = SpikeDetector(objective=objective)
    new.load_state_dict(json.loads(text))
    for detector in (old, new):
        detector.return_to(json.loads(saved))
    assert _run(new, pairs[cut:]) == _run(old, pairs[cut:])
    assert new.state_dict() == old.state_dict()


@_SETTINGS
@given(_series(), st.lists(st.tuples(st.integers(0, 449), st.integers(0, 449)), max_size=4))
def test_no_regime_is_suspected_for_ever(
    pairs: list[Pair], rollbacks: list[tuple[int, int]]
) -> None:
    """Whatever happened before, also rollbacks, 400 usual steps in a row make any run calm."""
    detector = SpikeDetector(objective="minimize")
    back = {number: min(earlier, number) for number, earlier in rollbacks}
    saved = {}
    for number, pair in enumerate(pairs):
        if number in back.values():
            saved[number] = json.dumps(detector.state_dict())
        _run(detector, [pair])
        if number in back:
            detector.return_to(json.loads(saved[back[number]]))
    chance = random.Random(0)
    usual = [
        (7.0 * math.exp(chance.gauss(0, 0.1)), 5.0 * math.exp(chance.gauss(0, 0.1)))
        for _ in range(400)
    ]
    levels = [level for level, _ in _run(detector, usual)]
    assert detector.is_calm()
    assert set(levels[-200:]) == {Level.CALM}


@_SETTINGS
@given(
    st.lists(
        st.tuples(st.floats(allow_nan=True), st.floats(allow_nan=True)), min_size=1, max_size=40
    )
)
def test_no_numbers_whatever_raise(pairs: list[Pair]) -> None:
    """Any floats, the largest, the smallest and minus zero among them, repeated long enough to
    matter, are judged.
    """
    detector = SpikeDetector(objective="minimize")
    _run(detector, pairs * (1 + 400 // len(pairs)))
    json.dumps(detector.state_dict(), allow_nan=False)
