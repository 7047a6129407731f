"""Runs the tests of traces in a process of their own.

A trace looks at every object and at every file of the script, which here would be those of thousands of other tests.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_traces() -> None:
    """All tests of ``leak_traces.py`` pass."""
    tests = Path(__file__).with_name("leak_traces.py")
    program = [sys.executable, "-m", "pytest", "-m", "", "-q", "-p", "no:cacheprovider", str(tests)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
