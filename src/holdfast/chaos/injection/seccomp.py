"""Simulate a full or failing disk by refusing system calls of the training processes.

A training process calls `ask_before` to set a seccomp filter. From then on, the kernel suspends
each of its writes (or reads) until the campaign has decided about the call. The campaign's
`Refuser` inspects the file, and then lets the call fail or continue.

The filter needs Linux 5.7 and no privileges. A filter sees only numbers and addresses, but no paths
and no file sizes, so `Refuser` looks these up. The constants are from ``linux/seccomp.h``,
``linux/audit.h``, ``linux/filter.h`` and ``linux/prctl.h``, and the numbers of system calls are
from ``asm/unistd.h``.
"""

from __future__ import annotations

import ctypes
import errno
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
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from stat import S_ISREG

from holdfast.chaos.injection.plan import AttemptPlan


class Calls(StrEnum):
    """The kinds of system calls that the kernel can suspend until the campaign has decided."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The numbers of system calls on one processor architecture.

    Args:
        audit_architecture: The constant ``AUDIT_ARCH_...``, by which a filter recognizes the
            architecture.
        seccomp: Number of the system call ``seccomp``.
        writes: Numbers of the system calls that write to a file or extend it.
        reads: Numbers of the system calls that read.
    """

    audit_architecture: int
    seccomp: int
    writes: tuple[int, ...]
    reads: tuple[int, ...]


# In `writes`: write, pwrite64, writev, pwritev, pwritev2, sendfile, copy_file_range, ftruncate.
# In `reads`: read, pread64, readv, preadv, preadv2.
ARCHITECTURES = {
    "x86_64": Architecture(
        audit_architecture=0xC000003E,
        seccomp=317,
        writes=(1, 18, 20, 296, 328, 40, 326, 77),
        reads=(0, 17, 19, 295, 327),
    ),
    "aarch64": Architecture(
        audit_architecture=0xC00000B7,
        seccomp=277,
        writes=(64, 68, 66, 70, 287, 71, 285, 46),
        reads=(63, 67, 65, 69, 286),
    ),
}
# Numbers of copy_file_range, whose third argument is the file to write to. The other calls take the
# file as their first argument.
COPY_FILE_RANGE = (326, 285)
# Numbers of ftruncate, whose second argument is the new size of the file.
FTRUNCATE = (77, 46)

PR_SET_NO_NEW_PRIVS = 38
SECCOMP_SET_MODE_FILTER = 1
# TSYNC: the filter applies to all threads. SPEC_ALLOW: do not slow down threads with mitigations
# against speculative execution. NEW_LISTENER: return a descriptor that receives the suspended
# calls. TSYNC_ESRCH: fail with ESRCH if the filter cannot be applied to some thread.
SECCOMP_FILTER_FLAGS = 1 | 4 | 8 | 16
SECCOMP_RET_ALLOW = 0x7FFF0000
SECCOMP_RET_USER_NOTIF = 0x7FC00000
SECCOMP_USER_NOTIF_FLAG_CONTINUE = 1
SECCOMP_IOCTL_NOTIF_RECV = 0xC0502100
SECCOMP_IOCTL_NOTIF_SEND = 0xC0182101
# struct seccomp_notif: id, pid, flags, call, architecture, instruction pointer, six arguments.
NOTIFICATION = struct.Struct("QIIiIQ6Q")
# struct seccomp_notif_resp: id, return value, error, flags.
RESPONSE = struct.Struct("QqiI")

# Codes of the filter's instructions.
LOAD_WORD = 0x20
JUMP_IF_EQUAL = 0x15
RETURN = 0x06
# Offsets of fields in struct seccomp_data, the input of a filter.
CALL_OFFSET = 0
ARCHITECTURE_OFFSET = 4

# How often the thread of a `Refuser` checks whether it should end.
POLL_MILLISECONDS = 50


@contextmanager
def _socket_address(folder: Path) -> Iterator[str]:
    """Provide a short address for the socket in a folder.

    A socket address has at most 107 bytes, but the folder's path may be longer.
    """
    descriptor = os.open(folder, os.O_PATH)
    try:
        yield f"/proc/self/fd/{descriptor}/refuser"
    finally:
        os.close(descriptor)


def ask_before(calls: Calls, folder: Path) -> None:
    """Make the kernel ask a `Refuser` before each write or read of this process.

    The filter applies to all threads and future children of the process, and cannot be removed.

    Args:
        calls: The kind of system calls to ask about.
        folder: The trace folder of the attempt, where the `Refuser` listens.

    Raises:
        OSError: If no filter can be set, or if the process already has a filter with a listener.
    """
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None:
        raise OSError(errno.ENOSYS, f"not supported on {platform.machine()}")
    numbers = architecture.writes if calls == Calls.WRITE else architecture.reads
    with socket.socket(socket.AF_UNIX) as connection, _socket_address(folder) as address:
        connection.connect(address)
        listener = _set_filter(architecture, _filter_program(architecture, numbers))
        socket.send_fds(connection, [b"x"], [listener])
        os.close(listener)


def _filter_program(
    architecture: Architecture, numbers: tuple[int, ...]
) -> list[tuple[int, int, int, int]]:
    """Return the instructions of a filter that asks before some system calls and allows all others.

    An instruction is (code, number of instructions to skip if true, the same if false, operand).
    """
    instructions = [
        (LOAD_WORD, 0, 0, ARCHITECTURE_OFFSET),
        (JUMP_IF_EQUAL, 1, 0, architecture.audit_architecture),
        (RETURN, 0, 0, SECCOMP_RET_ALLOW),
        (LOAD_WORD, 0, 0, CALL_OFFSET),
    ]
    for index, number in enumerate(numbers):
        # Skip the remaining comparisons and the RETURN after them, to reach the last instruction.
        instructions_to_ask = len(numbers) - index
        instructions.append((JUMP_IF_EQUAL, instructions_to_ask, 0, number))
    instructions.append((RETURN, 0, 0, SECCOMP_RET_ALLOW))
    instructions.append((RETURN, 0, 0, SECCOMP_RET_USER_NOTIF))
    return instructions


def _set_filter(architecture: Architecture, instructions: list[tuple[int, int, int, int]]) -> int:
    """Set a filter for this process and return the descriptor that receives suspended calls."""
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
    code_buffer = ctypes.create_string_buffer(code)
    # struct sock_fprog: number of instructions, address of the first one.
    program = struct.pack("HP", len(instructions), ctypes.addressof(code_buffer))
    program_buffer = ctypes.create_string_buffer(program)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(
        PR_SET_NO_NEW_PRIVS,
        ctypes.c_ulong(1),
        ctypes.c_ulong(0),
        ctypes.c_ulong(0),
        ctypes.c_ulong(0),
    )
    listener: int = libc.syscall(
        ctypes.c_long(architecture.seccomp),
        ctypes.c_long(SECCOMP_SET_MODE_FILTER),
        ctypes.c_long(SECCOMP_FILTER_FLAGS),
        ctypes.c_long(ctypes.addressof(program_buffer)),
    )
    if listener < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return listener


class Refuser:
    """Decides whether suspended system calls of an attempt fail, and counts the refused calls.

    A `Refuser` runs in a thread of the campaign.

    Args:
        folder: The trace folder of the attempt, in which to create the socket that processes
            connect to.
        plan: The plan of the attempt. The plan's injection has an `errno`, and either an
            `unreadable_file`, whose reads fail, or `size_bytes`, beyond which files in the
            workplace cannot grow.
    """

    def __init__(self, folder: Path, plan: AttemptPlan) -> None:
        assert plan.injection.errno is not None
        self._errno = plan.injection.errno
        self._injection = plan.injection
        self._writable_folders = plan.writable_folders
        self.refused_calls = 0
        self._closing = threading.Event()
        self._server = socket.socket(socket.AF_UNIX)
        with _socket_address(folder) as address:
            self._server.bind(address)
        self._server.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering. Call this only when all processes have ended."""
        self._closing.set()
        self._thread.join()

    def _serve(self) -> None:
        """Answer suspended calls until `close` is called."""
        server = self._server.fileno()
        poll = select.poll()
        poll.register(server, select.POLLIN)
        listeners: list[int] = []
        while not self._closing.is_set():
            for descriptor, event in poll.poll(POLL_MILLISECONDS):
                # The process that made the call may have been interrupted by a signal, or killed.
                with suppress(OSError):
                    if descriptor == server:
                        new_listeners = self._accept()
                        listeners += new_listeners
                        for listener in new_listeners:
                            poll.register(listener, select.POLLIN)
                    elif event & select.POLLIN:
                        self._answer(descriptor)
                    else:
                        # All processes with a filter have ended.
                        poll.unregister(descriptor)
        self._server.close()
        for listener in listeners:
            os.close(listener)

    def _accept(self) -> list[int]:
        """Return the listener of a newly connected process; empty if the process set no filter."""
        connection, _ = self._server.accept()
        with connection:
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        return list(descriptors)

    def _answer(self, listener: int) -> None:
        """Receive one suspended call, and let it fail or continue."""
        buffer = bytearray(NOTIFICATION.size)
        fcntl.ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, buffer)
        identity, process, _, call, _, _, *arguments = NOTIFICATION.unpack(buffer)
        refused = False
        # The process may have ended in the meantime.
        with suppress(OSError):
            refused = self._should_refuse(process, call, arguments)
        error = 0
        flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE
        if refused:
            self.refused_calls += 1
            error = -self._errno
            flags = 0
        fcntl.ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, RESPONSE.pack(identity, 0, error, flags))

    def _should_refuse(self, process: int, call: int, arguments: list[int]) -> bool:
        """Return whether a system call must fail.

        Args:
            process: PID of the process that makes the call.
            call: Number of the call.
            arguments: The six arguments of the call.
        """
        if self._injection.refuse_once and self.refused_calls:
            return False
        file_descriptor = arguments[2] if call in COPY_FILE_RANGE else arguments[0]
        file = Path(f"/proc/{process}/fd/{file_descriptor}")
        path = file.readlink()
        if self._injection.unreadable_file is not None:
            return path == Path(self._injection.unreadable_file)
        status = file.stat()
        if not S_ISREG(status.st_mode):
            return False
        if not any(path.is_relative_to(folder) for folder in self._writable_folders):
            return False
        # `ftruncate` writes up to its new size. A write is assumed to start at the end of the file.
        position = arguments[1] - 1 if call in FTRUNCATE else status.st_size
        assert self._injection.size_bytes is not None
        if position < self._injection.size_bytes:
            return False
        if self._injection.refuse_once:
            # The limit that `Injector` has set would also cut short the writes that follow.
            _, hard_limit = resource.prlimit(process, resource.RLIMIT_FSIZE)
            resource.prlimit(process, resource.RLIMIT_FSIZE, (hard_limit, hard_limit))
        return True
