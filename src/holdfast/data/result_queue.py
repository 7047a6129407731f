"""The queue from workers to the loop, out of which a batch that cannot be sent comes as a report of why."""

from __future__ import annotations

from multiprocessing.queues import Queue
from typing import Any

from holdfast.data.fetch import Report, failure_of, shortage_in


class ResultQueue(Queue):  # type: ignore[type-arg] # it takes none while it runs
    """A queue as every other, but for batches that cannot be pickled.

    A queue pickles in a thread of its own. There an error would only be printed, the batch be lost, and the loop wait
    for ever (pytorch#142884). The hook is the one that ``concurrent.futures`` overrides for the same reason.
    """

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:
        match item:
            case (number, (_, tuple(fields))):
                shortage = shortage_in(error)
                fatal = None if shortage else failure_of(None, error)
                self.put((number, (None, tuple(Report(*fields)._replace(fatal=fatal, shortage=shortage)))))
            case _:  # what the loop sends to workers, or an error of torch's: raising here would end the thread
                Queue._on_queue_feeder_error(error, item)  # type: ignore[attr-defined]
