"""Items of a feature cache, computed here or in worker processes, in the order of the dataset.

Each item has its own random numbers, from (seed, index), and one thread, so it is the same whatever the number of
workers. Where a worker dies, the items under way are computed again one at a time; only an item that ends its worker
each time ends the build. Does not write: that is for ``files``.
"""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import torch

from holdfast.core.errors import LoaderError
from holdfast.loader.features.files import failure
from holdfast.loader.features.items import digest_of, encode
from holdfast.loader.random_state import isolated, seed_cpu
from holdfast.loader.seeds import derive_seed
from holdfast.loader.workers.processes import Started, kill, recording_context

_WINDOW = 16
"""Items for each worker that may be under way or wait for a slower one before them; it bounds the memory."""
_DEATHS = 3
"""As `torchrun`'s max_restarts: the same item three times is no accident."""


class Work(NamedTuple):
    """What is computed.

    Args:
        dataset: Map-style.
        fn: Computes the features of a sample.
        seed: Decides the random numbers of each item, with its index.
    """

    dataset: Any
    fn: Any
    seed: int

    def item(self, index: int) -> tuple[bytes, bytes]:
        """Return the bytes of an item and their digest."""
        seed_cpu(derive_seed(self.seed, "features", index))
        data = encode(self.fn(self.dataset[index]))
        return data, digest_of(index, data)


class _Failure(NamedTuple):
    what: str
    traceback: str


def compute_here(work: Work, indices: range) -> Generator[tuple[bytes, bytes]]:
    """Yield each item and its digest, computed in this process.

    Raises:
        LoaderError: H623, naming the item that cannot be computed.
    """
    for index in indices:
        with isolated(), _one_thread():
            try:
                item = work.item(index)
            except Exception as error:
                raise failure(f"item {index} of the dataset raised {_line(error)}", rule="H623") from error
        yield item


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker: sums are rounded differently by another number of threads
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def compute_in_workers(
    work: Work, indices: range, num_workers: int, multiprocessing_context: str | None
) -> Generator[tuple[bytes, bytes]]:
    """Yield each item and its digest, in order, computed in worker processes. Close it to end them.

    Raises:
        LoaderError: H623, naming the item that cannot be computed; H625, if no worker can be started.
    """
    head, deaths, alone_until = indices.start, 0, 0
    while head < indices.stop:
        pool = _Pool(work, num_workers, multiprocessing_context)
        following = head
        try:
            while head < indices.stop:
                end = head + 1 if head < alone_until else head + _WINDOW * num_workers
                for index in range(following, min(end, indices.stop)):
                    pool.submit(index)
                    following = index + 1
                answer = pool.answer()
                if isinstance(answer, _Failure):
                    error = failure(f"item {head} of the dataset raised {answer.what}", rule="H623")
                    error.add_note(answer.traceback)
                    raise error
                yield answer
                head, deaths = head + 1, 0
        except BrokenProcessPool as error:
            # Which of the items under way ended its worker is not known, so they are computed one at a time.
            deaths, alone_until = deaths + 1, max(alone_until, following)
            if deaths >= _DEATHS:
                what = f"item {head} of the dataset ended its worker process {deaths} times{pool.fate()}"
                raise failure(what, rule="H623") from error
        finally:
            pool.close()


class _Pool:
    """Worker processes that end with this one, whatever they are doing, and the items that they were given."""

    def __init__(self, work: Work, num_workers: int, multiprocessing_context: str | None) -> None:
        self._started = Started()
        context = recording_context(multiprocessing_context, self._started)
        self._executor = ProcessPoolExecutor(num_workers, context, _begin, (work,))
        self._given: deque[Future[Any]] = deque()

    def submit(self, index: int) -> None:
        """Have an item computed."""
        try:
            self._given.append(self._executor.submit(_compute, index))
        except BrokenProcessPool:
            raise
        except Exception as error:
            raise LoaderError(
                f"a worker process cannot be started ({_line(error)})",
                limit='with "spawn" and "forkserver" the dataset and fn must be names of a module',
                fix='define them at the top of a module, or pass multiprocessing_context="fork" or num_workers=0.',
                rule="H625",
            ) from error

    def answer(self) -> tuple[bytes, bytes] | _Failure:
        """Wait for the oldest item that was submitted."""
        found: tuple[bytes, bytes] | _Failure = self._given.popleft().result()
        return found

    def fate(self) -> str:
        """Return how a worker ended, in words; the executor ends the others by SIGTERM."""
        kill(self._started)
        codes = [each.exitcode for each in self._started if each.exitcode not in (None, 0, -signal.SIGTERM)]
        if not codes:
            return ""
        return f", by {signal.Signals(-codes[0]).name}" if codes[0] < 0 else f", with exit code {codes[0]}"

    def close(self) -> None:
        """End all workers, also those that are stuck."""
        kill(self._started)
        self._executor.shutdown(cancel_futures=True)


_work: Work


def _begin(work: Work) -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    _work = work


def _compute(index: int) -> tuple[bytes, bytes] | _Failure:
    try:
        return _work.item(index)
    except BaseException as error:  # noqa: BLE001 - the parent raises it; not every exception can be pickled
        return _Failure(_line(error), traceback.format_exc())


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
