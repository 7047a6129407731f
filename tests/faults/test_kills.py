"""A run that is killed goes on as if nothing had happened.

One that is asked to stop does so cleanly.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from holdfast.recorder.black_box import StepMark
from holdfast.recorder.reader import read_events, read_steps

pytestmark = pytest.mark.slow
_TIMEOUT_SECONDS = 300.0


@pytest.mark.parametrize(("first", "second"), [(0, 0), (2, 2), (2, 0), (0, 3)])
def test_sigkill_at_random_moments_is_bit_exact(start, undisturbed, tmp_path, first, second):
    """Killed twice at random moments, also with another number of workers, the run ends
    bit-identical.

    Half of the cases save beside the training, where a kill may lose a write besides an interval.
    """
    beside = first == second
    chance = random.Random(f"{first} {second}")
    reached = 0
    for workers in (first, second):
        target = min(reached + chance.randrange(3, 12), 29)
        run = start(workers=workers, seconds_per_step=0.01, async_save=beside)
        run.wait_for(lambda line, target=target: line.get("step", 0) >= target)
        time.sleep(chance.random() * 0.02)
        run.kill()
        reached = run.steps()[-1]
    last = start(workers=second)
    end = last.end()
    assert beside or last.lines()[0]["start"] >= reached - 5, "at most one save interval is lost"
    assert end["digest"] == undisturbed["digest"]
    assert end["end"] == 32
    assert [event[0] for event in end["events"]].count("resumed") == 2


def test_a_run_that_decides_its_steps_late_is_killed_at_random_moments(start):
    """Its checkpoints hold only decided steps, so it ends as one that decides each step at once.

    A sample with NaN makes one step of each epoch refused.
    """
    job = {"fused": True, "bad_sample": 21, "save_interval_steps": 3}
    now = {"policy": {"decide": "now", "diagnose": False}, "run_dir": "now"}
    late = {"policy": {"decide": "late", "diagnose": False}, "run_dir": "late"}
    expected = start(**job, **now).end()

    chance = random.Random("late")
    reached = 0
    for _ in range(3):
        run = start(**job, **late, seconds_per_step=0.01)
        target = min(reached + chance.randrange(3, 9), 26)
        run.wait_for(lambda line, target=target: line.get("step", 0) >= target)
        time.sleep(chance.random() * 0.02)
        run.kill()
        reached = run.steps()[-1]
    end = start(**job, **late).end()

    assert end["digest"] == expected["digest"]
    assert end["end"] == expected["end"] == 28
    skipped = [event for event in expected["events"] if event[0] == "skip_step"]
    assert len(skipped) == 4


def test_the_black_box_outlives_the_process(start, tmp_path):
    """After SIGKILL every step that the process finished is in the recording, with the one that
    was under way.
    """
    run = start(seconds_per_step=0.01)
    run.wait_for(lambda line: line.get("step", 0) >= 9)
    run.kill()
    marks = read_steps(tmp_path / "run" / "recorder" / "rank0")
    committed = [record.global_step for record in marks if record.mark == StepMark.COMMITTED]
    assert committed[: len(run.steps())] == run.steps()
    assert len(committed) <= len(run.steps()) + 1
    assert "checkpoint_saved" in {
        event.kind for event in read_events(tmp_path / "run" / "recorder" / "rank0")
    }


def test_sigterm_saves_at_the_next_boundary_and_exits_with_zero(start, undisturbed):
    """SIGTERM ends the loop after the step under way with a checkpoint of it, the script runs to
    its end, exit 0.
    """
    run = start(seconds_per_step=0.1, save_interval_steps=1000)
    run.wait_for(lambda line: line.get("step", 0) >= 7)
    run.send(signal.SIGTERM)
    end = run.end()
    assert end["stop_reason"] == "SIGTERM"
    assert 7 <= end["end"] < 32
    rest = start(save_interval_steps=1000)
    assert rest.end()["digest"] == undisturbed["digest"]
    assert rest.lines()[0]["start"] == end["end"], "nothing was lost"


@pytest.mark.parametrize(
    "place", [{"evaluate_at": 6}, {"slow_sample": 13}, {"slow_sample": 13, "workers": 2}], ids=str
)
def test_sigterm_is_honoured_while_nothing_is_trained(start, undisturbed, place):
    """A stop request ends a long evaluation and a wait for data at once, and loses no step."""
    run = start(save_interval_steps=1000, **place)
    run.wait_for(lambda line: "evaluating" in line or "waiting" in line)
    if place.get("workers"):
        time.sleep(1.0)  # let the trainer use up what the workers have ready
    run.send(signal.SIGTERM)
    run.process.wait(_TIMEOUT_SECONDS)
    assert run.process.returncode == 0
    reached = run.steps()[-1] if run.steps() else 0
    rest = start(save_interval_steps=1000)
    end = rest.end()
    assert rest.lines()[0]["start"] == reached
    assert end["digest"] == undisturbed["digest"]


@pytest.mark.parametrize("slow_read", [1, 3, 8 * 8 + 1, 8 * 8 + 20])
def test_sigterm_in_a_wait_for_torchs_own_loader_is_bit_exact_too(
    start, undisturbed_of_torch, slow_read
):
    """The random numbers of a fetch that was cut off, the first of an epoch too, are drawn again
    after the resume.
    """
    run = start(loader="torch", slow_read=slow_read, save_interval_steps=1000)
    run.wait_for(lambda line: "waiting" in line)
    run.send(signal.SIGTERM)
    assert run.process.wait(_TIMEOUT_SECONDS) == 0
    assert start(loader="torch").end()["digest"] == undisturbed_of_torch["digest"]


def test_sigterm_to_the_whole_process_group_is_a_clean_stop(start, undisturbed):
    """A scheduler signals the loader workers too.

    Their death is no error, and the last step is saved.
    """
    run = start(workers=2, seconds_per_step=0.05, save_interval_steps=1000)
    run.wait_for(lambda line: line.get("step", 0) >= 5)
    os.killpg(run.process.pid, signal.SIGTERM)
    end = run.end()
    assert end["stop_reason"] == "SIGTERM"
    rest = start(workers=2, save_interval_steps=1000)
    assert rest.end()["digest"] == undisturbed["digest"]
    assert rest.lines()[0]["start"] == end["end"]


def test_a_second_sigterm_means_it(start):
    """The first is heard, and says that it waits for the boundary.

    Who asks again gets a process that ends by it.
    """
    run = start(seconds_per_step=600)
    run.wait_for(lambda line: "step" in line)
    run.send(signal.SIGTERM)
    assert run.process.stdout is not None
    late = threading.Timer(_TIMEOUT_SECONDS, run.process.kill)  # where nothing is said
    late.start()
    heard = next((line for line in run.process.stdout if "SIGTERM" in line), None)
    late.cancel()
    assert heard is not None
    assert heard.startswith("holdfast: SIGTERM: ")
    assert "ends the process at once" in heard
    assert run.process.poll() is None, "the first one waits for the boundary"
    run.send(signal.SIGTERM)
    assert run.process.wait(_TIMEOUT_SECONDS) == -signal.SIGTERM


def test_a_second_sigterm_ends_a_step_that_no_python_runs_in(start, undisturbed):
    """A process that stands still in native code, where no handler of Python's runs, ends.

    Its checkpoint counts.
    """
    run = start(stuck_at=13, save_interval_steps=5, async_save=False)
    run.wait_for(lambda line: "waits" in line)
    run.send(signal.SIGTERM)
    run.wait_for(lambda line: "stuck" in line)
    time.sleep(0.5)
    assert run.process.poll() is None
    run.send(signal.SIGTERM)
    assert run.process.wait(_TIMEOUT_SECONDS) == -signal.SIGTERM
    rest = start()
    assert rest.end()["digest"] == undisturbed["digest"]
    assert rest.lines()[0]["start"] == 10


def test_one_sigterm_that_comes_twice_is_one(start, undisturbed):
    """`timeout` signals the process and then its group.

    That is no second request, and the last step is saved.
    """
    run = start(seconds_per_step=0.05, save_interval_steps=1000, one_request_seconds=2.0)
    run.wait_for(lambda line: line.get("step", 0) >= 5)
    run.send(signal.SIGTERM)
    time.sleep(0.01)
    os.killpg(run.process.pid, signal.SIGTERM)
    end = run.end()
    assert end["stop_reason"] == "SIGTERM"
    rest = start(save_interval_steps=1000)
    assert rest.end()["digest"] == undisturbed["digest"]
    assert rest.lines()[0]["start"] == end["end"]


def test_a_live_run_keeps_others_out_and_a_dead_one_does_not(start, tmp_path):
    """The lock names its holder and falls with the process, and so do its workers, also those
    that are stopped.
    """
    run = start(seconds_per_step=0.05, workers=2, slow_sample=13)
    run.wait_for(lambda line: "waiting" in line)
    second = start()
    output, _ = second.process.communicate(timeout=_TIMEOUT_SECONDS)
    assert second.process.returncode != 0
    assert f"process {run.process.pid}" in output
    assert "[H301]" in output
    assert output.count("Traceback") == 1
    run.send(signal.SIGSTOP)
    workers = [
        int(child)
        for child in (
            Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
        )
    ]
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)  # one that hangs does not notice that its parent is gone
    run.kill()
    assert start(epochs=1).end()["end"] == 8
    late = time.monotonic() + _TIMEOUT_SECONDS
    while time.monotonic() < late and any(Path(f"/proc/{worker}").exists() for worker in workers):
        time.sleep(0.01)  # whoever inherits them has yet to collect them
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)


def test_a_kill_during_a_save_never_leaves_an_unusable_directory(start, tmp_path):
    """Killed at random moments while it saves after every step, the run always finds a whole
    checkpoint.
    """
    chance = random.Random(2)
    reached = 0
    for _ in range(8):
        run = start(save_interval_steps=1, width=2048, epochs=1000, async_save=False)
        run.wait_for(lambda line: "step" in line)
        time.sleep(chance.random() * 0.15)
        run.kill()
        begun = run.lines()[0]["start"]
        assert begun >= reached - 1, "only the save under way was lost"
        reached = run.steps()[-1]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["format"] == 1
