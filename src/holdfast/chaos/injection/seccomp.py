"""Suspend system calls of the training processes until the campaign has decided about them.

A training process calls `ask_before` to install a seccomp filter. From then on, the kernel suspends
each of its calls of a kind, such as its writes. A `CallListener` of the campaign receives the
suspended call, and lets it continue or makes it fail.

The filter needs Linux 5.7 or later, but no privileges. A filter sees only numbers and addresses,
but no paths or file sizes, so the listener looks these up. The constants are from
``linux/seccomp.h``, ``linux/audit.h``, ``linux/filter.h`` and ``linux/prctl.h``, and the
system-call numbers are from ``asm/unistd.h``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Calls(StrEnum):
    """The kinds of system calls that the kernel can suspend until the campaign has decided."""

    READ = "read"
    WRITE = "write"
    # All calls that change a file or folder: writes, and calls such as rename and unlink.
    CHANGE = "change"


@dataclass(frozen=True, slots=True)
class PathCall:
    """A system call that changes a folder.

    Args:
        verb: What it does, such as ``"rename"``.
        path_arguments: The positions of the arguments that point to a path.
        has_folder_arguments: Whether the argument before each path is the descriptor of the folder
            that a relative path refers to.
    """

    verb: str
    path_arguments: tuple[int, ...]
    has_folder_arguments: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The system-call numbers on one processor architecture.

    Args:
        audit_architecture: The constant ``AUDIT_ARCH_...`` by which a filter recognizes the
            architecture.
        seccomp: The number of the system call ``seccomp``.
        writes: The numbers of the system calls that write to a file or change its size.
        reads: The numbers of the system calls that read from a file.
        path_calls: The system calls that change a folder, by their numbers.
    """

    audit_architecture: int
    seccomp: int
    writes: tuple[int, ...]
    reads: tuple[int, ...]
    path_calls: dict[int, PathCall]

    def numbers(self, calls: Calls) -> tuple[int, ...]:
        """Return the numbers of the system calls of a kind."""
        if calls == Calls.READ:
            return self.reads
        if calls == Calls.WRITE:
            return self.writes
        return (*self.writes, *self.path_calls)


# In `writes`: write, pwrite64, writev, pwritev, pwritev2, sendfile, copy_file_range, ftruncate.
# In `reads`: read, pread64, readv, preadv, preadv2.
ARCHITECTURES = {
    "x86_64": Architecture(
        audit_architecture=0xC000003E,
        seccomp=317,
        writes=(1, 18, 20, 296, 328, 40, 326, 77),
        reads=(0, 17, 19, 295, 327),
        path_calls={
            76: PathCall("truncate", (0,), has_folder_arguments=False),
            82: PathCall("rename", (0, 1), has_folder_arguments=False),
            83: PathCall("create the folder", (0,), has_folder_arguments=False),
            84: PathCall("remove the folder", (0,), has_folder_arguments=False),
            86: PathCall("link", (0, 1), has_folder_arguments=False),
            87: PathCall("remove", (0,), has_folder_arguments=False),
            88: PathCall("create the link", (1,), has_folder_arguments=False),
            258: PathCall("create the folder", (1,)),
            263: PathCall("remove", (1,)),
            264: PathCall("rename", (1, 3)),
            265: PathCall("link", (1, 3)),
            266: PathCall("create the link", (2,)),
            316: PathCall("rename", (1, 3)),
        },
    ),
    "aarch64": Architecture(
        audit_architecture=0xC00000B7,
        seccomp=277,
        writes=(64, 68, 66, 70, 287, 71, 285, 46),
        reads=(63, 67, 65, 69, 286),
        path_calls={
            34: PathCall("create the folder", (1,)),
            35: PathCall("remove", (1,)),
            36: PathCall("create the link", (2,)),
            37: PathCall("link", (1, 3)),
            38: PathCall("rename", (1, 3)),
            45: PathCall("truncate", (0,), has_folder_arguments=False),
            276: PathCall("rename", (1, 3)),
        },
    ),
}
# In `path_calls`, for x86-64: truncate, rename, mkdir, rmdir, link, unlink, symlink, mkdirat,
# unlinkat, renameat, linkat, symlinkat, renameat2. arm64 has only the newer ones, and truncate.
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

# The opcodes of the filter's instructions.
LOAD_WORD = 0x20
JUMP_IF_EQUAL = 0x15
RETURN = 0x06
# The offsets of fields in struct seccomp_data, which is the input of a filter.
CALL_OFFSET = 0
ARCHITECTURE_OFFSET = 4


@contextmanager
def socket_address(folder: Path) -> Iterator[str]:
    """Provide a short address for a listener's socket in a folder.

    A socket address has at most 107 bytes, but the folder's path may be longer. The address, which
    is valid while the ``with`` block runs, refers to the folder by a descriptor instead.
    """
    descriptor = os.open(folder, os.O_PATH)
    try:
        yield f"/proc/self/fd/{descriptor}/listener"
    finally:
        os.close(descriptor)


def ask_before(calls: Calls, folder: Path) -> None:
    """Make the kernel ask a `CallListener` before each system call of a kind of this process.

    The filter that does so applies to all threads and future children of the process, and cannot be
    removed.

    Args:
        calls: The kind of calls.
        folder: The trace folder of the attempt, in which the listener has created its socket.

    Raises:
        OSError: If no filter can be installed, or if the process already has a filter with a
            listener.
    """
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None:
        raise OSError(errno.ENOSYS, f"not supported on {platform.machine()}")
    numbers = architecture.numbers(calls)
    with socket.socket(socket.AF_UNIX) as connection, socket_address(folder) as address:
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
