"""Processes that tests fork from a prepared one.

What a program sees and leaves is as if Python had started it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.forked_attempts import supervise_forked
from tests.prepared import Prepared, run_prepared

_PROGRAM = """
import atexit, os, random, sys, threading
atexit.register(print, "at exit")
threading.Timer(0.2, print, ("in a thread",)).start()
print(__name__, sys.argv, sys.path[0], os.getcwd(), sorted(os.environ), os.getsid(0) == os.getpid(), flush=True)
print(len(os.listdir("/proc/self/fd")), sys.stdin.read(), file=sys.stderr)
sys.exit(int(sys.argv[-1]))
"""


@pytest.mark.parametrize("how", ["file", "module", "code"])
def test_a_program_meets_what_it_would_meet(tmp_path: Path, how: str) -> None:
    """Arguments, paths, environment, session, descriptors, threads, exit code.

    All as of a new interpreter.
    """
    (tmp_path / "program.py").write_text(_PROGRAM)
    arguments = {"file": ["program.py"], "module": ["-m", "program"], "code": ["-c", _PROGRAM]}[how]
    ended = []
    for start in (
        lambda command, **given: subprocess.Popen([sys.executable, *command], **given),
        Prepared,
    ):
        with start(
            [*arguments, "3"],
            cwd=tmp_path,
            env={"LC_ALL": "C.UTF-8"},
            text=True,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            told = process.communicate("what is asked", timeout=60)
        ended.append((*told, process.returncode))
    assert ended[0] == ended[1]
    assert ended[1][2] == 3


def test_signals_and_limits_of_time_end_a_program() -> None:
    """A signal that kills is the exit code, Ctrl-C too; one that takes too long is killed."""
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        with Prepared(
            ["-c", "import time; print(flush=True); time.sleep(60)"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            assert process.poll() is None
            process.send_signal(number)
            assert process.wait(60) == -number
    with pytest.raises(subprocess.TimeoutExpired):
        run_prepared(["-c", "import time; time.sleep(60)"], timeout=0.1)


_ATTEMPT = """
import json, os, pathlib, sys, time
facts = [os.getpid(), os.getppid(), os.getsid(0), os.environ["ATTEMPT_BY_HOLDFAST"], "torch" in sys.modules]
pathlib.Path("facts.tmp").write_text(json.dumps(facts))
os.rename("facts.tmp", "facts.json")
time.sleep(600)
"""


@pytest.mark.slow
def test_a_forked_attempt_is_a_child_of_its_supervisor_and_dies_with_it(tmp_path: Path) -> None:
    """It leads a session of its own, has torch loaded, and does not outlive a killed supervisor."""
    (tmp_path / "train.py").write_text(_ATTEMPT)
    facts = tmp_path / "facts.json"

    with supervise_forked(
        ["--run-dir", "run", "--", sys.executable, "train.py"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as supervisor:
        while not facts.exists():
            assert supervisor.poll() is None
            time.sleep(0.01)
        pid, parent, session, number, has_torch = json.loads(facts.read_text())
        supervisor.kill()

    assert (parent, session, number, has_torch) == (supervisor.pid, pid, "0", True)
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.01)
