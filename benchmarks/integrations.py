"""Training through the frameworks that people use, with and without holdfast.

Cost, equality, and what faults do.

Cost: in each round the same training is made alone and with the full integration, in random order
in one process, and the median CPU time of a step is taken of each, over the steps after the 35th.
glibc's thresholds are those of a guard for all of them. To reach: 1.03 of the framework alone.

Equality: undisturbed, the weights at the end are those of the framework alone, bit for bit.

Faults: each life is a process of its own; one that dies or is stopped is started again as its
framework resumes, three lives at most, as a supervisor would. The result is compared with the
undisturbed run; after a NaN with a run without the batches of that step. Steps are lost if they had
to be made again. To reach with the full integration: every training ends, with the weights of the
undisturbed one, bit for bit (up to rounding where batches were cut).

    python -m benchmarks.integrations [--quick]
"""

from __future__ import annotations

import importlib
import itertools
import math
import random
import re
import statistics
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.forks import Counter, in_a_fork, single_threaded
from benchmarks.integrations_job import FAULTS, STEPS, WARM_STEPS, Fault, Framework, How, Life
from benchmarks.results_file import Result, read_options
from holdfast.core.policy.policy import Policy
from holdfast.memory.host_memory import set_malloc_threshold
from holdfast.testing import flip_bit

MODULES = ("integrations_transformers", "integrations_accelerate", "integrations_lightning")
_LIVES = 3
_ROUNDING = 1e-5


def frameworks(result: Result) -> list[Framework]:
    found = []
    for name in MODULES:
        try:
            found.append(importlib.import_module(f"benchmarks.{name}").FRAMEWORK)
        except ImportError as error:
            result.notes.append(f"{name} is left out: {error}")
            print(result.notes[-1], flush=True)
    return found


def run(framework: Framework, life: Life) -> tuple[list[float] | None, int, str]:
    """Carry out a training in at most three lives.

    Return its weights or None, its lives, and what ended it.
    """
    for number in range(1, _LIVES + 1):
        fate = in_a_fork(partial(framework.live, replace(life, first=number == 1)), 300)
        if fate.value is not None:
            return fate.value, number, "its end"
        if number == 1 and life.fault == "flipped bit":
            path = framework.newest(life.folder, life.how)
            # In the exponent of a weight
            flip_bit(path, 8 * (path.stat().st_size // 8 * 4 + 3) + 6)
    return None, _LIVES, fate.error or fate.how


def compared(found: list[float] | None, expected: list[float]) -> str:
    if found is None:
        return "no result"
    mine, theirs = (
        torch.tensor(found, dtype=torch.float64),
        torch.tensor(expected, dtype=torch.float64),
    )
    if torch.equal(mine, theirs):
        return "bit-identical"
    off = float((mine - theirs).norm() / theirs.norm())
    return (
        "NaN"
        if math.isnan(off)
        else "equal up to rounding"
        if off < _ROUNDING
        else f"differs by {off:.2g}"
    )


def measure_faults(
    framework: Framework, result: Result, faults: tuple[Fault, ...]
) -> list[dict[str, Any]]:
    """Return a row for each fault and each way to meet it."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:

        def live(how: How, fault: Fault, **settings: Any) -> tuple[Any, ...]:
            life = Life(
                folder=Path(name, f"{len(rows)}-{random.random()}"),
                fault=fault,
                how=how,
                made=Counter(),
                **settings,
            )
            return (*run(framework, life), life.made.get())

        references = {dropout: live("alone", "none", dropout=dropout)[0] for dropout in (0.0, 0.1)}
        references[-1.0] = live("alone", "none", without=True)[0]
        undisturbed = [how for how in framework.hows if "auto" not in how and how != "alone"]
        same = sum(
            compared(live(how, "none")[0], references[0.1]) == "bit-identical"
            for how in undisturbed
        )
        result.add_count(
            f"{framework.name}, undisturbed: bit-identical to the framework alone",
            same,
            len(undisturbed),
            expected=len(undisturbed),
        )
        for fault in faults:
            for how in framework.hows:
                if "auto" in how and fault != "memory":
                    continue
                dropout = 0.0 if fault == "memory" else 0.1
                weights, lives, why, made = live(how, fault, dropout=dropout)
                outcome = compared(weights, references[-1.0 if fault == "nan" else dropout])
                lost = max(0, made - STEPS)
                # No paths of a temporary folder
                ended_by = re.sub(r"'?/[^\s']*/([^/\s']+)'?", r"\1", why)
                facts = {
                    "framework": framework.name,
                    "fault": fault,
                    "how": how,
                    "lives": lives,
                    "result": outcome,
                }
                ended = {
                    "survived": weights is not None,
                    "lost_steps": None if weights is None else lost,
                }
                rows.append({**facts, **ended, "ended_by": ended_by})
                print(facts, lost, why, flush=True)
    return rows


def measure_cost(framework: Framework, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the median CPU seconds of a step, by way and round."""
    threshold = Policy().cpu_malloc_threshold_bytes
    assert threshold is not None
    set_malloc_threshold(threshold)
    hows = [how for how in framework.hows if "auto" not in how]
    chance, found = random.Random(0), {how: [] for how in hows}
    with tempfile.TemporaryDirectory() as name:
        for number in range(rounds):
            for how in chance.sample(hows, len(hows)):
                times = framework.timed(how, Path(name, f"{number}-{hows.index(how)}"), steps)[
                    WARM_STEPS:
                ]
                found[how].append(
                    statistics.median(after - before for before, after in itertools.pairwise(times))
                )
    return found


def main() -> None:
    single_threaded()
    options = read_options("integrations", __doc__ or "")
    rounds, steps = (1, 40) if options.quick else (6, 60)
    result = Result(
        options=options, parameters={"steps": STEPS, "rounds": rounds, "timed_steps": steps}
    )
    rows: list[dict[str, Any]] = []
    for framework in frameworks(result):
        fate = in_a_fork(partial(measure_cost, framework, rounds, steps), 3000)
        if fate.value is None:
            raise RuntimeError(f"{framework.name}: {fate.error or fate.how}")
        for how in list(fate.value)[1:]:
            ratios = [
                mine / other
                for mine, other in zip(fate.value[how], fate.value["alone"], strict=True)
            ]
            what = f"{framework.name}, {how}: CPU time of a step over that of the framework alone"
            result.add_samples(what, "ratio", ratios, at_most=1.03)
        rows += measure_faults(framework, result, FAULTS[: 2 if options.quick else None])
    good = ("bit-identical", "equal up to rounding")
    for name in dict.fromkeys(row["framework"] for row in rows):
        for how in dict.fromkeys(row["how"] for row in rows if row["framework"] == name):
            mine = [row for row in rows if row["framework"] == name and row["how"] == how]
            target = len(mine) if how == "full" else None
            ended = sum(row["survived"] and row["result"] != "NaN" for row in mine)
            equal = sum(row["result"] in good for row in mine)
            what = f"{name}, {how}: faults after which training ends with finite weights"
            result.add_count(what, ended, len(mine), expected=target)
            what = f"{name}, {how}: of these, with the result of the undisturbed run"
            result.add_count(what, equal, len(mine), expected=target)
            again = [row["lost_steps"] for row in mine if row["lost_steps"] is not None]
            result.samples[f"{name}, {how}: repeated steps"] = again
    result.samples["table"] = rows
    assert all(math.isfinite(figure.value) for figure in result.figures)
    result.write()


if __name__ == "__main__":
    main()
