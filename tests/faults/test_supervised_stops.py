"""`holdfast run` over a training that is told to stop.

It knows so from the run, whatever exit code comes of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.store import Store
from holdfast.recorder.reader import read_events
from holdfast.supervise.process_tree import descendants, marked_processes, read_process, read_table

pytestmark = pytest.mark.slow
PROGRAMS = Path(__file__).parent / "programs"
CLI = [sys.executable, "-c", "from holdfast.cli.main import main; main()", "run"]
STOPPED = "H1623"
_TIMEOUT_SECONDS = 120.0


class Supervised:
    """One `holdfast run` of a command, in a session of its own, with signals as they usually
    are.
    """

    def __init__(self, folder: Path, *command: str) -> None:
        self.folder = folder

        def as_usual() -> None:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)

        arguments = [*CLI, "--run-dir", str(folder), "--restart-delay", "0.1", "--", *command]
        with (folder.parent / "stderr.txt").open("wb") as stderr:
            self.process = subprocess.Popen(
                arguments,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
                preexec_fn=as_usual,
            )

    def wait_for(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while not condition():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.01)

    def wait_for_text(self, text: str) -> None:
        self.wait_for(lambda: text in self.output())

    def output(self) -> str:
        log = self.folder / "output.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def signal_all(self, number: int) -> None:
        """Signal every process, as Slurm does for a step."""
        for pid in [self.process.pid, *descendants(read_table(), [self.process.pid])]:
            os.kill(pid, number)

    def end(self) -> int:
        return self.process.wait(_TIMEOUT_SECONDS)

    def verdict(self) -> dict[str, Any]:
        return json.loads((self.folder / "verdict.json").read_text())

    def attempts(self) -> int:
        return len(
            [
                event
                for event in read_events(self.folder / "supervisor")
                if event.kind == "attempt_started"
            ]
        )


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., Supervised]]:
    runs = []

    def start(*command: str) -> Supervised:
        runs.append(Supervised(tmp_path / "run", *command))
        return runs[-1]

    yield start
    for run in runs:
        found = read_process(run.process.pid)
        run.process.kill()
        run.process.wait()
        if found is not None:
            for pid in marked_processes(f"{found.pid}-{found.ticks}", []):
                os.kill(pid, signal.SIGKILL)


def training(tmp_path: Path, **request: Any) -> list[str]:
    """Return the command of a guarded training of many steps.

    Its first one prints nothing but to its trace.
    """
    full = {"run_dir": str(tmp_path / "guarded"), "trace": str(tmp_path / "trace"), "epochs": 1000}
    return [
        sys.executable,
        str(PROGRAMS / "train.py"),
        json.dumps({**full, "seconds_per_step": 0.02, **request}),
    ]


def steps_of(tmp_path: Path) -> list[int]:
    trace = tmp_path / "trace"
    lines = trace.read_text().splitlines() if trace.exists() else []
    return [json.loads(line)["step"] for line in lines if '"step"' in line]


def saved_step(tmp_path: Path) -> int:
    return Store(tmp_path / "guarded" / "checkpoints").entries()[0].global_step


@pytest.mark.parametrize(
    ("name", "policy", "status"),
    [
        ("SIGUSR1", {"stop_exit_code": 85}, 85),
        ("SIGUSR1", {}, 0),
        ("SIGINT", {}, 130),
        ("SIGHUP", {"stop_exit_code": 1}, 1),
        ("SIGTERM", {"stop_exit_code": 0}, 0),
    ],
)
def test_a_stop_is_no_failure_whatever_its_exit_code(supervise, tmp_path, name, policy, status):
    """The signal is passed on, the last step saved, the run not started again, and the verdict
    says why it ended.
    """
    run = supervise(*training(tmp_path, policy=policy, save_interval_steps=1000))
    run.wait_for(lambda: len(steps_of(tmp_path)) > 3)
    run.process.send_signal(getattr(signal, name))
    assert run.end() == status
    assert (run.verdict()["cause"], run.verdict()["title"]) == (STOPPED, "stopped on request")
    assert run.attempts() == 1
    assert saved_step(tmp_path) == steps_of(tmp_path)[-1]


def test_a_stop_that_reaches_the_training_alone_is_known_too(supervise, tmp_path):
    """`scancel --signal` or a person may signal the training itself.

    The supervisor learns it from the run.
    """
    run = supervise(*training(tmp_path, policy={"stop_exit_code": 85}))
    run.wait_for(lambda: len(steps_of(tmp_path)) > 3)
    (child,) = [
        pid
        for pid in descendants(read_table(), [run.process.pid])
        if "train.py" in command_line(pid)
    ]
    os.kill(child, signal.SIGUSR1)
    assert run.end() == 85
    assert run.verdict()["cause"] == STOPPED
    assert run.attempts() == 1


def test_a_failure_after_a_stop_is_said_and_not_tried_again(supervise, tmp_path):
    """What raises after the loop is the verdict.

    A run that was told to stop is not started again all the same.
    """
    run = supervise(*training(tmp_path, fails_after_loop=True))
    run.wait_for(lambda: len(steps_of(tmp_path)) > 3)
    run.process.send_signal(signal.SIGUSR1)
    assert run.end() == 1
    assert run.verdict()["cause"] == "H1608"
    assert run.attempts() == 1


def test_a_training_below_a_shell_that_dies_of_the_signal_saves(supervise, tmp_path):
    """A scheduler signals all processes, and a shell ends of SIGUSR1 at once.

    The training has its time of grace.
    """
    words = training(tmp_path, save_interval_steps=1000, seconds_per_step=0.5)
    run = supervise("sh", "-c", '"$@"; echo "code $?"', "sh", *words)
    run.wait_for(lambda: len(steps_of(tmp_path)) > 1)
    run.signal_all(signal.SIGUSR1)
    assert run.end() == 128 + signal.SIGUSR1
    assert run.verdict()["cause"] == STOPPED
    assert saved_step(tmp_path) == steps_of(tmp_path)[-1]


@pytest.mark.parametrize("reaches", ["all processes", "the supervisor", "one rank"])
def test_ranks_below_torchrun_stop_together(supervise, tmp_path, reaches):
    """torchrun, which would end of SIGUSR1, lives on, and no rank is ended before the checkpoint
    is whole.
    """
    request = {
        "run_dir": str(tmp_path / "guarded"),
        "policy": {"stop_exit_code": 85},
        "buffer": 50_000_000,
    }
    program = [str(PROGRAMS / "stopped_ranks.py"), json.dumps(request)]
    run = supervise(
        str(Path(sys.executable).with_name("torchrun")),
        "--standalone",
        "--nproc-per-node",
        "2",
        *program,
    )
    run.wait_for_text("rank 1 step 5\n")
    if reaches == "all processes":
        run.signal_all(signal.SIGUSR1)
    elif reaches == "the supervisor":
        run.process.send_signal(signal.SIGUSR1)
    else:
        line = next(line for line in run.output().splitlines() if line.startswith("rank 1 pid"))
        os.kill(int(line.split()[3]), signal.SIGUSR1)
    assert run.end() == 1, "torchrun's own, for ranks that exit with any other code than 0"
    assert run.verdict()["cause"] == STOPPED
    assert run.attempts() == 1
    assert f"rank 0 step {saved_step(tmp_path)}\n" in run.output()
    assert f"rank 0 step {saved_step(tmp_path) + 1}\n" not in run.output()


def test_a_second_ctrl_c_counts_as_soon_as_it_is_announced(supervise, tmp_path):
    """The announcement waits until another SIGINT cannot be the same key press any more."""
    run = supervise("sh", "-c", "trap '' INT; echo ready; while :; do sleep 1; done")
    run.wait_for_text("ready")
    run.process.send_signal(signal.SIGINT)
    run.wait_for(lambda: "second Ctrl-C" in (tmp_path / "stderr.txt").read_text())
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 128 + signal.SIGKILL
    ended = next(
        event for event in read_events(run.folder / "supervisor") if event.kind == "attempt_ended"
    )
    assert ended.data["seconds"] < 25, "the second Ctrl-C was not counted"


@pytest.mark.parametrize(("name", "status"), [("SIGHUP", 129), ("SIGQUIT", 131), ("SIGUSR2", 140)])
def test_what_ends_a_command_without_a_guard_does_not_start_it_again(supervise, name, status):
    """The signal is passed on as a terminal sends it.

    Without a terminal nobody would see another start.
    """
    run = supervise("sh", "-c", "echo ready; exec sleep 600")
    run.wait_for_text("ready")
    run.process.send_signal(getattr(signal, name))
    assert run.end() == status
    assert run.attempts() == 1


def command_line(pid: int) -> str:
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_text(errors="replace") if path.exists() else ""
