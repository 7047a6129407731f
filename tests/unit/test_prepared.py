"""Processes that tests fork from a prepared one.

What a program sees and leaves is as if Python had started it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
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
