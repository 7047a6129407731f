"""The queue between loop and workers, on which what cannot be pickled becomes a report of why."""

from __future__ import annotations

from multiprocessing.queues import Queue
from typing import Any

from holdfast.data.fetch import Entry, Report, failure_of, shortage_in


class LoaderQueue(Queue):  # type: ignore[type-arg] # it takes none while it runs
    """A queue as every other, but for batches, and orders for batches, that cannot be pickled.

    A queue pickles in a thread of its own. There an error would only be printed, the batch be lost, and the loop wait
    for ever (pytorch#142884). The hook is the one that ``concurrent.futures`` overrides for the same reason.
    """

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:
        match item:  # once: what is put here instead and fails too is told as by every queue
            case (number, (batch, tuple(fields))) if batch is not None:
                shortage = shortage_in(error)
                fatal = None if shortage else failure_of(None, error)
                self.put((number, (None, tuple(Report(*fields)._replace(fatal=fatal, shortage=shortage)))))
            case (number, tuple(fields)) if len(fields) == len(Entry._fields) and not Entry(*fields).unsendable:
                entry = Entry(*fields)
                indices = tuple(repr(index) for index in entry.indices)
                self.put((number, tuple(Entry(entry.number, entry.epoch, indices, unsendable=repr(error)))))
            case _:  # what torch itself sends, such as an error: raising here would end the thread
                Queue._on_queue_feeder_error(error, item)  # type: ignore[attr-defined]
