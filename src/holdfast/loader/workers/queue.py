"""The queue between loop and workers: what cannot be pickled becomes a report of why, what cannot be read says so."""

from __future__ import annotations

from multiprocessing.queues import Queue
from queue import Empty
from typing import Any

from holdfast.loader.fetch import Entry, failure_of, received, shortage_in
from holdfast.loader.signalled import let_through


class UnreadableError(BaseException):
    """What was received cannot be read, mostly since the worker that holds its tensors is dead.

    Not an `Exception`, for which torch opens ten temporary files to see whether descriptors are left: a loss that is
    noticed meanwhile would leave some of them open, and in the folder.

    Args:
        cause: What was raised.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(repr(cause))
        self.cause = cause


class LoaderQueue(Queue):  # type: ignore[type-arg] # it takes none while it runs
    """A queue as every other, but for batches, and orders for batches, that cannot be pickled.

    A queue pickles in a thread of its own. There an error would only be printed, the batch be lost, and the loop wait
    for ever (pytorch#142884). The hook is the one that ``concurrent.futures`` overrides for the same reason.
    """

    def get(self, *args: Any, **named: Any) -> Any:
        """Return the next item, as every queue.

        Raises:
            Empty: If there is none within the given time.
            UnreadableError: If there is one and it cannot be read.
        """
        try:
            return super().get(*args, **named)
        except Empty:
            raise
        except Exception as error:
            let_through(error)
            raise UnreadableError(error) from error

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:
        match item:  # once: what is put here instead and fails too is told as by every queue
            case (number, (batch, tuple(fields))) if batch is not None:
                shortage = shortage_in(error)
                fatal = None if shortage else failure_of(None, error)
                self.put((number, (None, tuple(received(fields)._replace(fatal=fatal, shortage=shortage)))))
            case (number, tuple(fields)) if len(fields) == len(Entry._fields) and not Entry(*fields).unsendable:
                entry = Entry(*fields)
                indices = tuple(repr(index) for index in entry.indices)
                self.put((number, tuple(Entry(entry.number, entry.epoch, indices, unsendable=repr(error)))))
            case _:  # what torch itself sends, such as an error: raising here would end the thread
                Queue._on_queue_feeder_error(error, item)  # type: ignore[attr-defined]
