"""The demo's processes are followed; what ends too soon or stands still is an error."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast.chaos import demo_run
from holdfast.chaos.demo_run import DemoRun

_TRAINS = """
import json, sys, time
with open(sys.argv[1], "w", buffering=1) as trace:
    for step in range(int(sys.argv[2])):
        time.sleep(0.1)
        trace.write(json.dumps({"step": step, "digest": ""}) + "\\n")
    time.sleep(float(sys.argv[3]))
    trace.write(json.dumps({"accuracy": 0.5}) + "\\n")
"""


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Return a run, and what starts a process of it that makes some steps, stands still and ends."""
    monkeypatch.setattr(demo_run, "_STANDSTILL_SECONDS", 1.5)
    run = DemoRun(run_dir=tmp_path, trace=tmp_path / "trace", weights=None, output=tmp_path / "output")

    def start(steps, seconds):
        return subprocess.Popen([sys.executable, "-c", _TRAINS, str(run.trace), str(steps), str(seconds)])

    return run, start


@pytest.mark.slow
def test_a_training_may_take_as_long_as_it_likes_but_not_stand_still(started):
    """A slow machine is no broken promise of the demo; a process that makes no step is killed."""
    run, start = started
    run.finish(start(20, 0))
    assert (run.accuracy, len(run.digests)) == (0.5, 20)
    run.trace.unlink()
    run.digests.clear()
    stuck = start(1, 600)
    with pytest.raises(TimeoutError, match=r"no step for 1\.5 s"):
        run.wait_for_step(stuck, 2)
    assert stuck.returncode < 0


def test_a_training_that_ends_too_soon_is_an_error(started):
    """Neither a step that never came nor an end without a result is taken for one."""
    run, start = started
    with pytest.raises(RuntimeError, match="did not reach step 5"):
        run.wait_for_step(start(2, 0), 5)
    run.trace.unlink()
    run.accuracy = None
    run.output.write_text("mistaken")
    with pytest.raises(RuntimeError, match="exit code 3: mistaken"):
        run.finish(subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]))
