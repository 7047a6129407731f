"""Programs that end, are stopped or are killed while a checkpoint is written beside their
training.
"""

from __future__ import annotations

import random
import signal
import time

import pytest

from holdfast.checkpoint.store import Store

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("end", "status"), [("return", 0), ("error", 1), ("exit", 3), ("break", 0)]
)
def test_a_program_that_ends_finishes_the_save_that_it_began(start, tmp_path, end, status):
    """However an interpreter ends, without `close`.

    The checkpoint that was under way is there and verifies.
    """
    run = start(program="saving.py", end=end, command=[] if end == "return" else None)
    assert run.process.wait(300) == status
    assert {"saving": True} in run.lines()
    entries = Store(tmp_path / "run" / "checkpoints").entries()
    assert entries[0].global_step >= 4
    for entry in entries:
        entry.verify()
    assert not list((tmp_path / "run" / "checkpoints").glob(".tmp-*"))


def test_sigterm_finishes_the_save_under_way_and_saves_the_last_step(start, tmp_path):
    """A stop that comes in the middle of a write loses neither that checkpoint nor the steps
    since.
    """
    run = start(program="saving.py", end="never", seconds_per_step=0.005, save_interval_steps=4)
    run.wait_for(lambda line: line.get("begun", 0) >= 4)
    run.send(signal.SIGTERM)
    last = run.end()
    assert last["stop_reason"] == "SIGTERM"
    newest, *others = Store(tmp_path / "run" / "checkpoints").entries()
    assert newest.global_step == last["left"]
    assert others[0].global_step >= 4
    newest.verify()


def test_sigkill_at_any_moment_leaves_a_state_that_was_there(start):
    """Killed at random moments of saves beside the training, the run always resumes with the
    weights of a step.
    """
    chance = random.Random(5)
    lines = []
    for _ in range(6):
        run = start(program="saving.py", end="never", save_interval_steps=1)
        target = chance.randint(1, 12)
        run.wait_for(lambda line: line.get("begun", 0) >= run.lines()[0]["start"] + target)  # noqa: B023
        time.sleep(chance.random() * 0.05)
        run.kill()
        lines += run.lines()
    last = start(program="saving.py", end="return", steps=1)
    last.end()
    lines += last.lines()
    known = {line["digest"] for line in lines if "step" in line}
    resumed = [line for line in lines if line.get("start", 0) > 0]
    assert len(resumed) >= 4
    assert all(line["digest"] in known for line in resumed)
