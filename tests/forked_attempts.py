"""`holdfast run` whose attempts are forked from a process that has loaded torch.

Each attempt would otherwise import torch, which takes some seconds. For tests of a training script
under a supervisor that are not about how a process starts.

The supervisor is a process of its own, as usual. Before it begins, it forks a server, and whenever
it starts a Python command, the server forks the attempt: as a child of the supervisor, in a session
of its own, and observed. What `tests.prepared` says about started programs applies to attempts too.
In addition, an attempt has no mark in its initial environment, so that the supervisor finds its
processes as descendants only.

    process = supervise_forked(["--run-dir", run, "--", sys.executable, "train.py"], cwd=folder)
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_ROOT = Path(__file__).parents[1]
# From linux/sched.h: the new process is a child of the caller's parent.
_CLONE_PARENT = 0x00008000
_CLONE_CALL = {"x86_64": 56, "aarch64": 220}
# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    sys.path[0] = str(_ROOT)

from tests.prepared import Forked, Prepared, become, receive, run_prepared  # noqa: E402


def supervise_forked(arguments: Sequence[object], **given: Any) -> Prepared:
    """Start `holdfast run` with these arguments; `given` are those of `Prepared`."""
    return Prepared([__file__, "run", *arguments], **given)


def run_supervised(
    arguments: Sequence[object], *, timeout: float, **given: Any
) -> subprocess.CompletedProcess[Any]:
    """Run `holdfast run` to its end, as `tests.prepared.run_prepared` does."""
    return run_prepared([__file__, "run", *arguments], timeout=timeout, **given)


def _serve_attempts(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request; return in an attempt, with its request and streams."""
    os.setsid()  # Ctrl-C is for the supervisor
    supervisor = os.getppid()
    while True:
        data, (*streams, status) = receive(channel)
        attempt = _fork_sibling()
        if attempt == 0:
            channel.close()
            os.close(status)
            _die_with_parent(supervisor)
            return json.loads(data), streams
        os.write(status, b"%d\n" % attempt)
        for number in (*streams, status):
            os.close(number)


def _fork_sibling() -> int:
    """Fork as `os.fork`, but as a child of this process's parent."""
    call = _CLONE_CALL[os.uname().machine]
    python = ctypes.pythonapi
    libc = ctypes.PyDLL(None)
    python.PyOS_BeforeFork()
    pid: int = libc.syscall(call, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    assert pid >= 0, "the kernel has refused the fork"
    return pid


def _die_with_parent(supervisor: int) -> None:
    """Do what `holdfast.supervise.launch.child_start` does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:
        os._exit(1)


def _supervise(server: socket.socket) -> None:
    """Be `holdfast run`, with the server for Python commands."""
    from holdfast.cli.main import main
    from holdfast.supervise.launch import child_start, commands

    class Attempt(Forked):
        def _connect(self) -> socket.socket:
            return server

    def start(command: list[str], **given: Any) -> subprocess.Popen[Any]:
        if child_start.__file__ not in command:
            return subprocess.Popen(command, **given)
        words = command[command.index(child_start.__file__) + 3 :]
        assert words[0] == sys.executable
        return Attempt(words[1:], **given)

    commands.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=start, DEVNULL=subprocess.DEVNULL
    )
    sys.argv[0] = "holdfast"
    main()


def _main() -> None:
    ours, servers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        servers.close()
        _supervise(ours)
        return
    ours.close()
    become(*_serve_attempts(servers))


if __name__ == "__main__":
    _main()
