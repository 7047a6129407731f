"""Spikes: what stands out, what does not, when a run counts as calm, and what is decided."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from holdfast.core.events.decisions import RollBack
from holdfast.numerics.decisions import decide_after_spike
from holdfast.numerics.spikes import Level, SpikeDetector

Pair = tuple[float, float]


def healthy(seed: int, scatter: float = 0.2) -> Iterator[Pair]:
    """Yield losses around 2 and norms around 1 for ever, log-normal and correlated."""
    chance = random.Random(seed)
    while True:
        hardness = chance.gauss(0, scatter)
        yield 2.0 * math.exp(hardness), math.exp(hardness + chance.gauss(0, scatter))


def feed(
    detector: SpikeDetector, pairs: Iterator[Pair], count: int, key: str = "all"
) -> list[Level]:
    """Judge so many steps and accept all that are not hard."""
    levels = []
    for loss, norm in (next(pairs) for _ in range(count)):
        levels.append(detector.judge(key, loss, norm))
        if levels[-1] is not Level.HARD:
            detector.accepted(key, loss, norm)
    return levels


def warm(scatter: float = 0.2) -> tuple[SpikeDetector, Iterator[Pair]]:
    detector, pairs = SpikeDetector(objective="minimize"), healthy(1, scatter)
    feed(detector, pairs, 300)
    return detector, pairs


def times(pairs: Iterator[Pair], loss: float, norm: float) -> Iterator[Pair]:
    return ((loss * value, norm * size) for value, size in pairs)


def test_a_spike_needs_both_signals() -> None:
    """Loss and norm far out are hard; a norm alone is calm.

    So is a loss alone, but a reason for suspicion.
    """
    detector, _ = warm()
    assert detector.judge("all", 2.0, 20.0) is Level.CALM
    assert detector.is_calm()
    assert detector.judge("all", 20.0, 1.0) is Level.CALM
    assert not detector.is_calm()
    assert detector.judge("all", 20.0, 20.0) is Level.HARD
    assert detector.suspicious_since() == 2


def test_a_warm_up_and_the_first_fall_of_the_loss_are_no_spikes() -> None:
    """Norms that grow tenfold over a warm-up of the learning rate, while the loss falls by 300,
    alarm nobody.
    """
    detector, chance = SpikeDetector(objective="minimize"), random.Random(3)
    for step in range(1500):
        loss = (0.01 + 3 * math.exp(-step / 250)) * math.exp(chance.gauss(0, 0.3))
        norm = (0.1 + min(step, 500) / 500) * math.exp(chance.gauss(0, 0.3))
        assert detector.judge("all", loss, norm) is Level.CALM
        detector.accepted("all", loss, norm)
        assert detector.is_calm()


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_a_very_calm_run_is_not_alarmed_by_a_ripple(scale: float) -> None:
    """Losses and norms that are all but constant may rise by 5 % and 20 % for good, at any
    scale.
    """
    detector = SpikeDetector(objective="minimize")
    for step in range(600):
        rise = step >= 300
        loss, norm = scale * (1.05 if rise else 1.0), scale * (1.2 if rise else 1.0)
        assert detector.judge("all", loss, norm) is Level.CALM
        detector.accepted("all", loss, norm)
    assert detector.is_calm()


@pytest.mark.parametrize(
    "heavy",
    [
        lambda chance: (math.exp(chance.gauss(0, 1)), 1.0),
        lambda chance: (abs(chance.gauss(0, 1) / math.sqrt(chance.expovariate(1))), 1.0),
        lambda chance: (chance.gauss(0, 1) / math.sqrt(chance.expovariate(1)), 1.0),
        lambda chance: (max(0.0, chance.gauss(-2.0, 1.0)), 0.0),
    ],
    ids=["log-normal", "student-2", "student-2 around zero", "mostly exactly zero"],
)
def test_heavy_tails_are_usual(heavy: Callable[[random.Random], Pair]) -> None:
    """Of 20,000 healthy steps with heavy tails, loss and norm rising together, at most two are
    called hard.
    """
    detector, chance = SpikeDetector(objective="minimize"), random.Random(4)

    def pairs() -> Iterator[Pair]:
        while True:
            loss, offset = heavy(chance)
            yield loss, abs(loss) * math.exp(chance.gauss(0, 0.2)) + 0.1 * offset

    levels = feed(detector, pairs(), 20_000)
    assert levels.count(Level.HARD) + levels.count(Level.DIVERGED) <= 2


def test_spikes_that_a_run_survives_become_its_tail() -> None:
    """A run with a spike in every 150 steps is interrupted by the first two, and by larger ones,
    only.
    """
    detector, pairs = warm()
    found = []
    for _ in range(12):
        feed(detector, pairs, 149)
        found.append(detector.judge("all", 30.0, 15.0))
        if found[-1] is not Level.HARD:
            detector.accepted("all", 30.0, 15.0)
    assert found[:2] == [Level.HARD] * 2
    assert Level.HARD not in found[2:]
    feed(detector, pairs, 100)
    assert detector.judge("all", 1e6, 1e6) is Level.HARD


@pytest.mark.parametrize(("loss", "norm"), [(20.0, 20.0), (4.0, 0.1), (1e30, 1e30)])
def test_a_loss_that_stays_up_is_a_divergence_and_reported_once(loss: float, norm: float) -> None:
    """Whether the norms explode or vanish, 40 steps suffice.

    If nobody acts, the new level is the usual one.
    """
    detector, pairs = warm()
    levels = feed(detector, times(pairs, loss, norm), 400)
    assert levels.count(Level.DIVERGED) == 1
    assert levels.index(Level.DIVERGED) < 40
    assert set(levels[levels.index(Level.DIVERGED) + 1 :]) == {Level.CALM}
    assert detector.is_calm()


def test_a_loss_that_creeps_up_is_a_divergence() -> None:
    """A loss that grows by 0.5 % a step is suspected before it has doubled, and reported before
    it is fourfold.
    """
    detector, pairs = warm()
    suspected = diverged = None
    for step in range(400):
        loss, norm = next(pairs)
        grown = 1.005**step
        level = detector.judge("all", loss * grown, norm)
        if suspected is None and not detector.is_calm():
            suspected = grown
        if level is Level.DIVERGED:
            diverged = grown
            break
        detector.accepted("all", loss * grown, norm)
    assert suspected is not None
    assert suspected < 2
    assert diverged is not None
    assert diverged < 4


def test_after_a_rollback_statistics_are_those_of_then() -> None:
    """What 150 steps of divergence have left is forgotten, and the same spike is found again."""
    detector, pairs = warm()
    saved, saved_at, usual = (
        copy.deepcopy(detector.state_dict()),
        detector.steps,
        detector.usual_norm("all"),
    )
    assert usual is not None
    diverging = times(pairs, 30.0, 30.0)
    assert Level.DIVERGED in feed(detector, diverging, 150)
    detector.return_to(saved)
    assert detector.steps == saved_at
    assert detector.is_calm()
    found = detector.usual_norm("all")
    assert found is not None
    assert found == pytest.approx(usual, rel=0.1)
    feed(detector, pairs, 20)
    assert detector.judge("all", *next(diverging)) is Level.HARD


def test_a_level_that_is_up_from_the_first_step_after_a_rollback_is_the_data() -> None:
    """Good weights and a high loss at once mean other data: no second divergence is reported."""
    detector, pairs = warm()
    harder, saved = times(pairs, 30.0, 30.0), copy.deepcopy(detector.state_dict())
    assert Level.DIVERGED in feed(detector, harder, 30)
    detector.return_to(saved)
    assert Level.DIVERGED not in feed(detector, harder, 300)


def test_weights_that_are_wrecked_again_at_once_are_a_divergence() -> None:
    """One usual loss after the return, then high ones.

    The step in between did it, as at a rate that is too high.
    """
    detector, pairs = warm()
    harder, saved = times(pairs, 30.0, 30.0), copy.deepcopy(detector.state_dict())
    for _ in range(3):
        feed(detector, pairs, 1)
        assert Level.DIVERGED in feed(detector, harder, 30)
        detector.return_to(saved)


@pytest.mark.parametrize("objective", ["adversarial", "reinforcement"])
def test_where_a_loss_means_nothing_every_step_is_calm(objective: str) -> None:
    """Neither a spike of both nor a loss that stays up is suspected there."""
    detector, pairs = SpikeDetector(objective=objective), healthy(1)  # type: ignore[arg-type]
    feed(detector, pairs, 300)
    assert detector.judge("all", 1e6, 1e6) is Level.CALM
    assert set(feed(detector, times(pairs, 100.0, 1.0), 200)) == {Level.CALM}
    assert detector.is_calm()


@pytest.mark.parametrize(
    ("level", "action", "in_a_row", "patience", "rollbacks", "most", "kind"),
    yaml.safe_load(Path(__file__).with_name("decisions.yaml").read_text(encoding="utf-8"))[
        "spikes"
    ],
)
def test_the_answer_is_no_stronger_than_allowed(
    level: str,
    action: str,
    in_a_row: int,
    patience: int | None,
    rollbacks: int,
    most: int,
    kind: str | None,
) -> None:
    """Each limit holds at its exact value; a rollback passes over the batches that led there."""
    decision = decide_after_spike(
        Level[level],
        action=action,  # type: ignore[arg-type]
        hard_in_a_row=in_a_row,
        patience=patience,
        rollbacks_in_a_row=rollbacks,
        max_rollbacks=most,
        reason="loss 9",
    )
    assert (None if decision is None else type(decision).__name__) == kind
    if decision is not None:
        assert "loss 9" in decision.reason
        assert decision.promise == "changes training"
    if isinstance(decision, RollBack):
        assert decision.rewind_data is False


@pytest.mark.parametrize("damage", [[], 0, "", False])
@pytest.mark.parametrize("field", ["loss", "norm", "best"])
def test_statistics_that_are_none_are_refused(field: str, damage: object) -> None:
    """What no detector writes in place of statistics is an error, and not "nothing known yet"."""
    detector = SpikeDetector(objective="minimize")
    detector.judge("loss", 1.0, 1.0)
    state = copy.deepcopy(detector.state_dict())
    state["tracks"]["loss"][field] = damage
    with pytest.raises((TypeError, ValueError, AttributeError)):
        SpikeDetector(objective="minimize").load_state_dict(state)
