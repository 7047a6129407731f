"""A limit of address space (``ulimit -v``) ends a run by name, wherever memory runs out, and
nothing is lost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "under_a_limit.py"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fresh", "resume"])
def test_memory_that_runs_out_anywhere_is_named_and_the_run_can_be_continued(tmp_path, mode):
    """Under 5 limits, from no room to enough, each run finishes or is H401 or H402, and resumes
    to its end.
    """
    ended = subprocess.run(
        [sys.executable, PROGRAM, tmp_path, mode],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=580,
        check=True,
    )

    outcomes = [json.loads(line) for line in ended.stdout.splitlines()]

    assert len(outcomes) == 5
    named = {"finished", "OutOfMemoryError H401", "OutOfMemoryError H402"}
    assert {how for _, how, _ in outcomes} <= named
    assert {how for _, how, _ in outcomes} >= {"finished", "OutOfMemoryError H401"}
    assert {reached for _, _, reached in outcomes} == {"8"}
