"""`holdfast attach` to real trainings that nobody observes.

Stuck in a lock, with a stopped worker, and healthy.
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
from typer.testing import CliRunner

from holdfast.cli.main import make_app
from holdfast.supervise.process_tree import descendants, read_table
from holdfast.supervise.watch import inspected_processes
from holdfast.supervise.watch.process_evidence import read_kernel_view
from holdfast.supervise.watch.py_spy import find_py_spy

pytestmark = pytest.mark.skipif(not find_py_spy(), reason="py-spy is not installed")
Start = Callable[..., subprocess.Popen[str]]
LOCKED = """
import threading
def stuck():
    lock = threading.Lock(); lock.acquire()
    print(flush=True)
    lock.acquire()
stuck()
"""
WAITING = (
    "import sys, time\nprint(flush=True)\nwhile True: sum(range(int(sys.argv[1])));"
    " time.sleep(0.05)\n"
)
LOOPING = """
print(flush=True)
number = 0
while True:
    number += 1
"""
# hashlib releases the interpreter's lock during the call, which takes an hour.
HASHING = """
import hashlib
print(flush=True)
hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 2**31 - 1)
"""
STEPPING = """
import sys, time
from pathlib import Path
from holdfast.recorder.progress import ProcessPhase, ProgressBoard
board = ProgressBoard(Path(sys.argv[1]) / "progress.board")
board.step = 7
board.enter(ProcessPhase.OPTIMIZER)
print(flush=True)
while sys.argv[2] == "steps":
    time.sleep(0.05)
    board.step += 1
    board.enter(ProcessPhase.OPTIMIZER)
time.sleep(1e6)
"""
STARTING = "import sys; sys.path.insert(0, sys.argv[1]); import slow_to_import"
LOADING = """
import time, torch
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 10**6
    def __getitem__(self, index): time.sleep(0.01); return torch.zeros(4)
model = torch.nn.Linear(4, 1)
for number, batch in enumerate(torch.utils.data.DataLoader(Slow(), batch_size=4, num_workers=1)):
    model(batch).sum().backward()
    if number == 3: print(flush=True)
"""


@pytest.fixture
def start() -> Iterator[Start]:
    children = []

    def start_one(program: str, *words: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", program, *words], stdout=subprocess.PIPE, text=True
        )
        children.append(child)
        assert child.stdout is not None
        child.stdout.readline()  # it is there now
        return child

    yield start_one
    # The newest first: it may take the CPU that an older one needs in order to exit.
    for child in reversed(children):
        for pid in [*descendants(read_table(), [child.pid]), child.pid]:
            os.kill(pid, signal.SIGKILL)
        child.communicate()


def attached(pid: int, code: int | None, seconds: int = 1) -> dict[str, Any]:
    result = CliRunner().invoke(
        make_app("attach"), ["attach", str(pid), "--seconds", str(seconds), "--json"]
    )
    assert code is None or result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_lock_that_nobody_gives_back_is_named(start: Start) -> None:
    """Kind, process and line are those that `holdfast run` would name.

    The process goes on as it was.
    """
    child = start(LOCKED)
    found = attached(child.pid, 1)
    assert (found["moves"], found["verdict"]["kind"], found["verdict"]["pid"]) == (
        False,
        "lock",
        child.pid,
    )
    assert found["verdict"]["frame"].endswith(" in stuck")
    assert "at step" not in found["verdict"]["sentence"]  # nobody has counted
    (row,) = found["processes"]
    assert (row["phase"], row["resident_bytes"] > 1 << 20) == ("in code of its own", True)
    assert child.poll() is None


def test_a_loop_that_mostly_waits_moves_and_one_that_only_polls_does_not(start: Start) -> None:
    """20 steps a second and nothing read.

    To wait as often for what never comes is to stand still.
    """
    assert attached(start(WAITING, "200000").pid, 0, 2)["moves"]
    assert attached(start(WAITING, "0").pid, 1, 2)["verdict"]["kind"] == "sleep"
    joined = (
        "import sys, threading as t\nx = t.Thread(target=exec, args=[sys.argv[2], globals()])\n"
    )
    joined += "x.start(); x.join()"
    assert attached(start(joined, "200000", WAITING).pid, 0, 2)["moves"]
    assert attached(start(joined, "0", WAITING).pid, 1, 2)["verdict"]["kind"] == "sleep"


@pytest.mark.parametrize(("program", "kind"), [(LOOPING, "Python loop"), (HASHING, "native code")])
def test_what_computes_at_one_place_is_named_and_neither_healthy_nor_stuck(
    start: Start, program: str, kind: str
) -> None:
    """Two looks cannot tell an endless loop from a long computation."""
    result = attached(start(program).pid, 0)

    assert result["activity"] == "computing"
    assert result["verdict"]["kind"] == kind


@pytest.mark.parametrize(
    ("program", "activity", "kind"),
    [(LOOPING, "starved", "merely slow"), (LOCKED, "none", "lock")],
)
def test_a_process_without_a_cpu_is_not_called_stuck(
    start: Start, program: str, activity: str, kind: str
) -> None:
    """It could run, unlike one that waits for a lock on the same busy CPU."""
    child = start(program)
    busy = start(LOOPING)
    cpu = min(os.sched_getaffinity(0))
    os.sched_setaffinity(busy.pid, {cpu})
    os.sched_setaffinity(child.pid, {cpu})
    os.sched_setscheduler(child.pid, os.SCHED_IDLE, os.sched_param(0))

    result = attached(child.pid, None)

    assert result["activity"] == activity
    assert result["verdict"]["kind"] == kind


def test_recorded_steps_are_progress_and_their_absence_is_dated(
    start: Start, tmp_path: Path
) -> None:
    """A process that sleeps between its steps is healthy, and one that records none is not."""
    result = attached(start(STEPPING, str(tmp_path), "steps").pid, 0)
    assert result["activity"] == "recorded"
    assert result["steps"] > 0

    result = attached(start(STEPPING, str(tmp_path), "no steps").pid, 1)
    assert result["verdict"]["kind"] == "sleep"
    assert "'optimizer', at step 7" in result["verdict"]["sentence"]


def test_the_verdict_comes_first_and_imports_are_folded(start: Start, tmp_path: Path) -> None:
    """What an optimizer's constructor imports is a start, not a step of it."""
    (folder := tmp_path / "site-packages" / "torch" / "optim").mkdir(parents=True)
    (folder / "slow_to_import.py").write_text(LOCKED)
    child = start(STARTING, str(folder))
    result = CliRunner().invoke(make_app("attach"), ["attach", str(child.pid), "--seconds", "1"])
    assert "[lock, " in result.stdout.splitlines()[0], result.output
    assert f"process {child.pid}: starting, " in result.stdout
    assert "<frozen importlib" not in result.stdout


@pytest.mark.slow
def test_what_a_launcher_has_started_is_judged(start: Start) -> None:
    """Not the launcher, which sleeps between its looks at it and has no torch."""
    launcher = (
        "import subprocess, sys, time\nchild = subprocess.Popen([sys.executable, '-c',"
        " sys.argv[1]])\nprint()\n"
    )
    launcher += "while child.poll() is None:\n    time.sleep(0.2)\n"
    child = start(launcher, "import torch\n" + LOCKED)
    deadline = time.monotonic() + 240
    while (
        len(found := attached(child.pid, None)["processes"]) < 2
        or found[1]["phase"] != "in code of its own"
    ):
        assert time.monotonic() < deadline, found
    verdict = attached(child.pid, 1)["verdict"]
    assert (verdict["kind"], verdict["pid"]) == ("lock", found[1]["pid"])


@pytest.mark.slow
def test_a_loop_that_waits_for_each_batch_moves_until_its_worker_is_stopped(start: Start) -> None:
    """Healthy it is found in the same wait twice and is called moving.

    With SIGSTOP the worker is to blame.
    """
    child = start(LOADING)
    found = attached(child.pid, 0, 5)  # a busy machine gives it little time
    assert found["verdict"] is None
    assert {row["pid"]: row["phase"] for row in found["processes"]}[child.pid] == "data wait"
    (worker,) = (row["pid"] for row in found["processes"] if row["phase"] == "makes batches")
    os.kill(worker, signal.SIGSTOP)
    while read_kernel_view(worker).state != "T":
        time.sleep(0.005)
    time.sleep(0.5)  # what it has sent before is read
    verdict = attached(child.pid, 1)["verdict"]
    assert (verdict["kind"], verdict["pid"]) == ("stopped", worker)


def test_what_cannot_be_looked_at_is_a_clear_error(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such process, one that is not Python, no py-spy: what it is, and what to do."""
    sleeper = subprocess.Popen(["sleep", "1000"])
    with sleeper:
        for pid, words in ((2**22 - 3, str(2**22 - 3)), (sleeper.pid, "sleep")):
            result = CliRunner().invoke(make_app("attach"), ["attach", str(pid)])
            assert result.exit_code == 2
            assert "[H741]" in result.stderr
            assert words in result.stderr
            assert "Fix: " in result.stderr
        monkeypatch.setattr(inspected_processes, "find_py_spy", lambda: "")
        result = CliRunner().invoke(make_app("attach"), ["attach", str(sleeper.pid)])
        assert "pip install py-spy" in result.stderr
        sleeper.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_without_the_right_to_trace_the_fix_is_named() -> None:
    """Another user's process: sudo, or a capability for the container."""
    program = (
        "import os; from holdfast.supervise.watch import inspected_processes; os.setuid(65534);"
        " inspected_processes.find_subjects(os.getppid(), 1.0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "[H741]" in done.stderr, done.stderr
    assert "sudo" in done.stderr
    assert "--cap-add SYS_PTRACE" in done.stderr
