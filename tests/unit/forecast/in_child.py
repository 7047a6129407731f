"""Runs the cases of a test module in one child process: a registered backend stays so.

A test module names its cases with `case`, ends with ``if __name__ == "__main__": answer()``, and its tests look at
what `results_of` brought back.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.prepared import run_prepared

_ROOT = Path(__file__).parents[3]
_cases: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Name a function without arguments whose result, of JSON's kinds, a test looks at."""
    _cases[function.__name__] = function
    return function


def answer() -> None:
    """Run all cases in this process and print what came of each."""
    results: dict[str, Any] = {}
    for name, function in _cases.items():
        try:
            results[name] = function()
        except Exception:  # noqa: BLE001 - it is the result
            results[name] = {"failed": traceback.format_exc()}
    sys.stdout.write("\n" + json.dumps(results) + "\n")


def results_of(file: str) -> dict[str, Any]:
    """Run a test module's cases in a child process.

    Returns:
        The result of each case by its name; ``{"failed": traceback}`` for one that raised.
    """
    module = ".".join(Path(file).relative_to(_ROOT).with_suffix("").parts)
    done = run_prepared(["-m", module], cwd=_ROOT, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict[str, Any] = json.loads(done.stdout.rstrip().rsplit("\n", 1)[-1])
    return results
