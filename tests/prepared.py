"""Starts programs from a process that has loaded torch, for tests that start many.

Each import takes some seconds.

A started program is a process of its own, as `subprocess.Popen` starts it, with its own signals,
streams, exit code and end of the interpreter. It is forked from one that has computed nothing, had
no thread and seen no test. What it does not have of its own is what an interpreter settles at its
start: ``PYTHON...`` variables, options and the seed of hashes. One that is observed is from where
its script begins: torch is there already. A test that is about these, or compares processes in
which they should differ, starts one of them as usual.

    process = Prepared(["train.py", "--steps", "3"], stdout=subprocess.PIPE, text=True)
    process.send_signal(signal.SIGKILL)
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

_LOADED = (
    "torch",
    "numpy",
    "holdfast",
    "torch._dynamo",  # imported by the first step of an optimizer
    "holdfast.guard.guard",
    "holdfast.forecast.job.building",
    "holdfast.forecast.fake.device",
    "holdfast.forecast.job.training_job",
    "holdfast.forecast.trace.tracer",
    "holdfast.forecast.kernels.scratch_cpu",
    "holdfast.cli.run",  # see `forked_attempts`
)
FRAMEWORKS = (
    *_LOADED[:5],
    "transformers.trainer",
    "holdfast.integrations.transformers.trainer",
    "lightning.pytorch",
    "holdfast.integrations.lightning",
    "accelerate",
    "holdfast.integrations.accelerate",
)
"""What a process may have loaded that is started for a framework."""
WITHOUT_HOLDFAST = ("torch", "numpy", "torch._dynamo")
"""What a process may have loaded whose script imports holdfast where it is observed."""

_starting = threading.Lock()


class Forked(subprocess.Popen[Any]):
    """A `subprocess.Popen` of Python with given arguments, which a server forks.

    `given` are ``stdin``, ``stdout``, ``stderr``, ``env``, ``cwd``, ``text`` and
    ``start_new_session`` of `Popen`.
    """

    def __init__(self, arguments: Sequence[object], **given: Any) -> None:
        super().__init__(list(map(str, arguments)), **given)

    def _connect(self) -> socket.socket:
        """Return the connection to the server."""
        raise NotImplementedError

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec: Any,
        close: Any,
        passed: Any,
        cwd: Any,
        env: Any,
        info: Any,
        flags: Any,
        shell: Any,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        restore: Any,
        *rest: Any,
    ) -> None:
        """Have the server fork, in place of forking here."""
        started_session = bool(rest[4])
        told, status = os.pipe()
        standard = [
            own if own != -1 else number for number, own in enumerate((p2cread, c2pwrite, errwrite))
        ]
        request = {
            "arguments": args,
            "cwd": os.fspath(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
            "session": started_session,
        }
        with _starting:
            server = self._connect()
        socket.send_fds(server, [json.dumps(request).encode()], [*standard, status])
        os.close(status)
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]
        self._child_created = True
        self._told = os.fdopen(told, "rb")
        self.pid = int(self._told.readline())


class Prepared(Forked):
    """A `Forked` from a process that has loaded some modules, as far as they are installed."""

    def __init__(
        self, arguments: Sequence[object], *, loaded: tuple[str, ...] = _LOADED, **given: Any
    ) -> None:
        self._loaded = loaded
        super().__init__(arguments, **given)

    def _connect(self) -> socket.socket:
        return _server(self._loaded)

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], 0)[0]:
            self._wait(None)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            if not select.select(
                [self._told], [], [], None if timeout is None else max(0.0, timeout)
            )[0]:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = os.waitstatus_to_exitcode(int(self._told.readline()))
            self._told.close()
        return self.returncode


def run_prepared(
    arguments: Sequence[object], *, timeout: float, **given: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a program to its end, as `subprocess.run` with ``capture_output`` and ``text``.

    Kill it at a timeout.
    """
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Prepared(arguments, **{**streams, **given}) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def prepare_forecasts(patch: pytest.MonkeyPatch) -> None:
    """Have the processes that `tracing.trace_job` starts forked from one that has loaded what
    they import.
    """

    def start(command: list[str], **given: Any) -> Prepared:
        assert command[0] == sys.executable
        return Prepared(command[1:], **given)

    used = SimpleNamespace(
        Popen=start, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    patch.setattr("holdfast.forecast.job.tracing.subprocess", used)


@cache
def _server(loaded: tuple[str, ...]) -> socket.socket:
    """Return the connection to a prepared process.

    It ends when that is closed, as it is when this process ends.
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        command = [sys.executable, __file__, str(there.fileno()), *loaded]
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")
        }
        nothing = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        subprocess.run(
            command,
            cwd="/",
            env={**kept, "OMP_NUM_THREADS": "1"},
            pass_fds=[there.fileno()],
            check=True,
            **nothing,
        )
    return here


def _serve(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request, and tell how each child ended.

    Return in a child, with its request and streams.
    """
    if os.fork():
        os._exit(0)  # it is no child of the tests' process: tests look at that one's children
    os.setsid()  # Ctrl-C is for the tests
    for name in sys.argv[2:]:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.freeze()  # what is loaded is neither looked through nor copied when a child collects garbage
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would lose the other threads"
    running: dict[int, tuple[int, int]] = {}
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in running:
                poll.unregister(ready)
                _tell_the_end(ready, *running.pop(ready))
                continue
            data, (*streams, status) = receive(channel)
            child = os.fork()
            if child == 0:
                channel.close()
                for number in (status, *running, *(other for _, other in running.values())):
                    os.close(number)
                return json.loads(data), streams
            for number in streams:
                os.close(number)
            os.write(status, b"%d\n" % child)
            descriptor = os.pidfd_open(child)
            running[descriptor] = (child, status)
            poll.register(descriptor, select.POLLIN)


def receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Return a request and its descriptors; exit if nobody is left who could make one."""
    data, descriptors, *_ = socket.recv_fds(channel, 1 << 20, 4)
    if not data:
        os._exit(0)
    return data, descriptors


def _tell_the_end(descriptor: int, child: int, status: int) -> None:
    _, ended = os.waitpid(child, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(status, b"%d\n" % ended)
    os.close(descriptor)
    os.close(status)


def become(request: dict[str, Any], streams: list[int]) -> None:
    """Be the program that was asked for, as far as a process can be that has started already."""
    if request["session"]:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.orig_argv = [sys.executable, *request["arguments"]]
    importlib.import_module("holdfast.supervise.injected.sitecustomize")._observe()
    what, *arguments = request["arguments"]
    first = (
        "" if what == "-c" else request["cwd"] if what == "-m" else str(Path(what).resolve().parent)
    )
    sys.path[0] = first
    if what not in ("-c", "-m"):
        sys.argv = [what, *arguments]
        runpy.run_path(what, run_name="__main__")
        return
    sys.argv = [what, *arguments[1:]]
    if what == "-m":
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = type(sys)("__main__")
        exec(arguments[0], main.__dict__)


if __name__ == "__main__":
    become(*_serve(socket.socket(fileno=int(sys.argv[1]))))
