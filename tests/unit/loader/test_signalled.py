"""What a signal's handler raises leaves the loader, wherever the main thread is by then."""

from __future__ import annotations

import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_sharer
from typing import Any

import pytest
import torch
from tests.unit.loader.samples import Samples, items
from torch.utils.data import IterableDataset, default_collate

from holdfast.loader.loader import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Preempted(Exception):  # noqa: N818 - as users name it
    """As many a training script has one."""


def _slow(index: int) -> int:
    """Wait, so that a signal finds the loader at it."""
    time.sleep(0.05)
    return index


class SlowStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        for index in range(40):
            time.sleep(0.05)
            yield index


def _slow_collate(samples: list[Any]) -> Any:
    time.sleep(0.2)
    return default_collate(samples)


def _itself(handler: Callable[..., None]) -> Any:
    return handler


class _Callable:
    def __init__(self, handler: Callable[..., None]) -> None:
        self._handler = handler

    def __call__(self, number: int, frame: Any) -> None:
        self._handler(number, frame)


def _partial(handler: Callable[..., None]) -> Any:
    return functools.partial(handler, signal.SIGUSR2)


def _only_once(handler: Callable[..., None]) -> Any:
    def handle(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(143)

    return handle


@pytest.mark.parametrize(
    ("error", "as_handler"),
    [
        (SystemExit(143), _itself),
        (SystemExit(143), _Callable),
        (SystemExit(143), _partial),
        (SystemExit(143), _only_once),
        (Preempted(), _itself),
    ],
    ids=["exit", "object", "partial", "only once", "exception"],
)
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Samples(40, _slow), {}),
        (Samples(40, _slow), {"num_workers": 1}),
        (list(range(40)), {"collate_fn": _slow_collate}),
        (SlowStream(), {}),
    ],
    ids=["sample", "wait", "collate", "stream"],
)
def test_a_handlers_exception_is_not_taken_for_a_samples(
    dataset: Any, options: dict[str, Any], error: BaseException, as_handler: Callable[..., Any]
) -> None:
    """It ends the loop, as with torch, and is neither tried again, nor healed, nor turned into
    another error.
    """
    events: list[str] = []
    loader = DataLoader(dataset, batch_size=4, **options)
    loader._record = lambda data: events.append(data.kind)

    def handle(*_: Any) -> None:
        raise error

    before = signal.signal(signal.SIGUSR2, as_handler(handle))
    timer = threading.Timer(0.12, os.kill, (os.getpid(), signal.SIGUSR2))
    seen = 0
    try:
        with pytest.raises(type(error)):
            for _ in loader:
                if not seen:
                    timer.start()
                seen += 1
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)
    assert seen < 10
    assert not {"loader_healed", "sample_quarantined"} & set(events)


def _limited(index: int) -> int:
    """Limit the time of a sample, as is often done."""

    def late(number: int, frame: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        if index == 5:
            time.sleep(60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return index


@pytest.mark.parametrize("workers", [0, 1])
def test_a_time_limit_of_a_samples_own_is_the_samples(workers: int) -> None:
    """What takes too long is set aside."""
    before = signal.getsignal(signal.SIGALRM)
    try:
        found = items(DataLoader(Samples(40, _limited), batch_size=4, num_workers=workers))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(found) == 40
    assert 5 not in found


def _breaks_off(index: int) -> torch.Tensor:
    """Connect to this worker's sender of tensors as the loop does, and leave at once."""
    sender = resource_sharer._resource_sharer  # type: ignore[attr-defined]
    if sender._listener is None:
        sender._start()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sender._address)
    return torch.full((3,), float(index))


def test_a_connection_that_the_loop_breaks_off_prints_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As when Ctrl-C comes while it receives a batch. The batches that follow are sent all the
    same.
    """
    loader = DataLoader(Samples(4, _breaks_off), batch_size=2, num_workers=1)

    found = [batch.tolist() for batch in loader]

    assert found == [[[0.0] * 3, [1.0] * 3], [[2.0] * 3, [3.0] * 3]]
    assert "Traceback" not in capfd.readouterr().err
