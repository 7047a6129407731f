"""The live view: snapshots at two widths, hostile text, and a loop that ends with the run.

A snapshot that is missing is written, and the test then fails: look at it, and run the test again.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.report.made_runs import (
    BEGAN,
    GONE,
    Clock,
    add_process,
    happened,
    locked,
    make_run,
    own_ticks,
    sample,
    write_events,
    write_samples,
)
from tests.unit.report.test_page import HOSTILE, hostile_run

from holdfast.core.clock import SystemClock
from holdfast.core.events.event import Event
from holdfast.recorder.black_box import BlackBox, StepMark
from holdfast.recorder.progress import ProcessPhase, read_board
from holdfast.recorder.reader import read_steps
from holdfast.recorder.run_files import (
    BOARD_FILE,
    PROCESSES_FOLDER,
    SAMPLES_FILE,
    SUPERVISOR_FOLDER,
    VERDICT_FILE,
)
from holdfast.report.live.view import draw, follow
from holdfast.report.live.watching import Runs, Watched

SNAPSHOTS = Path(__file__).with_name("snapshots")

PACE = ["16 samples/s", "0.5 steps/s"]  # of two ranks


def drawn(watched: Watched, width: int, *, terminal: bool = False) -> str:
    screen = io.StringIO()
    console = Console(
        file=screen,
        width=width,
        height=60,
        force_terminal=terminal,
        color_system="truecolor" if terminal else None,
    )
    console.print(draw(watched.look(), width))
    return screen.getvalue()


def _running(tmp_path: Path) -> tuple[Path, Clock]:
    """Make a run of two ranks of this very process, which is alive, a rank that is gone and a
    worker that ended.
    """
    run = make_run(tmp_path / "train-20260921-141320", ranks=0, verdict=False)
    (run / "supervisor" / "events.ring").unlink()
    write_events(run / "supervisor", happened("attempt_started", 0.5, attempt=0, argv=["python"]))
    memory = {"device_allocated_bytes": 3 << 30}
    samples = [
        sample(step, grad_norm=None if step % 10 else 0.5, device_reserved_bytes=5 << 30, **memory)
        for step in range(1, 1201)
    ]
    samples[-1] = sample(1200, host_bytes=900 << 20, loss=0.0719, grad_norm=0.62, **memory)
    here = {"pid": os.getpid(), "started": BEGAN + 1}
    saved = {"checkpoint": "step-600", "size_bytes": 312 << 20, "seconds": 0.8}
    folder = add_process(
        run,
        samples,
        happened("checkpoint_saved", 60, 600, **saved, stall_seconds=0.1),
        phase=ProcessPhase.DATA_WAIT,
        rank=0,
        **here,
    )
    other = folder.with_name(f"0{folder.name}")  # the same process as another rank
    other.mkdir()
    for path in folder.iterdir():
        text = path.read_bytes()
        (other / path.name).write_bytes(text.replace(b'"rank": 0', b'"rank": 1'))
    write_samples(other / SAMPLES_FILE, [*samples[:-1], sample(1200, loss=math.nan)])
    # Of an epoch that is over: not shown
    add_process(run, phase=ProcessPhase.ENDING, role="loader worker", rank=0)
    add_process(run, [sample(3)], phase=ProcessPhase.SAVING, pid=GONE + 1, rank=2)
    standing = read_board(folder / BOARD_FILE)
    return run, Clock(unix=BEGAN + 130.0, monotonic=standing.since_seconds + 12.25)


@pytest.mark.parametrize("width", [80, 120])
def test_the_view_looks_like_its_snapshot(tmp_path, width):
    """Everything that is promised can be read at both widths, to the last character."""
    run, clock = _running(tmp_path)
    picture = drawn(Watched(run, clock), width)
    assert max(map(len, picture.splitlines())) == width
    picture = "\n".join(line.rstrip() for line in picture.splitlines()) + "\n"
    path = SNAPSHOTS / f"watch-{width}.txt"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(picture)
        pytest.fail(f"{path} was written; look at it")
    assert picture == path.read_text()


def test_the_numbers_of_the_view_are_those_of_the_run(tmp_path):
    """Rate, share of waiting, memory and the time in a phase follow from the samples and the
    board.
    """
    run, clock = _running(tmp_path)
    run_now = Watched(run, clock).look()
    trainer = run_now.processes[0]
    assert (trainer.step, trainer.phase, trainer.alive) == (1200, ProcessPhase.DATA_WAIT, True)
    assert trainer.since_seconds == pytest.approx(12.25)
    assert trainer.steps_per_second == pytest.approx(50 / (5.0 + 5.0))  # silent for 5 seconds
    assert trainer.wait_share == pytest.approx(0.2)
    assert trainer.grad_norm == 0.62
    assert trainer.host_bytes == 900 << 20
    assert run_now.processes[1].loss != run_now.processes[1].loss
    # The worker has ended and is forgotten
    assert [process.alive for process in run_now.processes[2:]] == [False]
    assert run_now.state == "running"


def test_hostile_text_neither_colours_nor_moves_anything(tmp_path):
    """No markup is read and no escape sequence of the run reaches the terminal."""
    run = hostile_run(tmp_path)
    write_events(
        run / "supervisor",
        *(happened(f"[bold red]{text}[/]", 50, text=text) for text in HOSTILE[:8]),
    )
    plain = drawn(Watched(run, SystemClock()), 200)
    assert "\x1b" not in plain
    assert "[bold red]" in plain
    own = r"\x1b\[[0-9;]*m"
    coloured = drawn(Watched(run, SystemClock()), 200, terminal=True)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u2028\u202e]", re.sub(own, "", coloured))
    assert "]8;;" not in coloured


def test_the_run_of_a_plain_guard_can_be_watched(tmp_path):
    """Without a supervisor the guard's own marks tell the step and the loss, and its lock
    whether it goes on.
    """
    box = BlackBox(tmp_path / "recorder" / "rank0")
    for step in range(1, 6):
        box.step(StepMark.COMMITTED, step, 8, 1.0 / step, 0.5, 0.25)
    box.close()
    clock = Clock(unix=time.time())
    watched = Watched(tmp_path, clock)
    with locked(tmp_path / "lock"):
        clock.monotonic += 100
        run_now = watched.look()
        assert run_now.state == "running"
        (guard,) = run_now.processes
        assert (guard.role, guard.alive, guard.step, guard.loss) == ("guard", True, 5, 0.2)
        assert "guard rank0" in drawn(watched, 80)
    clock.monotonic += 100
    assert watched.look().state == "ended"


def test_the_run_of_a_guard_that_ended_last_week_has_ended_at_the_first_look(tmp_path):
    """What is new to whoever looks was recorded long ago: the silence counts from then."""
    write_events(tmp_path / "recorder" / "rank0", happened("checkpoint_saved", 60, 600))
    assert Watched(tmp_path, Clock(unix=BEGAN + 60 + 7 * 86_400)).look().state == "ended"
    clock = Clock(unix=BEGAN + 62)
    watched = Watched(tmp_path, clock)
    assert watched.look().state == "running"
    clock.monotonic += 4
    assert watched.look().state == "ended"


def test_a_loss_that_nobody_read_is_an_empty_cell_and_one_that_became_nan_is_not(tmp_path):
    """No value and NaN are told apart, also at the first step."""
    folder = add_process(tmp_path, [sample(step, loss=None) for step in range(1, 4)])
    watched = Watched(tmp_path, Clock())
    assert watched.look().processes[0].loss is None
    assert "nan" not in drawn(watched, 80)
    assert "xxx" not in drawn(watched, 80)
    write_samples(folder / SAMPLES_FILE, [sample(step, loss=math.nan) for step in range(1, 999)])
    watched = Watched(tmp_path, Clock())
    assert math.isnan(watched.look().processes[0].loss)
    assert " nan  xxx" in drawn(watched, 80)


def test_only_the_newest_attempt_is_shown(tmp_path):
    """After a restart the processes of the attempt before are history."""
    add_process(tmp_path, [sample(7)], attempt=0)
    watched = Watched(tmp_path, Clock())
    assert [process.step for process in watched.look().processes] == [7]
    add_process(tmp_path, [sample(8)], attempt=1, pid=GONE + 1, started=BEGAN + 50)
    run_now = watched.look()
    assert (run_now.attempt, [process.step for process in run_now.processes]) == (1, [8])


def test_a_run_on_another_machine_is_not_called_dead(tmp_path):
    """Processes of another host cannot be seen from here, so nothing is said about their life."""
    run = make_run(tmp_path, hostname="elsewhere." + socket.gethostname())
    (run / "supervisor" / "events.ring").unlink()
    clock = Clock()
    watched = Watched(run, clock)
    clock.monotonic = 1e4
    run_now = watched.look()
    assert run_now.processes[0].alive is None
    assert run_now.state == "running"


def test_a_run_that_waits_to_restart_says_so_until_its_supervisor_is_gone(tmp_path):
    """Between two attempts nothing runs, and the run has not ended; with the lock free it has.

    One was made.
    """
    write_events(
        tmp_path / "supervisor", happened("restart", 5, attempt=1, cause="H1604", delay_seconds=60)
    )
    clock = Clock()
    watched = Watched(tmp_path, clock)
    with locked(tmp_path / "supervisor" / "lock"):
        clock.monotonic += 100
        now = watched.look()
        assert (now.state, now.attempt) == ("waits to restart", 0)
    clock.monotonic += 100
    assert watched.look().state == "ended"


@pytest.mark.parametrize("noted", [True, False])
def test_a_run_whose_supervisor_was_killed_has_ended(tmp_path, noted):
    """At the first look.

    The sentinel wrote it down, or there is no process of the supervisor's number any more.
    """
    write_events(tmp_path / "supervisor", happened("attempt_started", 5, attempt=0))
    (tmp_path / "supervisor" / "lock").touch()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    pid = os.getpid() if noted else gone.pid
    (tmp_path / "supervised.json").write_text(json.dumps({"supervisor_pid": pid}))
    if noted:
        assert Watched(tmp_path, Clock()).look().state == "running"
        (tmp_path / "supervisor" / "lost.json").write_text("{}")
    run_now = Watched(tmp_path, Clock()).look()
    assert run_now.state == "ended"
    assert any("supervisor" in problem for problem in run_now.problems)


def test_following_ends_when_the_run_does_and_shows_the_verdict(tmp_path):
    """The loop looks twice a second, and its last picture tells why the run ended."""
    run = make_run(tmp_path, verdict=False)
    add_process(run, [sample(400)], phase=ProcessPhase.OPTIMIZER, pid=os.getpid())
    clock = Clock()
    waits: list[float] = []

    def wait(seconds: float) -> None:
        clock.monotonic += seconds
        waits.append(seconds)
        if len(waits) == 6:  # the process is gone
            process = run / PROCESSES_FOLDER / f"{os.getpid()}-{own_ticks()}" / "process.json"
            process.write_text(process.read_text().replace(f'"ticks": {own_ticks()}', '"ticks": 1'))
            make_run(run)

    screen = io.StringIO()
    run_now = follow(
        Watched(run, clock), Console(file=screen, width=100, height=50, force_terminal=True), wait
    )
    assert waits[:6] == [0.5] * 6
    assert run_now.state == "ended"
    assert "Cause: certain" in screen.getvalue()
    assert (run / VERDICT_FILE).exists()


def test_a_run_whose_supervisor_died_lasted_until_its_newest_record(tmp_path):
    """The supervisor's own events end long before: the duration is that of what was trained."""
    run = make_run(tmp_path / "run", steps=300, verdict=False)
    shutil.rmtree(run / SUPERVISOR_FOLDER)
    write_events(run / SUPERVISOR_FOLDER, happened("attempt_started", 0.5, attempt=0))
    (run / SUPERVISOR_FOLDER / "lost.json").write_text("{}")
    for ring in run.glob("processes/*/events.ring"):
        ring.unlink()
    assert "ended, 1 attempt, after 35 s" in drawn(Watched(run, Clock()), 120)


def loop(**facts: object) -> list[Event]:
    return [
        happened("loop", -BEGAN, 0, by="guard", resume_promise=None, epoch=0, batches=0, **facts),
        happened("epoch_ended", 20.0, 200, epochs=1, steps=200, batches=100, batch_size=32),
    ]


@pytest.mark.parametrize(
    ("facts", "events", "expected"),
    [
        ({"max_epochs": 5}, 2, ["epoch 2 of 5", "step 300 of 1,000", "23 min 20 s left", *PACE]),
        (
            {"max_epochs": 5, "max_steps": 400},
            2,
            ["epoch 2 of 5", "step 300 of 400", "3 min 20 s left", *PACE],
        ),
        (
            {"max_epochs": 5},
            1,
            ["epoch 1 of 5", "step 300 of an unknown total", "samples/s unknown"],
        ),
        (
            {"max_steps": 400},
            1,
            ["epoch 1", "step 300 of 400", "3 min 20 s left", "samples/s unknown"],
        ),
    ],
)
def test_how_far_it_is_comes_from_what_the_guard_recorded(tmp_path, facts, events, expected):
    """Epoch, total, time left (by the clock) and samples a second are shown where an epoch or a
    limit says them.
    """
    box = BlackBox(tmp_path / "recorder" / "rank0")
    for event in loop(**facts)[:events]:
        box.event(event)
    for step in range(1, 301):
        box.step(
            StepMark.COMMITTED,
            global_step=step,
            micro_batch_size=16,
            loss=1.0,
            norm=1.0,
            seconds=0.1,
        )
    box.close()
    shutil.copytree(tmp_path / "recorder" / "rank0", tmp_path / "recorder" / "rank1")
    # For 49 steps
    clock = Clock(unix=read_steps(tmp_path / "recorder" / "rank0")[-50].unix_seconds + 98)
    with locked(tmp_path / "lock"):
        outlook = Watched(tmp_path, clock).look().outlook
    assert [part for part in expected if part not in outlook] == []
    assert ("left" in outlook) == any("left" in part for part in expected)


def test_without_a_guard_what_is_not_known_is_not_guessed(tmp_path):
    """An observed process says its steps and no more."""
    add_process(tmp_path, [sample(5)], phase=ProcessPhase.OPTIMIZER, pid=os.getpid())
    assert "only a Guard records" in drawn(Watched(tmp_path, Clock()), 120)


def test_a_worker_and_a_launcher_run_and_do_not_start_for_ever(tmp_path):
    """What they do is not seen: only that they live, in the table and for machines."""
    for role in ("loader worker", "launcher"):
        add_process(tmp_path / role, phase=ProcessPhase.STARTING, pid=os.getpid(), role=role)
        watched = Watched(tmp_path / role, SystemClock())
        assert [each["phase"] for each in watched.look().as_json()["processes"]] == [None]
        assert re.search(rf"{role.split()[-1]} \d+ +running", drawn(watched, 80))


def test_several_runs_are_one_line_each(tmp_path):
    """Those that live come first; a key shows another panel and q leaves."""
    make_run(tmp_path / "old")
    add_process(tmp_path / "new", [sample(7)], phase=ProcessPhase.SAVING, pid=os.getpid())
    screen = io.StringIO()
    console = Console(file=screen, width=140, height=50, force_terminal=True)
    seen = follow(Runs(tmp_path, Clock()), console, lambda _: "q")
    assert [(run.path.name, run.state) for run in seen] == [("new", "running"), ("old", "ended")]
    assert screen.getvalue().index("saving") < screen.getvalue().index("shapes")
    keys = iter(["\t", "\t", "q"])
    follow(Watched(tmp_path / "new", Clock()), console, lambda _: next(keys))
    assert "showing training" in screen.getvalue()
