"""The watch and the board.

Who died, was stopped or is stuck is told from who is slow, idle or has ended well.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.loader.samples import Samples

from holdfast import DataLoader
from holdfast.loader.workers import pool as worker_pool
from holdfast.loader.workers import watch as worker_watch
from holdfast.loader.workers.board import (
    IDLE,
    NUMBER,
    PLACE,
    PREPARING,
    STARTING,
    Board,
    show_batch_done,
)
from holdfast.loader.workers.child_signals import WaitInterruptedError
from holdfast.loader.workers.ending import kill
from holdfast.loader.workers.processes import StartedProcesses, recording_context
from holdfast.loader.workers.watch import WorkerLoss, WorkerWatch

_FORK = multiprocessing.get_context("fork")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a function that starts real workers under a watch with short ticks.

    It ends them after the test.
    """
    monkeypatch.setattr(worker_watch, "_TICK_SECONDS", 0.02)
    recording_context("fork", StartedProcesses())  # which has losses wake the main thread
    made: list[tuple[WorkerWatch, list[Any]]] = []

    def start_one(
        *works: Callable[[Board, int], None], **options: Any
    ) -> tuple[WorkerWatch, list[Any], Board]:
        board = Board(_FORK, len(works))
        processes = [
            _FORK.Process(target=work, args=(board, number)) for number, work in enumerate(works)
        ]
        for process in processes:
            process.start()
        watch = WorkerWatch(
            processes, board, **{"limit_seconds": 60.0, "timeout_seconds": 0.0, **options}
        )
        made.append((watch, processes))
        return watch, processes, board

    yield start_one
    for watch, processes in made:
        watch.end()
        kill(processes)


def _wait_for_loss(watch: WorkerWatch, *, waiting: bool = True) -> WorkerLoss:
    """Wait, as a loop does that waits for a batch, until the watch interrupts it."""
    if waiting:
        with pytest.raises(WaitInterruptedError), watch:
            threading.Event().wait(120)
    else:
        for _ in range(12_000):
            if watch.lost:
                break
            time.sleep(0.01)
    assert watch.lost
    return watch.loss()


def _forever(board: Board, number: int) -> None:
    board.cells_of(number)[NUMBER] = 7
    board.cells_of(number)[PLACE] = 2
    time.sleep(1e6)


def _idle(board: Board, number: int) -> None:
    faulthandler.disable()  # pytest's, which would print where a signal hit
    board.cells_of(number)[NUMBER] = 1
    board.cells_of(number)[PLACE] = 0
    show_batch_done(board.cells_of(number))
    time.sleep(1e6)


def _busy(board: Board, number: int) -> None:
    """Go on from sample to sample."""
    for place in range(10**9):
        board.cells_of(number)[NUMBER] = place
        board.cells_of(number)[PLACE] = 0
        time.sleep(0.005)
        show_batch_done(board.cells_of(number))


def _exits(code: int) -> Callable[[Board, int], None]:
    def work(board: Board, number: int) -> None:
        board.cells_of(number)[NUMBER] = 3
        board.cells_of(number)[PLACE] = 1
        os._exit(code)

    return work


def test_a_timeout_is_counted_only_while_somebody_waits(start: Callable[..., Any]) -> None:
    """A long training step is no reason to replace workers; a long wait for a batch is."""
    watch, _, _ = start(_forever, _busy, timeout_seconds=0.3)
    threading.Event().wait(0.6)
    assert not watch.lost
    loss = _wait_for_loss(watch)
    assert loss.kind == "hung"
    assert "0.3 s" in loss.cause


def test_nobody_busy_and_no_batch_is_a_loss(start: Callable[..., Any]) -> None:
    """If all workers are idle while the loop waits, a batch was lost on its way."""
    watch, _, _ = start(_idle, _idle, limit_seconds=0.3)
    loss = _wait_for_loss(watch)
    assert loss.kind == "machinery"
    assert loss.is_timeout


def _starts(seconds: float, place: int) -> Callable[[Board, int], None]:
    def work(board: Board, number: int) -> None:
        board.cells_of(number)[PLACE] = place
        time.sleep(seconds)
        board.cells_of(number)[PLACE] = IDLE
        time.sleep(1e6)

    return work


def _sleeps(board: Board, number: int) -> None:
    time.sleep(1e6)


def _prepares(board: Board, number: int) -> None:
    board.cells_of(number)[PLACE] = PREPARING
    time.sleep(1e6)


@pytest.mark.parametrize(
    ("work", "limit", "where"),
    [(_sleeps, 0.1, "starting"), (_prepares, 0.05, "in worker_init_fn")],
    ids=["start", "worker_init_fn"],
)
def test_a_start_that_never_ends_is_found(
    start: Callable[..., Any], work: Any, limit: float, where: str
) -> None:
    """Wherever a lock that was held at the fork blocks a worker."""
    watch, _, _ = start(work, _busy, limit_seconds=limit)
    loss = _wait_for_loss(watch, waiting=False)
    assert (loss.kind, loss.worker) == ("hung", 0)
    assert f"worker 0 ({where})" in loss.cause
    assert loss.status is not None
    assert loss.status.is_starting
    assert not loss.status.is_at_work


@pytest.mark.parametrize("place", [STARTING, PREPARING])
def test_a_start_is_not_judged_as_a_sample_is(start: Callable[..., Any], place: int) -> None:
    """Imports, and what the user does for a worker, take as long as they do.

    Samples get no longer limit for that.
    """
    timeout = 0.25 if place == PREPARING else 0.0
    watch, _, board = start(_starts(1.0, place), limit_seconds=0.4, timeout_seconds=timeout)
    with watch:  # a loss would be raised here
        while board.status_of(0).is_starting:
            time.sleep(0.01)
    assert not watch.lost
    assert watch.longest_seconds == 0


def test_a_part_of_a_stream_may_end(start: Callable[..., Any]) -> None:
    """With ``may_end`` a worker that exits with code 0 has done its part.

    Any other death is a loss.
    """
    watch, processes, _ = start(_exits(0), _idle, may_end=True)
    processes[0].join(5)
    time.sleep(0.2)
    assert not watch.lost
    processes[1].kill()
    assert _wait_for_loss(watch).worker == 1


def test_a_loss_waits_until_another_loader_is_closed(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A loader that is collected while one waits for another's batch is closed, also if that one
    loses a worker.
    """
    unheard: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: unheard.append(what.exc_value))
    dropped = [iter(DataLoader(Samples(8, lambda index: os.getpid()), batch_size=2, num_workers=1))]
    pid = int(next(dropped[0])[0])
    os.kill(pid, signal.SIGSTOP)  # so that closing takes a while

    closing = tmp_path / "closing"
    really_undisturbed = worker_pool.undisturbed

    @contextlib.contextmanager
    def undisturbed() -> Iterator[None]:
        with really_undisturbed():
            closing.touch()
            yield

    monkeypatch.setattr(worker_pool, "undisturbed", undisturbed)

    def dies(board: Board, number: int) -> None:
        while not closing.exists():
            time.sleep(0.005)
        os._exit(1)

    watch, _, _ = start(dies)
    with pytest.raises(WaitInterruptedError), watch:
        dropped.clear()  # the last reference: its workers are ended here
        threading.Event().wait(120)
    assert not unheard
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
