"""Runs that end with status 0 under `holdfast run`: only those that learned are called well."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.forked_attempts import run_supervised

from holdfast.explain.signatures import WELL
from holdfast.report.verdicts import tone, verdict_from

pytestmark = pytest.mark.slow
PROGRAMS = Path(__file__).parent / "programs" / "endings"
_TIMEOUT_SECONDS = 300.0


def verdict_on(run: Path, name: str, *arguments: str) -> dict[str, Any]:
    """Return the verdict on a program of this folder that ended with status 0."""
    options = ["--run-dir", run, "--restart-delay", "0"]
    command = [sys.executable, PROGRAMS / name, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = run_supervised([*options, "--", *command], env=environment, timeout=_TIMEOUT_SECONDS)
    assert ended.returncode == 0, ended.stderr
    verdict: dict[str, Any] = json.loads((run / "verdict.json").read_text())
    return verdict


@pytest.mark.parametrize(
    ("program", "cause", "colour"),
    [
        ("learns.py", "H1601", "well"),
        ("learning_rate_too_low.py", "H1625", "unknown"),
        ("learning_rate_too_high.py", "H1617", "failed"),
        ("explodes_and_comes_back.py", "H1625", "unknown"),
        ("slow_loader.py", "H1627", "unknown"),
        ("gan.py", "H1626", "unjudged"),
        ("bandit.py", "H1626", "unjudged"),
        ("evaluates.py", "H1626", "unjudged"),
        ("prepares_data.py", "H1626", "unjudged"),
    ],
)
def test_status_0_alone_does_not_make_a_run_well(tmp_path, program, cause, colour):
    """Green needs a loss that fell.

    What did not learn is named, and what cannot be judged is not praised.
    """
    verdict = verdict_on(tmp_path / "run", program)
    assert (verdict["cause"], tone(verdict_from(verdict))) == (cause, colour)
    assert (verdict["fix"] == WELL.fix) == (colour == "well")


def test_a_leak_that_no_look_saw_in_time_is_found_afterwards(tmp_path):
    """The verdict names the growth of memory, or what holds it where the run lasted long enough
    for a trace.
    """
    verdict = verdict_on(tmp_path / "run", "leaks.py")
    assert verdict["cause"] in ("H1501", "H1510", "H1511")
    assert tone(verdict_from(verdict)) == "unknown"


def test_an_attempt_that_resumes_is_judged_from_where_the_first_began(tmp_path):
    """Its own losses are flat, since what there was to learn was learned before the kill."""
    verdict = verdict_on(tmp_path / "run", "resumes.py", str(tmp_path / "checkpoint.pt"))
    assert verdict["cause"] == "H1601", verdict["summary"]
