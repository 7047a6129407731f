"""How often the watchdog's limits would call healthy steps a hang.

A million heavy-tailed steps on a played clock.

Each simulated run has steps of data wait, forward/backward and optimizer, and now and then a
compilation, an evaluation, a checkpoint and the end of an epoch, whose times are drawn from
distributions with heavy tails. The limits see what a watchdog sees that polls every 0.5 s. Nothing
is real here but the code that learns the limits.

A limit is never below its floor (30 s for the phases of a step), so only times above it try what is
learned: how many there are is counted for each run. The limit of a compilation (that of the first
step) is never learned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.results_file import Result, read_options
from holdfast.recorder.progress import ProcessPhase
from holdfast.supervise.watch.limits import HangLimits, LearnedLimits

_STEPS = 1_000_000
_QUICK_STEPS = 50_000
_POLL_SECONDS = 0.5
_BLOCK = 10_000
_EVERY = {"compile": 5_000, "evaluation": 1_000, "saving": 500, "epoch": 2_500}
_EVALUATION_BATCHES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A kind of run.

    Args:
        draw: Returns so many times of one phase of a step, in seconds.
        rare: Returns so many times of a compilation, checkpoint or pause between epochs.
        wanted: Whether no alarm is promised.
    """

    draw: Callable[[np.random.Generator, int], np.ndarray]
    rare: Callable[[np.random.Generator, int], np.ndarray]
    wanted: bool = True


def lognormal(median: float, sigma: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Return a drawer of lognormal times."""
    return lambda generator, count: generator.lognormal(math.log(median), sigma, count)


def pareto(least: float, exponent: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Return a drawer of Pareto times."""
    return lambda generator, count: least * (1 + generator.pareto(exponent, count))


def drifting(generator: np.random.Generator, count: int) -> np.ndarray:
    """Draw times that are 20 times as long for a stretch now and then, as on a machine that is
    shared.
    """
    times = generator.lognormal(math.log(1.0), 0.5, count)
    start = int(generator.integers(count))
    times[start : start + count // 20] *= 20
    return times


RUNS = {
    "steps of 0.1 s, lognormal (sigma 0.5)": Run(
        draw=lognormal(0.03, 0.5), rare=lognormal(10, 0.8)
    ),
    "steps of 2 s, lognormal (sigma 1.2)": Run(draw=lognormal(0.6, 1.2), rare=lognormal(10, 1.0)),
    "steps of 3 s, lognormal (sigma 1)": Run(draw=lognormal(1.0, 1.0), rare=lognormal(30, 0.8)),
    "steps of 30 s, lognormal (sigma 0.5)": Run(draw=lognormal(10.0, 0.5), rare=lognormal(60, 0.5)),
    "steps of 0.1 s, Pareto (3)": Run(draw=pareto(0.02, 3.0), rare=pareto(5, 3.0)),
    "steps of 0.1 s, Pareto (2)": Run(draw=pareto(0.02, 2.0), rare=pareto(5, 2.5)),
    "steps of 1 s, Pareto (3)": Run(draw=pareto(0.3, 3.0), rare=pareto(10, 3.0)),
    "steps that slow down for a while": Run(draw=drifting, rare=lognormal(10, 0.8)),
    "steps of 0.1 s, Pareto (1.2), no mean to speak of": Run(
        draw=pareto(0.02, 1.2), rare=pareto(5, 2.5), wanted=False
    ),
}


def phases(
    run: Run, steps: int, generator: np.random.Generator
) -> Iterator[tuple[ProcessPhase, float]]:
    """Yield the phases of a run, each with its time, as a board shows them."""
    for first in range(0, steps, _BLOCK):
        count = min(_BLOCK, steps - first)
        times = [run.draw(generator, count).tolist() for _ in range(3)]
        rare = iter(run.rare(generator, count).tolist())
        for step in range(count):
            yield ProcessPhase.DATA_WAIT, times[0][step]
            yield ProcessPhase.FORWARD_BACKWARD, times[1][step]
            yield ProcessPhase.OPTIMIZER, times[2][step]
            yield from _between(run, first + step + 1, rare, generator)


def _between(
    run: Run, step: int, rare: Iterator[float], generator: np.random.Generator
) -> Iterator[tuple[ProcessPhase, float]]:
    if step % _EVERY["compile"] == 0:
        yield ProcessPhase.FIRST_STEP, 4 * next(rare)
    if step % _EVERY["saving"] == 0:
        yield ProcessPhase.SAVING, next(rare)
    if step % _EVERY["evaluation"] == 0:
        for seconds in run.draw(generator, _EVALUATION_BATCHES).tolist():
            yield ProcessPhase.EVALUATION, seconds
    if step % _EVERY["epoch"] == 0:
        yield ProcessPhase.END_OF_EPOCH, 2 * next(rare)


def alarms(run: Run, steps: int, seed: int) -> tuple[int, float, int]:
    """Play a run, and return alarms, how near the nearest time comes to its limit, and times
    above their floor.
    """
    generator = np.random.default_rng(seed)
    learned = LearnedLimits(HangLimits())
    now, polled, count, nearest, above = 0.0, 0.0, 0, 0.0, 0
    floors = {phase: learned.limit(phase) for phase in ProcessPhase}
    for phase, seconds in phases(run, steps, generator):
        began, now = now, now + seconds
        if now < polled + _POLL_SECONDS:
            continue  # over before anybody looked
        last = now - math.fmod(now, _POLL_SECONDS)
        seen = max(0.0, last - began)
        limit = learned.limit(phase)
        nearest = max(nearest, seconds / limit)
        count += seen > limit
        above += seconds > floors[phase]
        learned.add_duration(phase, seen, now)
        polled = last
    return count, nearest, above


def main() -> None:
    """Play all runs and write the result."""
    options = read_options("false_alarms", __doc__)
    steps = _QUICK_STEPS if options.quick else _STEPS
    result = Result(
        options=options, parameters={"steps": steps, "runs": len(RUNS), "every": _EVERY}
    )
    for seed, (name, run) in enumerate(RUNS.items()):
        found, nearest, above = alarms(run, steps, seed)
        result.add_count(f"{name}: alarms", found, steps, expected=0 if run.wanted else None)
        result.samples[f"{name}: longest, as a share of its limit"] = round(nearest, 3)
        result.samples[f"{name}: times above the floor of their limit"] = above
    result.notes.append(
        "an alarm here is a closer look: stacks, CPU time and bytes moved decide whether it becomes"
        " a hang"
    )
    result.write()


if __name__ == "__main__":
    main()
