"""Stacks are taken by the gentlest way that works, never harm the process, and never block."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.explain.hangs.process_samples import ExaminedProcess
from holdfast.supervise.watch import py_spy
from holdfast.supervise.watch.faulthandler_dumps import read_faulthandler
from holdfast.supervise.watch.process_evidence import read_kernel_view
from holdfast.supervise.watch.py_spy import find_py_spy
from holdfast.supervise.watch.stacks import StackSampler, Subject

Start = Callable[..., subprocess.Popen[bytes]]
HANDLER = (
    "import faulthandler, signal\n"
    "faulthandler.register(signal.SIGRTMIN + 12, open({file!r}, 'w'), all_threads=True)\n"
)
STUCK = "import time\ndef stuck():\n    time.sleep(1e6)\nprint(flush=True)\nstuck()\n"

needs_py_spy = pytest.mark.skipif(not find_py_spy(), reason="py-spy is not installed")


@pytest.fixture
def start() -> Iterator[Start]:
    children = []

    def start_one(program: str) -> subprocess.Popen[bytes]:
        child = subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE)
        children.append(child)
        assert child.stdout is not None
        child.stdout.readline()  # it is there now
        time.sleep(0.05)
        return child

    yield start_one
    for child in children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def take(run: Path, *subjects: Subject, py_spy: str | None = None) -> tuple[ExaminedProcess, ...]:
    return StackSampler(run, pause=lambda _: None, py_spy=py_spy).take(subjects).processes


def subject(pid: int, folder: Path | None = None) -> Subject:
    return Subject(process=ExaminedProcess(pid=pid), folder=folder, runs_python=True)


def test_without_py_spy_the_process_writes_its_own_stacks(start: Start, tmp_path: Path) -> None:
    """The handler of faulthandler answers, and the process goes on as it was."""
    child = start(HANDLER.format(file=str(tmp_path / "stacks.txt")) + STUCK)
    (found,) = take(tmp_path, subject(child.pid, tmp_path), py_spy="")
    assert found.newest.source == "faulthandler"
    assert (found.newest.main_thread.frames[-1].function, found.newest.main_thread.waits) == (
        "stuck",
        "sleep",
    )
    assert child.poll() is None


@pytest.mark.parametrize(
    "handler",
    ["", "import signal, sys\nsignal.signal(signal.SIGRTMIN + 12, lambda *_: sys.exit(3))\n"],
)
def test_a_process_that_does_not_answer_is_not_killed_by_a_question(
    handler: str, start: Start, tmp_path: Path
) -> None:
    """The signal would end one without a handler, and one of its own may mean to save and exit.

    None is sent.
    """
    child = start(handler + STUCK)
    (tmp_path / "stacks.txt").touch()
    (found,) = take(tmp_path, subject(child.pid, None if handler else tmp_path), py_spy="")
    assert (found.newest.source, found.newest.main_thread.waits) == ("/proc", "sleep")
    assert child.poll() is None


@needs_py_spy
def test_a_stopped_process_is_looked_at_without_being_waited_for(
    start: Start, tmp_path: Path
) -> None:
    """It cannot answer a signal, and must not be stopped once more."""
    child = start(STUCK)
    os.kill(child.pid, signal.SIGSTOP)
    while read_kernel_view(child.pid).state != "T":
        time.sleep(0.005)
    (found,) = take(tmp_path, subject(child.pid, tmp_path))
    assert (found.newest.state, found.newest.main_thread.frames[-1].function) == ("T", "stuck")


def test_a_process_that_has_ended_is_left_out(start: Start, tmp_path: Path) -> None:
    """Also one that nobody has waited for, and a number that nobody has."""
    child = start(STUCK)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert take(tmp_path, subject(child.pid), subject(2**22 - 3)) == ()


@pytest.mark.parametrize("program", ["exec sleep 1000", "echo '[{}, 3]'", "exit 1"])
def test_a_py_spy_that_hangs_or_says_nonsense_is_given_up(
    program: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next way is tried; nothing waits longer than its limit."""
    monkeypatch.setattr(py_spy, "_DUMP_SECONDS", 0.1)
    broken = tmp_path / "py-spy"
    broken.write_text(f"#!/bin/sh\n{program}\n")
    broken.chmod(0o755)
    child = start(HANDLER.format(file=str(tmp_path / "stacks.txt")) + STUCK)
    (found,) = take(tmp_path, subject(child.pid, tmp_path), py_spy=str(broken))
    assert found.newest.source == "faulthandler"


LIBC, PYTHON, SPIN = (
    "/usr/lib/x86_64-linux-gnu/libc.so.6",
    "/opt/lib/libpython3.11.so.1.0",
    "/opt/spin.so",
)
BLAS = "/opt/numpy.libs/libscipy_openblas64_-32a4b2a6.so"
MATCH = [("sre_ucs1_match", PYTHON), ("_sre_SRE_Pattern_match", PYTHON)]


@pytest.mark.parametrize(
    ("dumps", "native"),
    [
        pytest.param([[("0x7f0f6278b853", LIBC)]], (), id="a loop that copies"),
        pytest.param([[("unicode_repr", PYTHON)], []], (), id="a function at one look"),
        pytest.param(
            [[("0x7f010dd8b874", LIBC), *MATCH], MATCH],
            ("sre_ucs1_match", MATCH[1][0]),
            id="a search",
        ),
        pytest.param(
            [[("0x7f06049b6135", SPIN)], [("0x7f06049b612e", SPIN)]],
            ("spin.so",),
            id="without symbols",
        ),
        pytest.param(
            [[("dgemv_kernel_4x4", BLAS)], [("dcopy_k_SKYLAKEX", BLAS)]],
            ("dcopy_k_SKYLAKEX",),
            id="BLAS",
        ),
        pytest.param(
            [[("0x7f0000000010", None), ("call", SPIN)]], ("call",), id="made at run time"
        ),
    ],
)
def test_what_a_loop_calls_for_a_moment_is_no_native_code(
    dumps: list[list[tuple[str, str | None]]], native: tuple[str, ...], start: Start, tmp_path: Path
) -> None:
    """Frames that py-spy has printed of loops, of a search and of libraries.

    The last dump is repeated.
    """
    child = start("print(flush=True)\nwhile True: pass\n")
    python = {"name": "<module>", "filename": "<string>", "module": None, "line": 2}
    for name, functions in {"look": [], "1": dumps[0], "2": dumps[-1], "3": dumps[-1]}.items():
        inside = [
            {"name": each, "filename": file or "?", "module": file, "line": 0}
            for each, file in functions
        ]
        thread = {
            "pid": child.pid,
            "os_thread_id": child.pid,
            "owns_gil": True,
            "frames": [*inside, python],
        }
        (tmp_path / f"{name}.json").write_text(json.dumps([thread]))
    printer = tmp_path / "py-spy"
    printer.write_text(
        f"#!/bin/sh\ncd {tmp_path}\n"
        'case "$*" in *--native*) set -- ?.json; cat "$1"; rm "$1";; *) cat look.json;; esac\n'
    )
    printer.chmod(0o755)
    (found,) = take(tmp_path, subject(child.pid), py_spy=str(printer))
    assert found.native == native


def test_faulthandler_s_text_is_read_with_names_and_without() -> None:
    """The last thread that it lists is the main one; what is no frame is passed over."""
    text = (
        "Thread 0x00007f0a [loader] (most recent call first):\n"
        '  File "/a/b c.py", line 3 in get\n'
        '  File "/a/x.py", line 30 in run\n\n'
        "Current thread 0x00007f0b (most recent call first):\n"
        "  <no Python frame>\n"
        '  File "<string>", line 7 in <module>\n'
        "  ...\n"
    )
    other, main = read_faulthandler(text)
    assert (other.name, other.is_main, [frame.line for frame in other.frames]) == (
        "loader",
        False,
        [30, 3],
    )
    assert (main.is_main, main.frames[0].function) == (True, "<module>")
    assert read_faulthandler("") == read_faulthandler("\0\xff junk\n") == ()
