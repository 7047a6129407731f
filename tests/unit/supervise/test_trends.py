"""What is told of a run's memory: once, when it is sure, and again when the end comes near."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

from holdfast.core.events.event import Event
from holdfast.recorder.black_box import BlackBox
from holdfast.recorder.progress import ProgressBoard, SampleRing, StepSample
from holdfast.recorder.run_files import BOARD_FILE, SAMPLES_FILE, ProcessInfo, write_process
from holdfast.supervise.leaks.trends import MemoryTrends
from holdfast.testing import FakeClock

_MIB = 2**20


class _Run:
    """A run with one trainer whose memory is as a test says."""

    def __init__(self, run: Path) -> None:
        self.folder = write_process(
            run, ProcessInfo(pid=os.getpid(), ticks=1, ppid=1, argv=[], role="trainer")
        )
        self.board = ProgressBoard(self.folder / BOARD_FILE)
        self.ring = SampleRing(self.folder / SAMPLES_FILE)
        self.steps = 0
        self.told: list[Any] = []
        self.left = 4000 * _MIB
        clock = FakeClock()
        self.said: list[str] = []
        self.trends = MemoryTrends(
            run,
            emit=self.told.append,
            clock=clock.unix_seconds,
            available_bytes=lambda: self.left,
            say=self.said.append,
        )

    def train(self, steps: int, *, host_bytes: int, grows_bytes: int) -> None:
        for number in range(steps):
            self.steps += 1
            sample = StepSample(
                step=self.steps,
                micro_steps=1,
                loss=1.0,
                grad_norm=1.0,
                learning_rate=0.1,
                seconds=0.1,
                wait_seconds=0.0,
                host_bytes=host_bytes + number * grows_bytes,
            )
            # Without the time, which the ring sets, and the optimizer.
            self.ring.write(*sample[:-2])
        self.trends.update()


def test_a_leak_is_told_once_and_traced(tmp_path: Path) -> None:
    """Growth is told when it has lasted, with a request to trace, and not again at every look."""
    run = _Run(tmp_path)
    run.train(400, host_bytes=500 * _MIB, grows_bytes=_MIB)
    assert run.told == [], "it could still be a warm-up"
    run.train(200, host_bytes=900 * _MIB, grows_bytes=_MIB)
    assert [trend.what for trend in run.told] == ["host"]
    assert abs(run.told[0].bytes_per_step - _MIB) < 0.05 * _MIB
    assert run.told[0].minutes_left is not None
    assert run.board.trace_requested() == 1
    assert len(run.said) == 1
    assert "1 MiB" in run.said[0]
    assert "about" in run.said[0], "when it is used up"
    run.train(100, host_bytes=1100 * _MIB, grows_bytes=_MIB)
    assert len(run.told) == 1
    run.left //= 1000
    run.train(100, host_bytes=1200 * _MIB, grows_bytes=_MIB)
    assert len(run.told) == 2, "the end has come much nearer"
    assert len(run.said) == 1


def test_growth_that_ends_is_told(tmp_path: Path) -> None:
    """A trend that was told and has come to rest is taken back."""
    run = _Run(tmp_path)
    run.train(400, host_bytes=500 * _MIB, grows_bytes=_MIB)
    run.train(200, host_bytes=900 * _MIB, grows_bytes=_MIB)
    run.train(1500, host_bytes=1100 * _MIB, grows_bytes=0)
    assert [trend.bytes_per_step > 0 for trend in run.told] == [True, False]


def test_a_look_costs_what_is_new_however_long_the_run(tmp_path: Path) -> None:
    """Neither what is kept nor what is read grows with the steps of a run, and a leak that
    begins late is told.
    """
    run = _Run(tmp_path)
    for _ in range(12):
        run.train(3000, host_bytes=500 * _MIB, grows_bytes=0)
    tracemalloc.start()
    run.train(100, host_bytes=500 * _MIB, grows_bytes=0)
    assert tracemalloc.get_traced_memory()[1] < _MIB, "as a whole the ring takes 20 MiB"
    tracemalloc.stop()
    for number in range(12):
        run.train(3000, host_bytes=500 * _MIB + number * 3000 * 8192, grows_bytes=8192)
    assert [(trend.what, abs(trend.bytes_per_step - 8192) < 100) for trend in run.told] == [
        ("host", True)
    ]


def test_healthy_and_damaged_recordings_tell_nothing(tmp_path: Path) -> None:
    """A flat memory, a ring that is cut and a process without samples are passed over."""
    run = _Run(tmp_path)
    run.train(600, host_bytes=500 * _MIB, grows_bytes=0)
    write_process(tmp_path, ProcessInfo(pid=2, ticks=2, ppid=1, argv=[], role="trainer"))
    os.truncate(run.folder / SAMPLES_FILE, 5000)
    run.trends.update()
    assert run.told == []
    assert run.board.trace_requested() == 0


def test_what_holds_the_memory_is_said_once_for_each_place(tmp_path: Path) -> None:
    """A leak that a process has found is read from its events.

    The same one again, of another rank, is not said.
    """
    run = _Run(tmp_path)
    other = write_process(tmp_path, ProcessInfo(pid=2, ticks=2, ppid=1, argv=[], role="trainer"))
    earlier = write_process(
        tmp_path, ProcessInfo(pid=3, ticks=3, ppid=1, argv=[], role="trainer", attempt=7)
    )
    for folder, held in (
        (run.folder, "losses[...]"),
        (other, "losses[...]"),
        (earlier, "old[...]"),
    ):
        box = BlackBox(folder)
        data = {"held_by": held, "retained_at": "leak.py:6 in <module>"}
        box.event(Event(kind="leak", global_step=3, unix_seconds=1.0, data=data))
        box.close()
    run.trends.update()
    run.trends.update()
    (line,) = run.said
    assert "losses[...]" in line
    assert "leak.py:6" in line
    assert "<module>" not in line
