"""One input in a process of its own.

Bounded in memory and time, and watched for what it must not do.

An audit hook sees each file that is opened to write, renamed or removed, each process and each
connection. What happens outside of the input's folder is a finding, and so is any error that is not
a clear one.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Of processor time, and of memory beside what was there before
MOST_SECONDS, MOST_BYTES = 20, 1 << 30
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MOVING = (
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "os.chown",
    "shutil.rmtree",
    "shutil.move",
)
_STARTING = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "pty.spawn",
    "socket.connect",
    "pickle.find_class",
)
_ALLOWED = ("/dev/null", f"{tempfile.gettempdir()}/torchinductor_")


def bound_memory(most: int) -> None:
    """Let this process have no more than so many bytes beside what it has."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, bound = resource.getrlimit(resource.RLIMIT_AS)
    limit = held + most if bound == resource.RLIM_INFINITY else min(held + most, bound)
    resource.setrlimit(resource.RLIMIT_AS, (limit, bound))


def watch(folder: Path) -> list[str]:
    """Return a list that will name whatever this process does outside of a folder."""
    found: list[str] = []
    inside, busy = f"{folder.resolve()}/", []

    def check(event: str, name: Any) -> None:
        path = (
            Path(os.fsdecode(name)).absolute()
            if isinstance(name, (str, bytes, os.PathLike))
            else folder
        )
        # A link at the end counts by where it lies, since nothing of ours follows it; one before it
        # is followed.
        real = f"{path.parent.resolve() / path.name}/"
        if not real.startswith((inside, *_ALLOWED)):
            found.append(f"{event} {path} ({real})")

    def see(event: str, given: tuple[Any, ...]) -> None:
        if busy or not (event == "open" or event in _MOVING or event in _STARTING):
            return
        busy.append(event)
        if event in _STARTING:
            found.append(f"{event} {given!r:.200}")
        elif event == "open" and not isinstance(given[0], int):
            if (given[2] or 0) & _WRITING or set(given[1] or "") & set("wax+"):
                check(event, given[0])
        elif event in _MOVING:
            for name in (
                given[:2]
                if event in ("os.rename", "os.link")
                else given[event == "os.symlink" :][:1]
            ):
                check(event, name)
        busy.clear()

    sys.addaudithook(see)
    return found


def run(
    folder: Path, work: Callable[[], str], *, allowed: tuple[type[BaseException], ...]
) -> dict[str, Any]:
    """Return what became of one input.

    Args:
        folder: Of the input, and all that may be written to.
        work: What a process that is forked for it does; it returns a word for the counts.
        allowed: Errors that are clear ones here.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            # A pipe takes that
            os.write(writing, _answer(folder, work, allowed).encode("utf-8", "replace")[:60_000])
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        # Much of which others may have
        in_time = bool(select.select([pipe], [], [], 10 * MOST_SECONDS)[0])
        if not in_time:
            os.kill(child, signal.SIGKILL)
        kind, _, text = pipe.read().decode("utf-8", "replace").partition("\n")
    _, status, used = os.wait4(child, 0)
    if not kind:
        kind, text = ("died" if in_time else "hang"), f"status {status}"
    return {
        "kind": kind,
        "text": text,
        "cpu": used.ru_utime + used.ru_stime,
        "resident": used.ru_maxrss << 10,
    }


def _answer(folder: Path, work: Callable[[], str], allowed: tuple[type[BaseException], ...]) -> str:
    bound_memory(MOST_BYTES)
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
    os.chdir(folder)
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    found = watch(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            kind = f"fine: {work()}"
    except allowed as error:
        kind = f"refused: {getattr(error, 'rule', type(error).__name__)}"
    except BaseException as error:  # noqa: BLE001 - that is what is looked for
        kind = "memory" if isinstance(error, MemoryError) else "bare"
        kind += "\n" + traceback.format_exc()[-3000:]
    return f"outside\n{found[:5]}\n{kind}" if found else kind
