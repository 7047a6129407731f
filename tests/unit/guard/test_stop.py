"""A request to stop by signal, when other handlers run in its midst."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from holdfast.guard.stop import Interrupted, StopRequest
from holdfast.loader.workers import processes as worker_processes


class Lost(BaseException):
    """What the handler of a child's death raises, as that of loader workers does."""


@pytest.fixture
def dying() -> Iterator[threading.Timer]:
    """Return what lets a child die 30 ms after its start, and a handler raise `Lost` then."""

    def raise_lost(number: int, frame: object) -> None:
        raise Lost

    child = subprocess.Popen(["sleep", "100"])
    before = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM)}
    signal.signal(signal.SIGCHLD, raise_lost)
    yield threading.Timer(0.03, child.kill)
    for number, handler in before.items():
        signal.signal(number, handler)
    child.kill()
    child.wait()


@pytest.mark.parametrize(("waits", "raised"), [(False, Lost), (True, Interrupted)])
def test_a_worker_that_dies_of_the_same_signal_loses_neither_request_nor_message(
    dying: threading.Timer, capfd: pytest.CaptureFixture[str], waits: bool, raised: type[BaseException]
) -> None:
    """Its loss is raised in the midst of the handler, which ends its work all the same; so the second one counts."""
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    stop = StopRequest()
    stop.install()
    dying.start()
    with pytest.raises(raised):
        if waits:
            with stop:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(10)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    assert stop.reason == "SIGTERM"
    assert capfd.readouterr().err.count("stops at the next boundary") == 1
    assert heard == [signal.SIGTERM]
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM] * 2
    assert capfd.readouterr().err == ""
    stop.uninstall()


def test_after_a_request_torch_raises_about_no_worker_also_from_within_our_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a loader of holdfast's and one of torch's alive, workers that got the same signal disturb no step."""

    def as_torch_does(number: int, frame: object) -> None:
        raise RuntimeError("DataLoader worker is killed by signal: Terminated.")

    monkeypatch.setattr(worker_processes, "_previous", as_torch_does)
    before = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM)}
    signal.signal(signal.SIGCHLD, worker_processes._on_child)
    stop = StopRequest()
    stop.install()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == "SIGTERM"
        assert subprocess.run(["true"], check=True).returncode == 0
    finally:
        stop.uninstall()
        for number, handler in before.items():
            signal.signal(number, handler)
