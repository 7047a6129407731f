"""A full or a failing disk.

A seccomp filter stops writes or reads of a trial's processes until `Refuser` has looked.

The filter needs Linux 5.7 and no privileges; it sees neither paths nor sizes. `Refuser` is in the
campaign's process.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import resource
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any

# By machine: its number for the kernel, that of seccomp, and of the calls; ftruncate is among those
# that write.
_MACHINES: dict[str, tuple[int, int, dict[str, tuple[int, ...]]]] = {
    "x86_64": (
        0xC000003E,
        317,
        {"write": (1, 18, 20, 296, 328, 40, 326, 77), "read": (0, 17, 19, 295, 327)},
    ),
    "aarch64": (
        0xC00000B7,
        277,
        {"write": (64, 68, 66, 70, 287, 71, 285, 46), "read": (63, 67, 65, 69, 286)},
    ),
}
# The third argument is the file, the second is its size
_COPY_RANGE, _TRUNCATE = (326, 285), (77, 46)
# All threads, none slowed down, one who is asked
_NO_NEW_PRIVILEGES, _SET_FILTER, _FLAGS = 38, 1, 1 | 4 | 8 | 16
_ALLOW, _ASK, _CONTINUE = 0x7FFF0000, 0x7FC00000, 1
_RECEIVE, _ANSWER, _QUESTION = 0xC0502100, 0xC0182101, "QIIiIQ6Q"


@contextmanager
def _address(folder: Path) -> Iterator[str]:
    """Give the address of a folder's socket, which may have 107 bytes: not the path."""
    held = os.open(folder, os.O_PATH)
    try:
        yield f"/proc/self/fd/{held}/refuser"
    finally:
        os.close(held)


def ask_before(which: str, folder: Path) -> None:
    """Have the kernel ask the `Refuser` of a folder before each call that writes (``write``) or
    reads (``read``).

    This holds for all threads and children. OSError if no filter can be set, or one that asks is
    set already.
    """
    machine, seccomp, calls = _MACHINES.get(platform.machine(), (0, 0, {which: ()}))
    numbers = calls[which]
    code = [(0x20, 0, 0, 4), (0x15, 1, 0, machine), (0x06, 0, 0, _ALLOW), (0x20, 0, 0, 0)]
    code += [(0x15, len(numbers) - at, 0, each) for at, each in enumerate(numbers)]
    code += [(0x06, 0, 0, _ALLOW), (0x06, 0, 0, _ASK)]
    lines = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
    program = ctypes.create_string_buffer(struct.pack("HP", len(code), ctypes.addressof(lines)))
    libc = ctypes.CDLL(None, use_errno=True)
    with socket.socket(socket.AF_UNIX) as asked, _address(folder) as address:
        asked.connect(address)
        libc.prctl(_NO_NEW_PRIVILEGES, *map(ctypes.c_ulong, (1, 0, 0, 0)))
        given = map(ctypes.c_long, (seccomp or -1, _SET_FILTER, _FLAGS, ctypes.addressof(program)))
        if (questions := libc.syscall(*given)) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        socket.send_fds(asked, [b"x"], [questions])
        os.close(questions)


class Refuser:
    """Answers for the processes of one attempt, and counts what it has refused.

    The plan of the attempt says ``errno``, and ``path``: the file of which a read fails; or
        ``bytes``: no file in the
    directories ``inside`` grows that is as large. With ``once``, that happens once, and there is no
    limit then.
    """

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self._plan, self.refused, self._over = plan, 0, threading.Event()
        self._server = socket.socket(socket.AF_UNIX)
        with _address(folder) as address:
            self._server.bind(address)
        self._server.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it, after all processes."""
        self._over.set()
        self._thread.join()

    def _serve(self) -> None:
        poll, held = select.poll(), list[int]()
        poll.register(self._server, select.POLLIN)
        while not self._over.is_set():
            for number, event in poll.poll(50):
                with suppress(OSError):  # whoever asked has met a signal, or has ended
                    if number == self._server.fileno():
                        with self._server.accept()[0] as asking:
                            # None if no filter could be set
                            held += (new := socket.recv_fds(asking, 1, 1)[1])
                        for each in new:
                            poll.register(each, select.POLLIN)
                    elif event & select.POLLIN:
                        self._answer(number)
                    else:  # all who could ask have ended
                        poll.unregister(number)
        for number in (self._server.detach(), *held):
            os.close(number)

    def _answer(self, number: int) -> None:
        question, refused = bytearray(struct.calcsize(_QUESTION)), False
        fcntl.ioctl(number, _RECEIVE, question)
        identity, process, _, call, _, _, *given = struct.unpack(_QUESTION, question)
        with suppress(OSError):
            refused = not (self._plan.get("once") and self.refused) and self._is_refused(
                process, call, given
            )
        self.refused += refused
        code, flags = (-int(self._plan["errno"]), 0) if refused else (0, _CONTINUE)
        fcntl.ioctl(number, _ANSWER, struct.pack("QqiI", identity, 0, code, flags))

    def _is_refused(self, process: int, call: int, given: list[int]) -> bool:
        file = Path(f"/proc/{process}/fd/{given[2 if call in _COPY_RANGE else 0]}")
        path, about = file.readlink(), file.stat()
        if "path" in self._plan:
            return path == Path(self._plan["path"])
        size = given[1] - 1 if call in _TRUNCATE else about.st_size
        inside = any(path.is_relative_to(each) for each in self._plan["inside"])
        refused = inside and S_ISREG(about.st_mode) and size >= self._plan["bytes"]
        if refused and self._plan.get("once"):
            _, hard = resource.prlimit(process, resource.RLIMIT_FSIZE)
            resource.prlimit(process, resource.RLIMIT_FSIZE, (hard, hard))
        return bool(refused)
