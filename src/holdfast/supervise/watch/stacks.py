"""Take the stacks of processes that stand still, twice, and write them down.

By py-spy, faulthandler or the kernel.

py-spy reads another process without stopping it. Where it is missing or may not (a container
without ptrace), an observed process writes its own stack when `STACKS_SIGNAL` comes; a process that
has no handler would end of it, so it
gets none. Everything has a time limit: a process in an uninterruptible wait must not block who
    looks at it.

Does not: judge what it sees (``explain.hangs``).
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.core.files import created, make_folder, opened
from holdfast.explain.evidence import Frame
from holdfast.explain.hangs.evidence import Examined, ProcessLook, ThreadLook, clean
from holdfast.recorder.run_files import FAULTHANDLER_FILE, STACKS_FOLDER, STACKS_SIGNAL
from holdfast.supervise.process_tree import catches
from holdfast.supervise.watch.process_evidence import (
    KernelView,
    is_python,
    read_kernel_view,
    uses_gpu,
)

# Runtime facts: after 1 s what is blocked (no CPU time, same frames) differs from what is slow
_APART_SECONDS = 1.0
_PY_SPY_SECONDS = 3.0  # it takes 0.02 s, on a busy machine 0.1 s
_NATIVE_SECONDS = 10.0  # it reads the symbols of every library
_ANSWER_SECONDS = 0.5  # faulthandler takes 0.003 s
_QUIET_SECONDS = 0.02
_AT_ONCE = 8
_MORE_LOOKS = 3
# A loop that spends most of its time in a helper is seen there many times in a row
_MORE_LOOKS_IF_SAME = 24
# Drawn each time: equal steps meet a loop of their period at one line for ever
_MORE_APART_SECONDS = (0.01, 0.05)
_NATIVE_LOOKS = 3  # where a loop spends half its time in C, one look finds it there as often as not
_CHANCE = random.SystemRandom()  # has no seed that anybody counts on
_BUSY_SHARE = 0.3
_MOST_FRAMES = 256
_MOST_FILES = 1000  # dumps that are kept, some 5 KB each
_MOST_BYTES = 1 << 22
_C_LIBRARY = re.compile(r"lib(?:c|m|pthread)[-.]|ld-|\[vdso\]")
_INTERPRETER = re.compile(r"(?:lib)?(?:python|pypy)\d")
_FAULT_THREAD = re.compile(
    r"^(?:Current thread|Thread) 0x(?P<ident>[0-9a-f]{1,16})(?: \[(?P<name>.*?)\])? \(most recent"
    r" call first\):"
)
_FAULT_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A process to look at: what is known of it already, and whether it is known to be Python.

    `folder` is where it writes its stacks upon `STACKS_SIGNAL`, or None if it does not.
    """

    about: Examined
    folder: Path | None = None
    observed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What was taken: the processes that were still there, the names of the dumps by pid, and
    how long it took.
    """

    processes: tuple[Examined, ...]
    files: Mapping[int, tuple[str, ...]]
    seconds: float


class Stacks:
    """Take stacks and number the dumps."""

    def __init__(
        self, run: Path, *, pause: Callable[[float], Any] = time.sleep, py_spy: str | None = None
    ) -> None:
        self._folder = run / STACKS_FOLDER
        self._pause = pause
        self._py_spy = find_py_spy() if py_spy is None else py_spy
        taken = [path.name.partition("-")[0] for path in self._folder.glob("*.txt")]
        self._number = max((int(number) for number in taken if number.isdigit()), default=0)

    def take(self, subjects: Sequence[Subject]) -> Taken:
        """Look at processes twice, about a second apart, and write down both.

        Never raises for a process's sake.
        """
        began = time.monotonic()
        self._number += 1
        files: dict[int, list[str]] = {}
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="holdfast-stacks") as pool:
            current = self._look(pool, subjects, files, "a")
            self._pause(max(0.0, _APART_SECONDS - (time.monotonic() - began)))
            current = self._look(pool, current, files, "b")
            processes = tuple(pool.map(self._look_closer, current))
        with suppress(OSError):  # of many dumps: a limit that is too low would fill a disk in weeks
            for path in sorted(self._folder.glob("*.txt"))[:-_MOST_FILES]:
                path.unlink()
        names = {pid: tuple(names) for pid, names in files.items()}
        return Taken(processes=processes, files=names, seconds=time.monotonic() - began)

    def forget(self, taken: Taken) -> None:
        """Delete what was written down of looks that came to nothing."""
        for name in (name for names in taken.files.values() for name in names):
            with suppress(OSError):
                (self._folder / name).unlink()

    def _look(
        self,
        pool: ThreadPoolExecutor,
        subjects: Sequence[Subject],
        files: dict[int, list[str]],
        letter: str,
    ) -> list[Subject]:
        found = []
        for subject, look in zip(subjects, pool.map(self._once, subjects), strict=True):
            if look is None:
                continue
            about = replace(subject.about, looks=(*subject.about.looks, look))
            name = f"{self._number:04d}-{about.pid}-{letter}.txt"
            with suppress(OSError):  # a full disk: the event still has the frame
                make_folder(self._folder.parent, self._folder.name)
                with created(self._folder / name) as file:
                    file.write(describe(about).encode("utf-8", "replace"))
                files.setdefault(about.pid, []).append(name)
            found.append(replace(subject, about=about))
        return found

    def _once(self, subject: Subject) -> ProcessLook | None:
        pid = subject.about.pid
        view = read_kernel_view(pid)
        if view.state in ("", "Z", "X"):
            return None
        seconds = time.monotonic()
        threads, source, stopped = None, "py-spy", view.state in "Tt"
        if view.state != "D" and (subject.observed or is_python(pid)):
            threads = self._py_spy_frames(pid, stopped=stopped)
            if threads is None and subject.folder is not None and not stopped:
                threads, source = (
                    ask_for_stacks(pid, subject.folder / FAULTHANDLER_FILE),
                    "faulthandler",
                )
        return ProcessLook(
            seconds=seconds,
            source="/proc" if threads is None else source,
            state=view.state,
            cpu_seconds=view.cpu_seconds,
            io_bytes=view.io_bytes,
            threads=_joined(pid, threads or (), view),
        )

    def _look_closer(self, subject: Subject) -> Examined:
        """Look some times more at one that computes, and into native code if its stack does not
        move.
        """
        about = replace(subject.about, uses_gpu=uses_gpu(subject.about.pid))
        if about.cpu_share < _BUSY_SHARE and about.last.main.waits != "running":
            return about
        for number in range(_MORE_LOOKS_IF_SAME):
            # In the same functions, not at the same lines: the innermost may be a loop's helper.
            same = is_same(about, lambda frame: (frame.file, frame.function))
            if about.last.source == "/proc" or (number >= _MORE_LOOKS and not same):
                break
            time.sleep(_CHANCE.uniform(*_MORE_APART_SECONDS))
            look = self._once(subject)
            if look is not None:
                about = replace(about, looks=(*about.looks, look))
        return (
            replace(about, native=self._native(about))
            if is_same(about, lambda frame: frame)
            else about
        )

    # --- py-spy
    # ------------------------------------------------------------------------

    def _py_spy_frames(self, pid: int, *, stopped: bool) -> tuple[ThreadLook, ...] | None:
        """Return the threads of a process; None if py-spy is missing, may not, or cannot."""
        found = self._run(["--nonblocking"], pid, _PY_SPY_SECONDS)
        if found is None and not stopped:
            # Without stopping it, a stack that changes may be torn; a stopped process cannot be
            # stopped once more.
            found = self._run([], pid, _PY_SPY_SECONDS)
        return None if found is None else tuple(map(_thread, found))

    def _native(self, about: Examined) -> tuple[str, ...] | None:
        """Return the native functions below Python's innermost frame in the main thread, innermost
        first.

        A loop calls functions in C too, for a moment each: only what is there at each of a few
            looks counts. None of
        them if that frame is another one than at the looks: what moves is in no native function for
            long.
        """
        names: tuple[str, ...] | None = None
        homes: set[str] | None = None
        for number in range(_NATIVE_LOOKS if self._py_spy else 0):
            time.sleep(_CHANCE.uniform(*_MORE_APART_SECONDS) if number else 0.0)
            dump = self._run(["--native"], about.pid, _NATIVE_SECONDS) or ()
            thread = next((each for each in dump if each.get("os_thread_id") == about.pid), None)
            if thread is None:
                break
            found = _native_functions(thread, about.last.main.frames[-1].line)
            homes = {home for _, home in found if homes is None or home in homes}
            names = tuple(name for name, home in found if home in homes)[:_MOST_FRAMES]
            if not names:
                break
        return names

    def _run(self, options: list[str], pid: int, seconds: float) -> list[dict[str, Any]] | None:
        command = [self._py_spy, "dump", "--json", *options, "--pid", str(pid)]
        try:
            child = subprocess.Popen(  # noqa: S603 - our own program and a number
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError:  # there is none
            return None
        try:
            output, _ = child.communicate(timeout=seconds)
            found = json.loads(output) if child.returncode == 0 else None
        except subprocess.TimeoutExpired:
            child.kill()
            # It may hang with the process that it looks at
            with suppress(subprocess.TimeoutExpired):
                child.communicate(timeout=1.0)
            return None
        except (OSError, ValueError, RecursionError):
            return None
        good = isinstance(found, list) and found and all(isinstance(each, dict) for each in found)
        return found if good else None


def find_py_spy() -> str:
    """Return the path of py-spy: beside this interpreter, else on the PATH.

    Empty if it is not installed.
    """
    return (
        shutil.which("py-spy", path=str(Path(sys.executable).parent))
        or shutil.which("py-spy")
        or ""
    )


def _frame(file: str, line: Any, function: str) -> Frame:
    return Frame(file=clean(file), line=int(line), function=clean(function))


def _frames(thread: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [each for each in thread.get("frames") or () if isinstance(each, dict)]


def _thread(found: Mapping[str, Any]) -> ThreadLook:
    frames = [
        _frame(str(each.get("filename")), each.get("line") or 0, str(each.get("name")))
        for each in _frames(found)[:_MOST_FRAMES]
    ]
    return ThreadLook(
        tid=int(found.get("os_thread_id") or 0),
        name=clean(str(found.get("thread_name") or "")),
        main=found.get("os_thread_id") == found.get("pid"),
        frames=tuple(reversed(frames)),
        holds_gil=bool(found.get("owns_gil")),
    )


def _native_functions(thread: Mapping[str, Any], line: int) -> list[tuple[str, str]]:
    """Return name and home of the native functions below Python's innermost frame, if that is at a
    line.

    The home is the library's file: not all have names, and of MKL py-spy finds often only the
    innermost. Within the interpreter it is the function. The C library and the kernel's
    (allocating, copying, clocks) are left out: any Python runs them.
    """
    found: list[tuple[str, str]] = []
    for each in _frames(thread):
        name, file = clean(str(each.get("name"))), clean(Path(str(each.get("module") or "")).name)
        if not file and each.get("filename") != "?":  # that is machine code from no file
            return found if each.get("line") == line else []
        if file and not _C_LIBRARY.match(file):
            found.append(
                (
                    file if name.startswith("0x") else name,
                    name if _INTERPRETER.match(file) else file,
                )
            )
    return found


def _joined(pid: int, threads: Sequence[ThreadLook], view: KernelView) -> tuple[ThreadLook, ...]:
    """Put what the kernel says to each thread.

    Threads without Python frames, but the main one, are left out.
    """
    others = [tid for tid in view.waits if tid != pid]
    # Faulthandler knows no numbers
    only = others[0] if len(others) == 1 and len(threads) == 2 else None
    found = [] if any(thread.main for thread in threads) else [ThreadLook(tid=pid, main=True)]
    found += sorted(threads, key=lambda thread: not thread.main)
    numbers = [pid if thread.main else only or thread.tid for thread in found]
    waits = [view.waits.get(tid, ("", "")) for tid in numbers]
    return tuple(
        replace(thread, tid=tid, waits=waited, target=target)
        for thread, tid, (waited, target) in zip(found, numbers, waits, strict=True)
    )


# --- faulthandler
# ------------------------------------------------------------------------


def ask_for_stacks(pid: int, file: Path) -> tuple[ThreadLook, ...] | None:
    """Let an observed process write its own stacks.

    None if it has no handler for that, or does not answer.
    """
    try:
        before = file.stat().st_size
        # Who replaces it by a pipe gets no reader
        if not file.is_file() or not catches(pid, STACKS_SIGNAL):
            return None
        os.kill(pid, STACKS_SIGNAL)
        size, until = before, time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < until:
            time.sleep(_QUIET_SECONDS)
            now = file.stat().st_size
            if now == size > before:
                break
            size = now
        with opened(file) as answered:
            answered.seek(before)
            text = answered.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    return read_faulthandler(text) or None


def read_faulthandler(text: str) -> tuple[ThreadLook, ...]:
    """Return the threads of a dump by faulthandler, which lists them from the newest to the main
    one.
    """
    # Not the system's numbers, but the same at each look
    threads: list[tuple[int, str, list[Frame]]] = []
    for line in text.splitlines():
        if found := _FAULT_THREAD.match(line):
            threads.append((int(found["ident"], 16), clean(found["name"] or ""), []))
        elif threads and (found := _FAULT_FRAME.match(line)) and len(threads[-1][2]) < _MOST_FRAMES:
            threads[-1][2].append(_frame(found["file"], found["line"], found["function"]))
    return tuple(
        ThreadLook(tid=ident, name=name, main=index == len(threads), frames=tuple(reversed(frames)))
        for index, (ident, name, frames) in enumerate(threads, 1)
    )


def is_same(about: Examined, of: Callable[[Frame], Any]) -> bool:
    """Return whether the stack of the main thread is known, and something of its frames was the
    same at each look.
    """
    looks = {tuple(map(of, look.main.frames)) for look in about.looks}
    return bool(about.last.main.frames) and len(looks) == 1


def describe(about: Examined) -> str:
    """Return the newest look at a process as text, innermost frames first."""
    look = about.last
    rank = "" if about.rank is None else f", rank {about.rank}"
    used = f"{look.cpu_seconds:.2f} s of CPU time, {look.io_bytes} bytes read and written"
    process = f"process {about.pid} ({about.role}{rank}), state {look.state}"
    lines = [f"{process}, {used}; stacks from {look.source}"]
    lines[0] += ", innermost call first" if look.main.frames else ""
    if about.phase:
        lines.append(
            f"in the phase {about.phase!r} for {about.seconds:.1f} s, at step {about.step}"
        )
    for thread in look.threads:
        lock = ", holds the interpreter's lock" if thread.holds_gil else ""
        waits = (
            f": {thread.waits}{f' ({thread.target})' if thread.target else ''}"
            if thread.waits
            else ""
        )
        lines += [
            "",
            (
                f"thread {thread.tid}"
                f" {thread.name or ('MainThread' if thread.main else '')}{waits}{lock}"
            ),
        ]
        lines += [
            f'  File "{each.file}", line {each.line} in {each.function}'
            for each in reversed(thread.frames)
        ]
    return "\n".join(lines) + "\n"
