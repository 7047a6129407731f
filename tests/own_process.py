"""Calls a function in a process of its own, for tests that count what lives in a process.

Objects that other tests have left would be counted with it, and threads of theirs go on making
some.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.prepared import run_prepared

_ROOT = Path(__file__).parents[1]
_TIMEOUT_SECONDS = 580.0


def in_own_process(function: Callable[..., Any], *given: Any) -> Any:
    """Return what a function of a module returns, or raise what it raises, called where no other
    test has been.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "asked"), Path(folder, "answered")
        asked.write_bytes(pickle.dumps((function, given)))
        ended = run_prepared(
            ["-m", "tests.own_process", asked, answered], cwd=_ROOT, timeout=_TIMEOUT_SECONDS
        )
        assert ended.returncode == 0, ended.stderr
        error, result = pickle.loads(answered.read_bytes())
    if error is not None:
        raise error
    return result


def _answer(asked: Path, answered: Path) -> None:
    function, given = pickle.loads(asked.read_bytes())
    error = result = None
    try:
        result = function(*given)
    except Exception as raised:  # noqa: BLE001 - it is the answer
        error = raised
        raised.add_note(traceback.format_exc())
    answered.write_bytes(pickle.dumps((error, result)))


if __name__ == "__main__":
    _answer(*map(Path, sys.argv[1:]))
