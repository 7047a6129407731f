"""Simulate a full or failing disk by making system calls of the training processes fail.

A training process calls `ask_before` to install a seccomp filter. From then on, the kernel suspends
each of its writes (or reads) until the campaign has decided whether the call fails. The campaign's
`Refuser` inspects the file, and then makes the call fail or lets it continue.

The filter needs Linux 5.7 or later, but no privileges. A filter sees only numbers and addresses,
but no paths or file sizes, so `Refuser` looks these up. The constants are from
``linux/seccomp.h``, ``linux/audit.h``, ``linux/filter.h`` and ``linux/prctl.h``, and the
system-call numbers are from ``asm/unistd.h``.
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
    """The system-call numbers on one processor architecture.

    Args:
        audit_architecture: The constant ``AUDIT_ARCH_...`` by which a filter recognizes the
            architecture.
        seccomp: The number of the system call ``seccomp``.
        writes: The numbers of the system calls that write to a file or change its size.
        reads: The numbers of the system calls that read from a file.
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
# The numbers of copy_file_range on both architectures. Its third argument is the file to write to,
# whereas the other calls take the file as their first argument.
COPY_FILE_RANGE = (326, 285)
# The numbers of ftruncate on both architectures. Its second argument is the new file size.
FTRUNCATE = (77, 46)

PR_SET_NO_NEW_PRIVS = 38
SECCOMP_SET_MODE_FILTER = 1
# 1 is TSYNC: apply the filter to all threads. 4 is SPEC_ALLOW: do not slow down threads with
# mitigations against speculative execution. 8 is NEW_LISTENER: return a descriptor that receives
# the suspended calls. 16 is TSYNC_ESRCH: fail with ESRCH if the filter cannot be applied to some
# thread.
SECCOMP_FILTER_FLAGS = 1 | 4 | 8 | 16
SECCOMP_RET_ALLOW = 0x7FFF0000
SECCOMP_RET_USER_NOTIF = 0x7FC00000
SECCOMP_USER_NOTIF_FLAG_CONTINUE = 1
SECCOMP_IOCTL_NOTIF_RECV = 0xC0502100
SECCOMP_IOCTL_NOTIF_SEND = 0xC0182101
# The layout of struct seccomp_notif: id, pid, flags, system-call number, architecture, instruction
# pointer, six arguments.
NOTIFICATION = struct.Struct("QIIiIQ6Q")
# The layout of struct seccomp_notif_resp: id, return value, error, flags.
RESPONSE = struct.Struct("QqiI")

# The opcodes of the filter's instructions.
LOAD_WORD = 0x20
JUMP_IF_EQUAL = 0x15
RETURN = 0x06
# The offsets of fields in struct seccomp_data, which is the input of a filter.
CALL_OFFSET = 0
ARCHITECTURE_OFFSET = 4

# How often a `Refuser`'s thread checks whether it should end.
POLL_MILLISECONDS = 50


@contextmanager
def _socket_address(folder: Path) -> Iterator[str]:
    """Provide a short address for the `Refuser`'s socket in a folder.

    A socket address has at most 107 bytes, but the folder's path may be longer. The address, which
    is valid while the ``with`` block runs, refers to the folder by a descriptor instead.
    """
    descriptor = os.open(folder, os.O_PATH)
    try:
        yield f"/proc/self/fd/{descriptor}/refuser"
    finally:
        os.close(descriptor)


def ask_before(calls: Calls, folder: Path) -> None:
    """Make the kernel ask a `Refuser` before each write or read of this process.

    The filter that does so applies to all threads and future children of the process, and cannot be
    removed.

    Args:
        calls: Whether the kernel asks before writes or before reads.
        folder: The trace folder of the attempt, in which the `Refuser` has created its socket.

    Raises:
        OSError: If no filter can be installed, or if the process already has a filter with a
            listener.
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

    Args:
        architecture: The architecture to which the system-call numbers belong.
        numbers: The numbers of the system calls to ask about.

    Returns:
        The instructions. Each is a tuple of an opcode, the number of instructions to skip if the
            comparison is true, the number to skip if it is false, and an operand.
    """
    instructions = [
        (LOAD_WORD, 0, 0, ARCHITECTURE_OFFSET),
        (JUMP_IF_EQUAL, 1, 0, architecture.audit_architecture),
        (RETURN, 0, 0, SECCOMP_RET_ALLOW),
        (LOAD_WORD, 0, 0, CALL_OFFSET),
    ]
    for index, number in enumerate(numbers):
        # On a match, skip the remaining comparisons and the RETURN after them, to reach the last
        # instruction, which asks.
        instructions_to_ask = len(numbers) - index
        instructions.append((JUMP_IF_EQUAL, instructions_to_ask, 0, number))
    instructions.append((RETURN, 0, 0, SECCOMP_RET_ALLOW))
    instructions.append((RETURN, 0, 0, SECCOMP_RET_USER_NOTIF))
    return instructions


def _set_filter(architecture: Architecture, instructions: list[tuple[int, int, int, int]]) -> int:
    """Install a filter in this process, and return the descriptor that receives suspended calls."""
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
    code_buffer = ctypes.create_string_buffer(code)
    # The layout of struct sock_fprog: number of instructions, address of the first instruction.
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

    A `Refuser` runs in a thread of the campaign's process.

    Args:
        folder: The trace folder of the attempt. The `Refuser` creates a socket in this folder, to
            which the processes of the attempt connect.
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
        """Stop answering. Call this method only after all processes of the attempt have ended."""
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
                # Answering fails if the process that made the call was killed or was interrupted by
                # a signal in the meantime.
                with suppress(OSError):
                    if descriptor == server:
                        new_listeners = self._accept()
                        listeners += new_listeners
                        for listener in new_listeners:
                            poll.register(listener, select.POLLIN)
                    elif event & select.POLLIN:
                        self._answer(descriptor)
                    else:
                        # All processes with the filter of this listener have ended.
                        poll.unregister(descriptor)
        self._server.close()
        for listener in listeners:
            os.close(listener)

    def _accept(self) -> list[int]:
        """Return a newly connected process's listener in a list, empty if it has set no filter."""
        connection, _ = self._server.accept()
        with connection:
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        return list(descriptors)

    def _answer(self, listener: int) -> None:
        """Receive one suspended call, and either make it fail or let it continue."""
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
            process: The PID of the process that makes the call.
            call: The number of the system call.
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
        # `ftruncate` extends a file up to its new size, so its last byte is at the new size minus
        # 1. A write is assumed to start at the end of the file.
        position = arguments[1] - 1 if call in FTRUNCATE else status.st_size
        assert self._injection.size_bytes is not None
        if position < self._injection.size_bytes:
            return False
        if self._injection.refuse_once:
            # Lift the file size limit that `Injector` has set, which would also cut short the
            # writes that follow.
            _, hard_limit = resource.prlimit(process, resource.RLIMIT_FSIZE)
            resource.prlimit(process, resource.RLIMIT_FSIZE, (hard_limit, hard_limit))
        return True
