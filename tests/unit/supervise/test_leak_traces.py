"""Runs the tests of traces in a process of their own.

A trace looks at every object and at every file of the script, which here would be those of
thousands of other tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.prepared import run_prepared


@pytest.mark.slow
def test_traces() -> None:
    """All tests of ``leak_traces.py`` pass."""
    tests = Path(__file__).with_name("leak_traces.py")
    ended = run_prepared(
        ["-m", "pytest", "-m", "", "-q", "-p", "no:cacheprovider", tests], timeout=600
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
