"""Each signal that asks a run to stop.

It saves, ends as its policy says, and goes on as if nothing had happened.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from holdfast.explain.collecting import collect
from holdfast.explain.judging import judge
from holdfast.supervise.process_tree import read_process

pytestmark = pytest.mark.slow

INTERRUPTED = -signal.SIGINT  # an uncaught KeyboardInterrupt
ALL = ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")
SOON = {"seconds_per_step": 0.1, "save_interval_steps": 1000}
_TIMEOUT_SECONDS = 300.0


def wait_for_message(run, name):
    """Return once the process has said that it heard a signal: the next one is another request."""
    late = threading.Timer(_TIMEOUT_SECONDS, run.process.kill)
    late.start()
    line = next((line for line in run.process.stdout if name in line), "nothing")
    late.cancel()
    assert "ends the process at once" in line


@pytest.mark.parametrize("name", ALL)
def test_a_signal_saves_and_stops_at_the_next_boundary(start, undisturbed, name):
    """The step under way is saved, only Ctrl-C ends the script there, and the resumed run is
    bit-identical.
    """
    run = start(**SOON)
    run.wait_for(lambda line: line.get("step", 0) >= 7)
    run.send(getattr(signal, name))
    assert run.process.wait(_TIMEOUT_SECONDS) == (INTERRUPTED if name == "SIGINT" else 0)
    if name != "SIGINT":
        assert run.lines()[-1]["stop_reason"] == name
    rest = start(save_interval_steps=1000)
    assert rest.end()["digest"] == undisturbed["digest"]
    assert rest.lines()[0]["start"] == run.steps()[-1]


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGINT"])
@pytest.mark.parametrize(
    "place", [{"evaluate_at": 6}, {"slow_sample": 13}, {"slow_sample": 13, "workers": 2}], ids=str
)
def test_a_signal_is_honoured_while_nothing_is_trained(start, place, name):
    """A long evaluation and a wait for data end at once.

    The exit code set in the policy is that of both signals.
    """
    run = start(save_interval_steps=1000, policy={"stop_exit_code": 85}, **place)
    run.wait_for(lambda line: "evaluating" in line or "waiting" in line)
    run.send(getattr(signal, name))
    assert run.process.wait(_TIMEOUT_SECONDS) == 85
    assert "end" not in run.lines()[-1], "what follows the loop has not run"
    assert start(epochs=1).end()["events"][-1][0] == "closed"


def test_an_evaluation_that_ctrl_c_ends_is_saved_and_interrupted(start):
    """Without an exit code of its own, it ends with KeyboardInterrupt, and the step before it is
    not lost.
    """
    run = start(save_interval_steps=1000, evaluate_at=6)
    run.wait_for(lambda line: "evaluating" in line)
    run.send(signal.SIGINT)
    assert run.process.wait(_TIMEOUT_SECONDS) == INTERRUPTED
    rest = start(epochs=1)
    rest.end()
    assert rest.lines()[0]["start"] == 6


@pytest.mark.parametrize("handled", [["SIGUSR2"], ["SIGTERM", "SIGXCPU", "SIGUSR2"]])
def test_the_signals_are_those_of_the_policy(start, handled):
    """One that is listed stops the run; one that is not does what it does without a guard."""
    run = start(**SOON, policy={"stop_signals": handled})
    run.wait_for(lambda line: "step" in line)
    run.send(signal.SIGUSR2)
    assert run.end()["stop_reason"] == "SIGUSR2"
    other = start(**SOON, policy={"stop_signals": handled}, epochs=1000)
    other.wait_for(lambda line: "step" in line)
    other.send(signal.SIGUSR1)
    assert other.process.wait(_TIMEOUT_SECONDS) == -signal.SIGUSR1


@pytest.mark.parametrize(
    ("first", "second"),
    [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGINT"), ("SIGHUP", "SIGTERM"), ("SIGUSR1", "SIGTERM")],
)
def test_a_second_signal_ends_the_process_at_once(start, tmp_path, first, second):
    """Whichever comes second, it ends a step that lasts, by the kernel.

    The verdict names the first one, although nobody has seen the exit status.
    """
    run = start(seconds_per_step=600)
    run.wait_for(lambda line: "step" in line)
    run.send(getattr(signal, first))
    wait_for_message(run, first)
    assert run.process.poll() is None, "the first one waits for the boundary"
    run.send(getattr(signal, second))
    assert run.process.wait(_TIMEOUT_SECONDS) == -getattr(signal, second)
    verdict = judge(collect(tmp_path / "run"))
    assert verdict.family == "preempted"
    assert (verdict.cause == "H1604") is (first == "SIGINT")


@pytest.mark.parametrize("first", ["SIGUSR1", "SIGTERM"])
def test_a_warning_after_the_first_signal_neither_ends_the_step_nor_the_exit(start, first):
    """A launcher may forward SIGUSR1 long after the process has received it, until it is gone."""
    run = start(seconds_per_step=1.0, save_interval_steps=1000)
    run.wait_for(lambda line: line.get("step", 0) >= 2)

    run.send(getattr(signal, first))
    wait_for_message(run, first)
    while run.process.poll() is None:
        run.send(signal.SIGUSR1)
        time.sleep(0.01)

    assert run.process.returncode == 0
    assert run.end()["stop_reason"] == first


def test_signals_that_come_together_are_one_request(start):
    """A service manager sends SIGHUP right after SIGTERM, Slurm some signals twice.

    The step under way is saved.
    """
    run = start(seconds_per_step=0.3, save_interval_steps=1000, one_request_seconds=2.0)
    run.wait_for(lambda line: line.get("step", 0) >= 2)
    for name in ("SIGTERM", "SIGHUP", "SIGTERM", "SIGUSR1"):
        run.send(getattr(signal, name))
    end = run.end()
    rest = start(epochs=1)
    rest.end()
    assert rest.lines()[0]["start"] == end["end"]


def test_with_stderr_closed_no_other_file_is_written_to(start, undisturbed):
    """The lock or a ring would otherwise get its descriptor, and then the announcement."""
    run = start(**SOON, command=["sh", "-c", 'exec "$@" 2>&-', "sh"])
    run.wait_for(lambda line: line.get("step", 0) >= 7)
    run.send(signal.SIGTERM)

    assert run.end()["stop_reason"] == "SIGTERM"
    rest = start(save_interval_steps=1000)
    assert rest.end()["digest"] == undisturbed["digest"]
    assert rest.lines()[0]["start"] == run.steps()[-1]


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT"])
def test_what_is_ignored_when_the_guard_is_made_stays_ignored(start, name):
    """`nohup` ignores the hang-up of a terminal, a shell Ctrl-C for jobs in the background.

    Training goes on.
    """
    run = start(**SOON, ignored=[name])
    run.wait_for(lambda line: line.get("step", 0) >= 3)
    run.send(getattr(signal, name))
    assert run.end()["stop_reason"] is None
    assert run.steps()[-1] == 32


@pytest.mark.parametrize(
    ("name", "loader", "context"),
    [
        ("SIGUSR1", "holdfast", "spawn"),
        ("SIGINT", "holdfast", "fork"),
        ("SIGUSR1", "torch", "fork"),
        ("SIGHUP", "torch", "fork"),
    ],
)
def test_a_signal_to_all_processes_loses_no_worker(start, tmp_path, name, loader, context):
    """Schedulers and terminals signal the loader workers too.

    None is lost or replaced, the last step is saved.
    """
    ends_long_step = tmp_path / "ends_long_step"
    run = start(
        command=[],
        loader=loader,
        workers=2,
        context=context,
        long_step=3,
        ends_long_step=str(ends_long_step),
        save_interval_steps=1000,
        policy={"stop_exit_code": 3},
    )
    run.wait_for(lambda line: line.get("step", 0) >= 3)
    workers = workers_of(run.process.pid)
    os.killpg(run.process.pid, getattr(signal, name))
    wait_for_message(run, name)
    # A worker that the signal kills is gone by now, while the step is still running.
    time.sleep(0.25)
    workers_after_signal = workers_of(run.process.pid)

    ends_long_step.touch()
    assert run.process.wait(_TIMEOUT_SECONDS) == 3
    assert len(workers) == 2
    assert workers_after_signal == workers
    rest = start(loader=loader, epochs=1)
    end = rest.end()
    assert rest.lines()[0]["start"] == run.steps()[-1]
    assert "loader_healed" not in {event[0] for event in end["events"]}


def workers_of(pid: int) -> list[int]:
    """Return the children of a process that live, without the one that Python has beside those
    that it spawns.
    """
    children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    alive = [child for child in children if read_process(child).state != "Z"]
    return [
        child
        for child in alive
        if "resource_tracker" not in Path(f"/proc/{child}/cmdline").read_text()
    ]
