"""Items of a feature cache computed in worker processes, and handed out in the order of the dataset.

Each item has its own random numbers, from (seed, index), and one thread, so it is the same whatever the number of
workers. A worker that dies is replaced and its item computed again; only an item that takes three workers with it
ends the build. At most so many items are under way that memory stays bounded, whatever the length of the dataset.

Does not write: that is for ``feature_files``.
"""

from __future__ import annotations

import collections
import contextlib
import signal
import traceback
from collections import Counter, deque
from collections.abc import Generator, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from holdfast.data.features.changing import Runs, Watch
from holdfast.data.features.errors import not_computed, unusable
from holdfast.data.features.items import digest_of, encode
from holdfast.data.random_state import isolated, seed_cpu
from holdfast.data.seeds import derive_seed
from holdfast.data.worker_processes import Started, kill, recording_context

_AHEAD = 4
"""Items given to a worker: one under way, and the next ones there before it is done."""
_WINDOW = 32
"""Items for each worker that may be under way or wait for a slower one before them."""
_WAITING_BYTES = 256 * 2**20
"""Bytes that may wait so; more can come only from the items that are under way already."""
_DEATHS = 3
"""As `torchrun`'s max_restarts: the same item three times is no accident."""
_LOOK_SECONDS = 1.0
_WATCHED = 2
"""The first items, which one process computes whatever the number of workers."""


class Work(NamedTuple):
    """What the workers do.

    Args:
        dataset: Map-style.
        fn: Computes the features of a sample.
        seed: Decides the random numbers of each item, with its index.
    """

    dataset: Any
    fn: Any
    seed: int


class Item(NamedTuple):
    """One item, computed.

    Args:
        data: Its bytes.
        digest: Of them.
        runs: What ``fn`` changes by running, as far as the first two items have told; None with all others.
    """

    data: bytes
    digest: bytes
    runs: Runs | None = None


class _Computer:
    """Computes in this process, and looks at what ``fn`` changes while it computes the first two items."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._watch: Watch | None = None

    def compute(self, index: int) -> Item:
        """Return an item."""
        if index == 0:
            self._watch = Watch(self._work.fn)
        seed_cpu(derive_seed(self._work.seed, "features", index))
        data = encode(self._work.fn(self._work.dataset[index]))
        runs = self._watch.ran() if self._watch and index < _WATCHED else None
        return Item(data, digest_of(index, data), runs)


class _Failure(NamedTuple):
    what: str
    traceback: str


def compute_here(work: Work, indices: range) -> Generator[Item]:
    """Yield each item, computed in this process.

    Raises:
        LoaderError: H623, naming the item that cannot be computed.
    """
    computer = _Computer(work)
    for index in indices:
        with isolated(), _one_thread():
            try:
                item = computer.compute(index)
            except Exception as error:
                raise not_computed(index, f"raised {_line(error)}") from error
        yield item


def compute_in_workers(
    work: Work, indices: range, num_workers: int, multiprocessing_context: str | None
) -> Generator[Item]:
    """Yield each item, in order, computed in worker processes. Close it to end them.

    Raises:
        LoaderError: H623, naming the item that cannot be computed; H625, if no worker can be started.
    """
    pool = _Pool(work, num_workers, multiprocessing_context)
    try:
        yield from pool.items(indices)
    finally:
        pool.close()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker: sums are rounded differently by another number of threads
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Worker:
    """One process, the connection to it, and the items that it was given, the one under way first."""

    def __init__(self, process: Any, connection: Connection) -> None:
        self.process = process
        self.connection = connection
        self.given: deque[int] = collections.deque()

    def give(self, index: int) -> None:
        self.given.append(index)
        with contextlib.suppress(OSError):  # it is dead: seen when its answers are read
            self.connection.send(index)

    def answers(self) -> Iterator[tuple[int, Any]]:
        """Yield what has come so far.

        Raises:
            EOFError: or OSError, if the process is dead.
        """
        while self.connection.poll():
            answer = self.connection.recv()
            yield self.given.popleft(), answer


class _Pool:
    def __init__(self, work: Work, num_workers: int, multiprocessing_context: str | None) -> None:
        self._work = work
        self._context = recording_context(multiprocessing_context, Started(), share_by_file=False)
        self._workers: list[_Worker] = []
        self._num_workers = num_workers
        self._stop = 0
        self._ready: dict[int, Any] = {}
        self._waiting_bytes = 0
        self._deaths: Counter[int] = collections.Counter()

    def items(self, indices: range) -> Generator[Item]:
        """Yield each item in order."""
        following, self._stop = indices.start, indices.stop
        self._workers = [self._start() for _ in range(min(self._num_workers, len(indices)))]
        for head in indices:
            while True:
                end = min(self._stop, head + _WINDOW * len(self._workers))
                while following < end and self._waiting_bytes < _WAITING_BYTES:
                    first = self._workers[:1] if 0 < following < _WATCHED else self._workers
                    worker = min(first, key=lambda each: len(each.given))
                    if len(worker.given) >= _AHEAD:
                        break
                    worker.give(following)
                    following += 1
                if head in self._ready:
                    break
                self._receive()
            answer = self._ready.pop(head)
            if isinstance(answer, _Failure):
                error = not_computed(head, answer.what)
                error.add_note(answer.traceback)
                raise error
            self._waiting_bytes -= len(answer.data)
            yield answer

    def _receive(self) -> None:
        found = set(wait([worker.connection for worker in self._workers], _LOOK_SECONDS))
        for number, worker in enumerate(self._workers):
            # A child of a dead worker's may hold the connection open, so the process is asked too.
            dead = not found and worker.process.exitcode is not None
            try:
                for index, answer in worker.answers() if dead or worker.connection in found else ():
                    self._note(index, answer)
            except (EOFError, OSError):
                dead = True
            if dead:
                self._workers[number] = self._replaced(worker)

    def _note(self, index: int, answer: Any) -> None:
        self._ready[index] = answer
        if isinstance(answer, _Failure):
            self._stop = min(self._stop, index + 1)  # what comes before it is still wanted
        else:
            self._waiting_bytes += len(answer.data)

    def _replaced(self, worker: _Worker) -> _Worker:
        """Return a new worker with the items of a dead one."""
        self._end([worker])
        if worker.given:
            index = worker.given[0]
            self._deaths[index] += 1
            if self._deaths[index] >= _DEATHS:
                what = f"ended its worker process {_DEATHS} times, {_fate(worker.process)}"
                self._note(worker.given.popleft(), _Failure(what, ""))
        new = self._start()
        for index in worker.given:
            new.give(index)
        return new

    def _start(self) -> _Worker:
        mine, its = self._context.Pipe()
        process = self._context.Process(target=_live, args=(its, self._work), daemon=True)
        try:
            process.start()
        except Exception as error:
            mine.close()
            raise unusable(
                f"a worker process cannot be started ({_line(error)})",
                'with "spawn" and "forkserver" the dataset and fn must be names of a module',
                'define them at the top of a module, or pass multiprocessing_context="fork" or num_workers=0.',
            ) from error
        finally:
            its.close()
        return _Worker(process, mine)

    def _end(self, workers: list[_Worker]) -> None:
        kill([worker.process for worker in workers])
        for worker in workers:
            worker.connection.close()

    def close(self) -> None:
        """End all workers, also such as are stuck."""
        self._end(self._workers)


def _live(connection: Connection, work: Work) -> None:
    """Compute what is asked for, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    computer = _Computer(work)
    with contextlib.suppress(EOFError, OSError):
        while True:
            index = connection.recv()
            answer: Any
            try:
                answer = computer.compute(index)
            except BaseException as error:  # noqa: BLE001 - the parent is told, whatever it is
                answer = _Failure(f"raised {_line(error)}", traceback.format_exc())
            connection.send(answer)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _fate(process: Any) -> str:
    code = process.exitcode
    if code is None:
        return "without a sign"
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
