"""Read the Python and native stacks of another process with py-spy."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.explain.evidence import Frame
from holdfast.explain.hangs.process_samples import ThreadSample, clean_name

# Time limit for Python stacks. py-spy takes about 0.02 s, or 0.1 s on a busy machine.
_DUMP_SECONDS = 3.0
# Time limit for native stacks, for which py-spy also reads the symbols of every library.
_NATIVE_SECONDS = 10.0
# How long to wait after killing py-spy, which may hang together with the process that it reads.
_KILL_SECONDS = 1.0
# One sample is not enough: if a Python loop spends half its time in C functions, half of the
# samples find it there.
_NATIVE_SAMPLES = 3
MAX_FRAMES = 256
# These libraries are ignored, because all Python code calls them, for example to allocate or copy
# memory or to read a clock.
_C_LIBRARY = re.compile(r"lib(?:c|m|pthread)[-.]|ld-|\[vdso\]")
_INTERPRETER = re.compile(r"(?:lib)?(?:python|pypy)\d")


def find_py_spy() -> str:
    """Return the path of py-spy, next to this interpreter or on PATH; empty if it is missing."""
    beside_interpreter = shutil.which("py-spy", path=str(Path(sys.executable).parent))
    return beside_interpreter or shutil.which("py-spy") or ""


@dataclass(frozen=True, slots=True)
class NativeFunction:
    """A native function in a stack.

    Args:
        name: Name of the function, or of its library if the function's name is unknown.
        home: Identifies the function when samples are compared. Usually this is the library,
            because not all functions have names, and because py-spy often finds only the innermost
            function of MKL. For functions of the interpreter itself, it is the function's name.
    """

    name: str
    home: str


class PySpy:
    """Runs py-spy on other processes.

    Args:
        program: Path of py-spy; empty if it is not installed.
    """

    def __init__(self, program: str) -> None:
        self._program = program

    def read_threads(self, pid: int, *, is_stopped: bool) -> tuple[ThreadSample, ...] | None:
        """Return the threads of a process, or None if py-spy is missing, not permitted or fails."""
        dump = self._dump(pid, ["--nonblocking"], _DUMP_SECONDS)
        if dump is None and not is_stopped:
            # Without pausing the process, py-spy may have found an inconsistent stack. Let it pause
            # the process, which is impossible if the process is already stopped.
            dump = self._dump(pid, [], _DUMP_SECONDS)
        if dump is None:
            return None
        return tuple(_parse_thread(thread) for thread in dump)

    def read_native_functions(
        self, pid: int, python_line: int, pause: Callable[[], None]
    ) -> tuple[str, ...] | None:
        """Return the native functions in which the main thread stays, innermost first.

        A Python loop also calls C functions briefly, so a function is returned only if its library
        appears in several consecutive samples. The result is empty if the innermost Python line has
        changed, because the thread is then making progress.

        Args:
            pid: PID of the process.
            python_line: Line of the innermost Python frame in the previous samples.
            pause: Waits between two samples.

        Returns:
            Names of functions, or of their libraries if the names are unknown; None if py-spy
            fails.
        """
        if not self._program:
            return None
        names: tuple[str, ...] | None = None
        common_homes: set[str] | None = None
        for number in range(_NATIVE_SAMPLES):
            if number > 0:
                pause()
            main_thread = self._dump_main_thread(pid)
            if main_thread is None:
                break
            functions = _native_functions(main_thread, python_line)
            homes = {function.home for function in functions}
            common_homes = homes if common_homes is None else common_homes & homes
            staying = [function.name for function in functions if function.home in common_homes]
            names = tuple(staying[:MAX_FRAMES])
            if not names:
                break
        return names

    def _dump_main_thread(self, pid: int) -> dict[str, Any] | None:
        for thread in self._dump(pid, ["--native"], _NATIVE_SECONDS) or ():
            if thread.get("os_thread_id") == pid:
                return thread
        return None

    def _dump(self, pid: int, options: list[str], seconds: float) -> list[dict[str, Any]] | None:
        """Run ``py-spy dump`` and return the threads, or None if it fails or takes too long."""
        command = [self._program, "dump", "--json", *options, "--pid", str(pid)]
        try:
            child = subprocess.Popen(  # noqa: S603 - a known program and a number
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError:
            # py-spy is not installed.
            return None
        try:
            output, _ = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            with suppress(subprocess.TimeoutExpired):
                child.communicate(timeout=_KILL_SECONDS)
            return None
        except OSError:
            return None
        if child.returncode != 0:
            return None
        return _parse_dump(output)


def _parse_dump(output: bytes) -> list[dict[str, Any]] | None:
    try:
        threads = json.loads(output)
    except (ValueError, RecursionError):
        return None
    is_dump = isinstance(threads, list) and all(isinstance(thread, dict) for thread in threads)
    # An empty list of threads is useless, so treat it as a failure.
    return threads if is_dump and threads else None


def _parse_frames(thread: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [frame for frame in thread.get("frames") or () if isinstance(frame, dict)]


def _parse_thread(thread: Mapping[str, Any]) -> ThreadSample:
    frames = [
        Frame(
            file=clean_name(str(frame.get("filename"))),
            line=int(frame.get("line") or 0),
            function=clean_name(str(frame.get("name"))),
        )
        for frame in _parse_frames(thread)[:MAX_FRAMES]
    ]
    return ThreadSample(
        tid=int(thread.get("os_thread_id") or 0),
        name=clean_name(str(thread.get("thread_name") or "")),
        is_main=thread.get("os_thread_id") == thread.get("pid"),
        # py-spy lists the innermost frame first.
        frames=tuple(reversed(frames)),
        holds_gil=bool(thread.get("owns_gil")),
    )


def _native_functions(thread: Mapping[str, Any], python_line: int) -> list[NativeFunction]:
    """Return the native functions that the innermost Python frame has called, innermost first.

    The result is empty if that frame is not at `python_line`. Functions of the C library and of the
    kernel are ignored.
    """
    functions: list[NativeFunction] = []
    for frame in _parse_frames(thread):
        name = clean_name(str(frame.get("name")))
        library = clean_name(Path(str(frame.get("module") or "")).name)
        # A frame without a library is a Python frame, unless its file is "?", which means machine
        # code that was not loaded from a file.
        if not library and frame.get("filename") != "?":
            return functions if frame.get("line") == python_line else []
        if library and not _C_LIBRARY.match(library):
            is_interpreter = _INTERPRETER.match(library) is not None
            functions.append(
                NativeFunction(
                    name=library if name.startswith("0x") else name,
                    home=name if is_interpreter else library,
                )
            )
    return functions
