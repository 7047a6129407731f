"""Receive the suspended system calls of an attempt, and decide about each.

See `seccomp` for the filter that suspends them. The constants are from ``linux/seccomp.h``.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.chaos.injection.plan import AttemptPlan
from holdfast.chaos.injection.seccomp import COPY_FILE_RANGE, socket_address

SECCOMP_USER_NOTIF_FLAG_CONTINUE = 1
SECCOMP_IOCTL_NOTIF_RECV = 0xC0502100
SECCOMP_IOCTL_NOTIF_SEND = 0xC0182101
# The layout of struct seccomp_notif: id, pid, flags, system-call number, architecture, instruction
# pointer, six arguments.
NOTIFICATION = struct.Struct("QIIiIQ6Q")
# The layout of struct seccomp_notif_resp: id, return value, error, flags.
RESPONSE = struct.Struct("QqiI")

# How often a listener's thread checks whether it should end.
POLL_MILLISECONDS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendedCall:
    """A system call that waits for a decision.

    Args:
        process: The PID of the process that makes the call.
        number: The number of the system call.
        arguments: The six arguments of the call.
    """

    process: int
    number: int
    arguments: tuple[int, ...]

    @property
    def open_file(self) -> Path:
        """Return the link in ``/proc`` to the open file that a read or write is about."""
        position = 2 if self.number in COPY_FILE_RANGE else 0
        return Path(f"/proc/{self.process}/fd/{self.arguments[position]}")


class CallListener(ABC):
    """Receives the suspended system calls of an attempt, in a thread of the campaign's process.

    Args:
        folder: The trace folder of the attempt. The listener creates a socket in this folder, to
            which the processes of the attempt connect.
        plan: The plan of the attempt.
    """

    def __init__(self, folder: Path, plan: AttemptPlan) -> None:
        self._folder = folder
        self._injection = plan.injection
        self._writable_folders = plan.writable_folders
        self._closing = threading.Event()
        self._server = socket.socket(socket.AF_UNIX)
        with socket_address(folder) as address:
            self._server.bind(address)
        self._server.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @abstractmethod
    def decide(self, call: SuspendedCall) -> int:
        """Return the error number with which a call fails, or 0 to let it continue.

        Raises:
            OSError: The process has ended in the meantime.
        """

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
        identity, process, _, number, _, _, *arguments = NOTIFICATION.unpack(buffer)
        call = SuspendedCall(process=process, number=number, arguments=tuple(arguments))
        error = 0
        # The process may have ended in the meantime.
        with suppress(OSError):
            error = self.decide(call)
        flags = 0 if error else SECCOMP_USER_NOTIF_FLAG_CONTINUE
        fcntl.ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, RESPONSE.pack(identity, 0, -error, flags))

    def _is_writable(self, path: Path) -> bool:
        """Return whether a path is in a folder that the script may write to."""
        return any(path.is_relative_to(folder) for folder in self._writable_folders)
