"""The queue between loop and workers."""

from __future__ import annotations

import multiprocessing
from queue import Empty
from typing import Any

import pytest

from holdfast import DataLoader
from holdfast.loader.workers.fetch import Report
from holdfast.loader.workers.processes import LoaderQueue, UnreadableError


class _Unreadable:
    def __reduce__(self) -> Any:
        return _raise, ()


def _raise() -> None:
    raise ValueError("damaged")


def test_what_cannot_be_pickled_ends_nothing() -> None:
    """A batch becomes a report of why; anything else is told as by every queue, and what follows is sent."""
    queue = LoaderQueue(ctx=multiprocessing.get_context("fork"))
    for item in ((0, (lambda: 0, tuple(Report(7)))), (1, (lambda: 0,) * 10), (2, "sent")):
        queue.put(item)
    arrived = dict(queue.get(timeout=20) for _ in range(2))
    batch, fields = arrived[0]
    report = Report(*fields)
    assert (batch, report.number, arrived[2]) == (None, 7, "sent")
    assert report.fatal is not None
    assert "pickle" in report.fatal.text
    queue.close()
    queue.join_thread()


def test_what_cannot_be_read_is_no_exception_that_torch_would_catch() -> None:
    """It would open temporary files before it raises it anew; what follows is read."""
    queue = LoaderQueue(ctx=multiprocessing.get_context("fork"))
    queue.put(_Unreadable())
    queue.put("sent")
    with pytest.raises(UnreadableError, match="damaged") as caught:
        queue.get(timeout=20)
    assert isinstance(caught.value.cause, ValueError)
    assert not isinstance(caught.value, Exception)
    assert queue.get(timeout=20) == "sent"
    with pytest.raises(Empty):
        queue.get(timeout=0)
    queue.close()
    queue.join_thread()


def test_indices_that_cannot_be_pickled_are_an_error_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """The loop hears of it; without workers they are used as they are."""

    class Functions:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: Any) -> int:
            return int(index())

    numbers: list[Any] = [lambda: 0, lambda: 1, lambda: 2, lambda: 3]
    assert [batch.tolist() for batch in DataLoader(Functions(), batch_size=2, sampler=numbers)] == [[0, 1], [2, 3]]
    loader = DataLoader(Functions(), batch_size=2, sampler=numbers, num_workers=2)
    with pytest.raises(TypeError, match="indices that cannot be pickled"):
        next(iter(loader))
    assert "loader_healed" not in caplog.text, "no worker was given up for it"
    loader.close()
