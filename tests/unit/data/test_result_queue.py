"""The queue from workers to the loop."""

from __future__ import annotations

import multiprocessing

from holdfast.data.fetch import Report
from holdfast.data.result_queue import ResultQueue


def test_what_cannot_be_pickled_ends_nothing() -> None:
    """A batch becomes a report of why; anything else is told as by every queue, and what follows is sent."""
    queue = ResultQueue(ctx=multiprocessing.get_context("fork"))
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
