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

from holdfast.explain.hangs.evidence import Examined
from holdfast.supervise.watch import stacks
from holdfast.supervise.watch.process_evidence import catches_sigusr1, read_kernel_view, uses_gpu
from holdfast.supervise.watch.stacks import Stacks, Subject, find_py_spy, read_faulthandler

Start = Callable[..., subprocess.Popen[bytes]]
HANDLER = (
    "import faulthandler, signal\nfaulthandler.register(signal.SIGUSR1, open({file!r}, 'w'), all_threads=True)\n"
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


def take(run: Path, *subjects: Subject, py_spy: str | None = None) -> tuple[Examined, ...]:
    return Stacks(run, pause=lambda _: None, py_spy=py_spy).take(subjects).processes


def subject(pid: int, folder: Path | None = None) -> Subject:
    return Subject(about=Examined(pid=pid), folder=folder, observed=True)


@needs_py_spy
def test_py_spy_reads_threads_with_what_they_wait_for(start: Start, tmp_path: Path) -> None:
    """Frames, names and the interpreter's lock come from py-spy, what is waited for from the kernel."""
    program = (
        "import threading\nlock = threading.Lock()\nlock.acquire()\n"
        "def inner():\n    lock.acquire()\nthreading.Thread(target=inner, name='inner one', daemon=True).start()\n"
    )
    child = start(program + STUCK)
    (found,) = take(tmp_path, subject(child.pid))
    main, other = found.last.threads
    assert [look.source for look in found.looks] == ["py-spy", "py-spy"]
    assert (main.main, main.waits, main.frames[-1].function, main.frames[-1].line) == (True, "sleep", "stuck", 9)
    assert (other.name, other.waits, other.frames[-1].function) == ("inner one", "futex", "inner")
    assert main.frames[0].function == "<module>", "innermost last"


def test_without_py_spy_the_process_writes_its_own_stacks(start: Start, tmp_path: Path) -> None:
    """The handler of faulthandler answers, and the process goes on as it was."""
    child = start(HANDLER.format(file=str(tmp_path / "stacks.txt")) + STUCK)
    (found,) = take(tmp_path, subject(child.pid, tmp_path), py_spy="")
    assert found.last.source == "faulthandler"
    assert (found.last.main.frames[-1].function, found.last.main.waits) == ("stuck", "sleep")
    assert child.poll() is None


def test_a_process_without_a_handler_is_not_killed_by_a_question(start: Start, tmp_path: Path) -> None:
    """SIGUSR1 would end it; then the kernel's view is all there is."""
    child = start(STUCK)
    (tmp_path / "stacks.txt").touch()
    (found,) = take(tmp_path, subject(child.pid, tmp_path), py_spy="")
    assert (found.last.source, found.last.main.waits) == ("/proc", "sleep")
    assert child.poll() is None


def test_a_handler_of_the_script_s_own_is_left_alone(start: Start, tmp_path: Path) -> None:
    """A process whose SIGUSR1 is its own gives no folder, and gets no signal: it may mean to save and exit."""
    child = start("import signal, sys\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))\n" + STUCK)
    assert catches_sigusr1(child.pid)
    (found,) = take(tmp_path, subject(child.pid), py_spy="")
    assert found.last.source == "/proc"
    assert child.poll() is None


@needs_py_spy
def test_a_stopped_process_is_looked_at_without_being_waited_for(start: Start, tmp_path: Path) -> None:
    """It cannot answer a signal, and must not be stopped once more."""
    child = start(STUCK)
    os.kill(child.pid, signal.SIGSTOP)
    while read_kernel_view(child.pid).state != "T":
        time.sleep(0.005)
    (found,) = take(tmp_path, subject(child.pid, tmp_path))
    assert (found.last.state, found.last.main.frames[-1].function) == ("T", "stuck")


def test_a_process_that_has_ended_is_left_out(start: Start, tmp_path: Path) -> None:
    """Also one that nobody has waited for, and a number that nobody has."""
    child = start(STUCK)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert take(tmp_path, subject(child.pid), subject(2**22 - 3)) == ()


@needs_py_spy
def test_hostile_names_are_harmless_in_the_dump(start: Start, tmp_path: Path) -> None:
    """A thread's name may hold escape sequences and line ends; the file has neither."""
    program = (
        "import threading, time\n"
        "threading.Thread(target=lambda: time.sleep(1e6), name='\\x1b[2J\\nthread 1', daemon=True).start()\n"
    )
    child = start(program + STUCK)
    taken = Stacks(tmp_path, pause=lambda _: None).take([subject(child.pid)])
    assert taken.files == {child.pid: (f"0001-{child.pid}-a.txt", f"0001-{child.pid}-b.txt")}
    text = (tmp_path / "stacks" / taken.files[child.pid][0]).read_text()
    assert "\x1b" not in text
    assert "[2J" not in text
    assert "\nthread 1" not in text
    assert " thread 1" in text
    assert "in stuck" in text


def test_numbers_go_on_where_an_earlier_supervisor_ended(start: Start, tmp_path: Path) -> None:
    """No dump replaces another, and a file that is none does not matter."""
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "0041-7-b.txt").touch()
    (tmp_path / "stacks" / "notes.txt").touch()
    child = start(STUCK)
    taken = Stacks(tmp_path, pause=lambda _: None, py_spy="").take([subject(child.pid)])
    assert [name[:4] for name in taken.files[child.pid]] == ["0042", "0042"]


def test_a_folder_that_cannot_be_written_costs_the_dump_and_not_the_look(start: Start, tmp_path: Path) -> None:
    """The event still tells what was seen."""
    (tmp_path / "stacks").write_text("a file")
    child = start(STUCK)
    taken = Stacks(tmp_path, pause=lambda _: None, py_spy="").take([subject(child.pid)])
    assert len(taken.processes) == 1
    assert taken.files == {}


@pytest.mark.parametrize("program", ["exec sleep 1000", "echo '[{}, 3]'", "echo junk; exit 0", "exit 1"])
def test_a_py_spy_that_hangs_or_says_nonsense_is_given_up(
    program: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next way is tried; nothing waits longer than its limit."""
    monkeypatch.setattr(stacks, "_PY_SPY_SECONDS", 0.1)
    broken = tmp_path / "py-spy"
    broken.write_text(f"#!/bin/sh\n{program}\n")
    broken.chmod(0o755)
    child = start(HANDLER.format(file=str(tmp_path / "stacks.txt")) + STUCK)
    (found,) = take(tmp_path, subject(child.pid, tmp_path), py_spy=str(broken))
    assert found.last.source == "faulthandler"


@needs_py_spy
def test_a_process_that_computes_is_looked_at_more_often_and_into_its_native_code(
    start: Start, tmp_path: Path
) -> None:
    """A line that never moves is told from a loop on one line by the functions in C below it."""
    inside = start("import re\nprint(flush=True)\nre.match(r'(a+)+$', 'a' * 60 + 'b')\n")
    loop = start("print(flush=True)\nwhile True: pass\n")
    native, plain = Stacks(tmp_path).take([subject(inside.pid), subject(loop.pid)]).processes
    assert len(native.looks) == len(plain.looks) == 26
    assert native.native, "the names of functions in C"
    assert plain.native == ()


LIBC, PYTHON, SPIN = "/usr/lib/x86_64-linux-gnu/libc.so.6", "/opt/lib/libpython3.11.so.1.0", "/opt/spin.so"
BLAS = "/opt/numpy.libs/libscipy_openblas64_-32a4b2a6.so"
SPRINTF = [("0x7f0f6266fab0", LIBC), ("0x7f0f6267ae59", LIBC), ("0x7f0f626962f7", LIBC), ("sprintf", LIBC)]
MATCH = [("sre_ucs1_match", PYTHON), ("_sre_SRE_Pattern_match", PYTHON)]
CLOCK = [("0x7f451d149b46", "[vdso]"), ("clock_gettime", LIBC)]


@pytest.mark.parametrize(
    ("dumps", "native"),
    [
        pytest.param([[("0x7f0f6278b853", LIBC)]], (), id="a loop that copies"),
        pytest.param([SPRINTF], (), id="a loop that formats"),
        pytest.param([CLOCK], (), id="a loop that reads the clock"),
        pytest.param([[("unicode_repr", PYTHON)], []], (), id="a function at one look"),
        pytest.param([[("unicode_repr", PYTHON)], [("unicode_fromformat_write_str", PYTHON)]], (), id="two of them"),
        pytest.param([[("0x7f010dd8b874", LIBC), *MATCH], MATCH], ("sre_ucs1_match", MATCH[1][0]), id="a search"),
        pytest.param([[("0x7f06049b6135", SPIN)], [("0x7f06049b612e", SPIN)]], ("spin.so",), id="without symbols"),
        pytest.param([[("dgemv_kernel_4x4", BLAS)], [("dcopy_k_SKYLAKEX", BLAS)]], ("dcopy_k_SKYLAKEX",), id="BLAS"),
        pytest.param([[("0x7f0000000010", None), ("call", SPIN)]], ("call",), id="made at run time"),
    ],
)
def test_what_a_loop_calls_for_a_moment_is_no_native_code(
    dumps: list[list[tuple[str, str | None]]], native: tuple[str, ...], start: Start, tmp_path: Path
) -> None:
    """Frames that py-spy has printed of loops, of a search and of libraries; the last dump is repeated."""
    child = start("print(flush=True)\nwhile True: pass\n")
    python = {"name": "<module>", "filename": "<string>", "module": None, "line": 2}
    for name, functions in {"look": [], "1": dumps[0], "2": dumps[-1], "3": dumps[-1]}.items():
        inside = [{"name": each, "filename": file or "?", "module": file, "line": 0} for each, file in functions]
        thread = {"pid": child.pid, "os_thread_id": child.pid, "owns_gil": True, "frames": [*inside, python]}
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
    assert (other.name, other.main, [frame.line for frame in other.frames]) == ("loader", False, [30, 3])
    assert (main.main, main.frames[0].function) == (True, "<module>")
    assert read_faulthandler("") == read_faulthandler("\0\xff junk\n") == ()


def test_what_is_not_there_has_no_evidence() -> None:
    """A process may vanish between any two reads."""
    view = read_kernel_view(2**22 - 3)
    assert (view.state, view.waits, view.cpu_seconds) == ("", {}, 0.0)
    assert not catches_sigusr1(2**22 - 3)
    assert not uses_gpu(2**22 - 3)
