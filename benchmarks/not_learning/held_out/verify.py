"""Shows that the healthy programs learn, and that each faulty one does worse than itself with the fault mended.

``python -m benchmarks.not_learning.held_out.verify [name ...]``. No rule runs here: the watch is a stand-in.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import benchmarks  # noqa: F401 - one thread
from benchmarks.not_learning.held_out.fixes import FIXES
from benchmarks.not_learning.program import Program

SEEDS = (0, 1)
LEARNT = 0.8
"""A healthy program scores below this; the trivial answer scores 1."""
CLEARLY_WORSE = 1.5
"""A faulty program scores at least this many times what it scores with the fault mended, and at least 0.1 more."""


class _Unwatched:
    def findings(self) -> list[Any]:
        return []

    def validated(self, loss: float) -> None:
        float(loss)


@contextmanager
def unwatched(*_: Any, **__: Any) -> Iterator[_Unwatched]:
    """Stand in for `watch`: see nothing, find nothing."""
    yield _Unwatched()


def mended(program: Program) -> Callable[..., float]:
    """Return the train function of a faulty program with its fault mended, as `FIXES` says."""
    name = program.train.__module__
    source = inspect.getsource(importlib.import_module(name))
    for old, new in FIXES[program.name]:
        if source.count(old) != 1:
            raise ValueError(f"{program.name}: {source.count(old)} places hold {old!r}, not one")
        source = source.replace(old, new)
    module = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
    return getattr(module, program.name)


def main() -> None:
    """Print the scores of all programs, or of those named on the command line, and say which do not hold."""
    from benchmarks.not_learning.held_out import faulty, healthy

    doubtful = []
    for program in [*healthy.PROGRAMS, *faulty.PROGRAMS]:
        if sys.argv[1:] and not any(part in program.name for part in sys.argv[1:]):
            continue
        start = time.process_time()
        scores = [float(program.train(unwatched, seed)) for seed in SEEDS]
        seconds = (time.process_time() - start) / len(SEEDS)
        line = f"{program.name:40} {seconds:5.1f} s  " + " ".join(f"{score:8.3g}" for score in scores)
        if program.healthy:
            holds = max(scores) < LEARNT
        else:
            twin = [mended(program)(unwatched, seed) for seed in SEEDS]
            line += "   mended " + " ".join(f"{score:8.3g}" for score in twin)
            # A comparison that NaN fails: a score that is not a number is as bad as can be.
            holds = not any(
                bad < max(CLEARLY_WORSE * good, good + 0.1) for bad, good in zip(scores, twin, strict=True)
            )
            holds = holds and max(twin) < LEARNT
        doubtful += [] if holds else [program.name]
        print(line, "" if holds else "  <-- does not hold", flush=True)
    print("do not hold:", doubtful)


if __name__ == "__main__":
    main()
