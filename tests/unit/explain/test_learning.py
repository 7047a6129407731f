"""Whether a recorded loss fell.

Curves of many kinds, and none of them called well or bad without grounds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.explain.runs.learning import (
    judge_learning,
    judge_learning_of_process,
    judge_learning_of_run,
)
from holdfast.explain.runs.recorded_steps import (
    LossReading,
    read_process_losses,
)
from holdfast.recorder.progress import SampleRing, StepSample
from holdfast.recorder.run_files import SAMPLES_FILE

Curve = Callable[[int, random.Random], float]


def readings(curve: Curve, count: int = 300, *, optimizers: int = 1) -> list[LossReading]:
    """Return what is recorded of a curve, with the optimizers in turns."""
    noise = random.Random(0)
    return [
        LossReading(step + 1, curve(step, noise), optimizer=step % optimizers)
        for step in range(count)
    ]


FELL: dict[str, tuple[Curve, int]] = {
    "cross-entropy": (
        lambda step, noise: 0.3 + 2 * math.exp(-step / 50) + noise.gauss(0, 0.1),
        300,
    ),
    "a few steps": (lambda step, _: 2.3 - 0.1 * step, 12),
    "falls at once, then rests": (
        lambda step, noise: (5.0 if step == 0 else 0.01) + noise.gauss(0, 1e-3),
        20,
    ),
    "negative ELBO": (
        lambda step, noise: 550 - 450 * (1 - math.exp(-step / 50)) + noise.gauss(0, 9),
        300,
    ),
    "negative log-likelihood below zero": (
        lambda step, noise: 1.4 - step / 100 + noise.gauss(0, 0.3),
        300,
    ),
    "negative cosine": (
        lambda step, noise: -0.9 * (1 - math.exp(-step / 50)) + noise.gauss(0, 0.05),
        300,
    ),
    "batches of one": (lambda step, noise: (1 - step / 1500) * noise.gauss(1, 0.5), 1000),
}
FLAT: dict[str, tuple[Curve, int]] = {
    "constant": (lambda *_: 0.693, 100),
    "learning rate of 1e-6 on all data": (lambda step, _: 2.3 * (1 - 1e-6 * step), 100),
    "learning rate of 1e-6 in batches": (lambda _, noise: 2.3 + noise.gauss(0, 0.05), 290),
    "exploded, and came back to where it began": (
        lambda step, noise: 2.3 + 60 * (1 <= step < 80) * noise.random() + 0.1,
        145,
    ),
}
UNCLEAR: dict[str, tuple[Curve, int]] = {
    "three steps": (lambda step, _: 2.3 - step, 3),
    "policy gradient with a baseline": (lambda _, noise: noise.gauss(0, 1), 500),
    "noise as large as the loss": (lambda _, noise: math.exp(noise.gauss(0, 1.5)), 60),
    "fine-tuned further": (lambda _, noise: 0.01 + noise.gauss(0, 1e-3), 200),
    "no finite loss": (lambda *_: math.nan, 50),
}


@pytest.mark.parametrize(
    ("outcome", "curve", "count"),
    [
        pytest.param(outcome, curve, count, id=name)
        for outcome, curves in {"fell": FELL, "flat": FLAT, "unclear": UNCLEAR}.items()
        for name, (curve, count) in curves.items()
    ],
)
def test_a_curve_is_judged_by_its_fall_beyond_its_noise(outcome, curve, count):
    """A loss fell, did not fall, or is not judged."""
    assert judge_learning(readings(curve, count)).outcome == outcome


def test_a_thousandfold_rise_is_said_although_the_loss_came_back():
    """The peak and its step are named; one batch alone is no rise."""
    peak = judge_learning(readings(lambda step, _: 1e9 if step in (5, 6) else 2.3 / (1 + step)))
    assert (peak.outcome, peak.last, peak.step) == ("spiked", 1e9, 6)
    assert (
        judge_learning(readings(lambda step, _: 1e9 if step == 5 else 2.3 / (1 + step))).outcome
        == "fell"
    )


def test_a_rise_that_an_objective_can_explain_is_no_divergence():
    """A loss whose temperature or weights are scheduled ends higher than it began."""
    assert (
        judge_learning(
            readings(lambda step, noise: 0.5 + step / 150 + noise.gauss(0, 0.05))
        ).outcome
        == "rose"
    )


def test_optimizers_that_take_turns_are_not_judged_and_those_of_trainings_in_a_row_are():
    """The first is a GAN; of several trainings the newest counts."""
    falling: Curve = lambda step, _: 2.3 / (1 + step)  # noqa: E731
    assert judge_learning_of_process(readings(falling, optimizers=2)).outcome == "unclear"
    flat = [LossReading(step, 0.7, optimizer=2) for step in range(301, 400)]
    assert judge_learning_of_process([*readings(falling), *flat]).outcome == "flat"
    assert judge_learning_of_process([*flat, *readings(falling)]).outcome == "fell"


def test_a_curve_whose_beginning_is_not_recorded_is_not_called_flat():
    """A script that goes on from a checkpoint of its own has learned before."""
    later = [reading._replace(step=reading.step + 5000) for reading in readings(lambda *_: 0.7)]
    assert judge_learning_of_process(later).outcome == "unclear"


def test_of_ranks_the_surest_counts_and_reward_is_never_judged():
    """One rank with few samples does not hide the fall that the others saw."""
    falling = readings(lambda step, _: 2.3 / (1 + step))
    assert judge_learning_of_run([readings(lambda *_: 1.0, 3), falling]).outcome == "fell"
    assert judge_learning_of_run([falling], by_reward=True).outcome == "unclear"
    assert judge_learning_of_run([]).outcome == "unclear"


def record(folder: Path, steps: int, *, wait_seconds: float) -> None:
    """Write the samples of a process whose steps take 0.1 s each, and whose loss falls in its
    first steps only.
    """
    ring = SampleRing(folder / SAMPLES_FILE)
    for step in range(1, steps + 1):
        sample = StepSample(
            step=step,
            micro_steps=1,
            loss=1.0 + math.exp(-step / 1000),
            grad_norm=None,
            learning_rate=0.1,
            seconds=0.1,
            wait_seconds=wait_seconds,
        )
        # Without the time, which the ring sets, and the optimizer.
        ring.write(*sample[:-2])
    ring.close()


def test_a_run_that_is_longer_than_its_ring_is_judged_from_its_beginning(tmp_path):
    """What the ring does not hold any more lies in its history.

    The loss fell long ago, and is flat in the ring.
    """
    record(tmp_path, 70_000, wait_seconds=0.0)
    kept = read_process_losses(tmp_path)
    assert kept[0].step == 1
    assert judge_learning_of_process(kept).outcome == "fell"
