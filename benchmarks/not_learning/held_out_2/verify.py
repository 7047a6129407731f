"""Shows that the healthy programs learn, and that each faulty one does worse than itself with the fault mended.

``python -m benchmarks.not_learning.held_out_2.verify [name ...]``. No rule runs here: the watch is a stand-in.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import time
import types
from collections.abc import Callable

from benchmarks.not_learning.held_out.verify import CLEARLY_WORSE, LEARNT, SEEDS, unwatched
from benchmarks.not_learning.held_out_2 import faulty, healthy
from benchmarks.not_learning.held_out_2.fixes import FIXES
from benchmarks.not_learning.program import Program


def mended(program: Program) -> Callable[..., float]:
    """Return the train function of a faulty program with its fault mended, as `FIXES` says.

    A piece is sought in the function first, and in the rest of its module if it is not there.
    """
    source = inspect.getsource(importlib.import_module(program.train.__module__))
    body = inspect.getsource(program.train)
    for old, new in FIXES[program.name]:
        within = body if old in body else source
        if within.count(old) != 1:
            raise ValueError(f"{program.name}: {within.count(old)} places hold {old!r}, not one")
        replaced = within.replace(old, new)
        source = source.replace(within, replaced)
        body = replaced if within is body else body
    module = types.ModuleType(program.train.__module__)
    exec(compile(source, program.train.__module__, "exec"), module.__dict__)
    train: Callable[..., float] = getattr(module, program.name)
    return train


def hold(program: Program) -> tuple[bool, str]:
    """Return whether a program is what it says it is, and a line about it."""
    start = time.process_time()
    scores = [float(program.train(unwatched, seed)) for seed in SEEDS]  # type: ignore[func-returns-value, arg-type]
    seconds = (time.process_time() - start) / len(SEEDS)
    line = f"{program.name:40} {seconds:5.1f} s  " + " ".join(f"{score:8.3g}" for score in scores)
    if program.healthy:
        return max(scores) < LEARNT, line
    twin = [mended(program)(unwatched, seed) for seed in SEEDS]
    line += "   mended " + " ".join(f"{score:8.3g}" for score in twin)
    # A comparison that NaN fails: a score that is not a number is as bad as can be.
    worse = not any(bad < max(CLEARLY_WORSE * good, good + 0.1) for bad, good in zip(scores, twin, strict=True))
    return worse and max(twin) < LEARNT, line


def main() -> None:
    """Print the scores of all programs, or of those named on the command line, and say which do not hold."""
    doubtful = []
    for program in [*healthy.PROGRAMS, *faulty.PROGRAMS]:
        module = program.train.__module__
        if sys.argv[1:] and not any(part in f"{module} {program.name}" for part in sys.argv[1:]):
            continue
        holds, line = hold(program)
        doubtful += [] if holds else [program.name]
        print(line, "" if holds else "  <-- does not hold", flush=True)
    print("do not hold:", doubtful)


if __name__ == "__main__":
    main()
