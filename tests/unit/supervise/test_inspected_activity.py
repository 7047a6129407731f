"""What a process without recorded progress did between two observations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.explain.evidence import Frame
from holdfast.explain.hangs.blame import diagnose_hang
from holdfast.explain.hangs.process_samples import ExaminedProcess, ProcessSample, ThreadSample
from holdfast.supervise.watch.inspection import Observation, judge_activity

LINE = Frame(file="/home/me/train.py", line=40, function="main")
NEXT_LINE = Frame(file="/home/me/train.py", line=41, function="main")
WORKER_LOOP = Frame(
    file="/usr/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py",
    line=250,
    function="_worker_loop",
)


def process(
    *stacks: tuple[Frame, ...], waits: str = "futex", cpu_share: float = 0.0, **facts: object
) -> ExaminedProcess:
    """Return a judged process with one sample per stack, a second apart."""
    samples = tuple(
        ProcessSample(
            seconds=float(second),
            cpu_seconds=cpu_share * second,
            threads=(ThreadSample(tid=1, is_main=True, frames=stack, waits=waits),),
        )
        for second, stack in enumerate(stacks)
    )
    return ExaminedProcess(**{"pid": 1, "judged": True, "samples": samples, **facts})


def observation(*processes: ExaminedProcess) -> Observation:
    return Observation(
        processes=processes,
        judged=[process for process in processes if process.judged],
        diagnosis=diagnose_hang(processes, processes[0].pid),
        transferred=False,
        worked=False,
    )


BLOCKED = observation(process((LINE,), (LINE,)))


def test_a_process_whose_stack_stays_did_nothing() -> None:
    """A thread that waits for a lock at the same line has no activity of any kind."""
    assert judge_activity(BLOCKED) == "none"


@pytest.mark.parametrize("field", ["transferred", "worked"])
def test_a_training_thread_that_did_something_was_working(field: str) -> None:
    """A loop that mostly waits may show the same stack twice although it makes progress."""
    assert judge_activity(replace(BLOCKED, **{field: True})) == "working"


def test_a_stack_that_changes_shows_work() -> None:
    """Another line of the script was reached between the two observations."""
    assert judge_activity(observation(process((LINE,), (NEXT_LINE,)))) == "working"


LOOPING = observation(process((LINE,), (LINE,), waits="running", cpu_share=1.0, native=()))


def test_a_loop_at_one_place_is_not_called_work() -> None:
    """An endless loop and a long computation look the same in two observations."""
    assert LOOPING.diagnosis.kind == "Python loop"
    assert judge_activity(LOOPING) == "computing"


def test_data_that_moved_shows_work_even_in_a_loop() -> None:
    """What was certainly done comes before what two stacks can only suggest."""
    assert judge_activity(replace(LOOPING, transferred=True)) == "working"


def test_a_process_without_a_cpu_is_not_called_idle() -> None:
    """It was ready to run all the time, so its constant stack says nothing."""
    starved = observation(process((LINE,), (LINE,), waits="running"))

    assert judge_activity(starved) == "starved"


def test_a_loader_worker_that_reads_shows_work() -> None:
    """The trainer waits, but its next batch is being made."""
    trainer = process((LINE,), (LINE,))
    first, second = process((WORKER_LOOP,), (WORKER_LOOP,)).samples
    reading = ExaminedProcess(pid=2, ppid=1, samples=(first, replace(second, io_bytes=10)))

    assert judge_activity(observation(trainer, reading)) == "working"
