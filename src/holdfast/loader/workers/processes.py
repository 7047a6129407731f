"""Start worker processes that end when their parent ends.

torch starts workers through a multiprocessing context. The context defined in this module records
each process, sends the worker's arguments in a file instead of through a pipe, and prepares the
worker (`_begin_worker`) before torch's code runs. `child_signals` and `ending` handle the end of a
worker.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import functools
import gc
import mmap
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.queues import Queue
from multiprocessing.reduction import DupFd, ForkingPickler
from queue import Empty
from typing import Any, NamedTuple

from torch.multiprocessing import set_sharing_strategy

from holdfast.loader.order.batches import BatchRequest
from holdfast.loader.signalled import let_through
from holdfast.loader.workers.child_signals import handle_child_signals
from holdfast.loader.workers.report import BatchReport, as_failure, find_shortage
from holdfast.recorder.run_files import OBSERVE_VARIABLE, STACKS_SIGNAL

# From linux/prctl.h: sets the signal that a process receives when its parent ends.
_PR_SET_PDEATHSIG = 1

# Signals that a terminal, a scheduler or Slurm's --signal sends to all processes of a job. Workers,
# and the programs that workers start to read samples, ignore these signals, because the parent
# decides how to react to them. SIGTERM ends a worker as usual.
_SIGNALS_FOR_THE_PARENT = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class UnreadableError(BaseException):
    """Raised when an item from a worker cannot be read, usually because the worker has died.

    The class is not derived from `Exception`, for the same reason as `WaitInterruptedError`.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(repr(cause))
        self.cause = cause


class StartedProcesses(list[Any]):
    """The worker processes of a pool, recorded before they run.

    `child_signals` uses the list to suppress torch's errors about these processes. The list is
    compared and hashed by identity, so that it can be in a weak set.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


# --- in the parent --------------------------------------------------------------------------------


def recording_context(
    method: str | None, processes: StartedProcesses, *, share_by_file: bool = False
) -> Any:
    """Return a multiprocessing context that records the processes that it starts.

    Args:
        method: ``"fork"``, ``"spawn"``, ``"forkserver"``, or None for Python's default.
        processes: The list to which processes are appended.
        share_by_file: Whether workers share tensors through named files, which do not need file
            descriptors.
    """
    handle_child_signals(processes)
    context = multiprocessing.get_context(method)
    context_class: Any = type(context)
    recording = _recording_class(context_class)()
    recording.processes = processes
    # A fork server always forks workers in its main thread, whichever thread here requests them.
    is_forked_by_server = context.get_start_method() == "forkserver"
    is_main_thread = threading.current_thread() is threading.main_thread()
    recording.worker_start = _WorkerStart(
        parent=None if is_forked_by_server else os.getpid(),
        dies_with_thread=is_forked_by_server or is_main_thread,
        share_by_file=share_by_file,
    )
    return recording


# The class is cached, because every class is part of a reference cycle. With a class for each pool,
# the pool's pipes would stay open until the next garbage collection.
@functools.cache
def _recording_class(context_class: Any) -> Any:
    class RecordingContext(context_class):  # type: ignore[misc]
        processes: StartedProcesses
        worker_start: _WorkerStart

        # `Process` and `Queue` override methods of the context, so they must have these names.
        def Process(  # noqa: N802
            self, *, target: Callable[..., Any], args: Sequence[Any], **options: Any
        ) -> Any:
            parcel: Any = (target, args)
            if self.get_start_method() != "fork":
                parcel = _Parcel(target, args)
            process = context_class.Process(
                target=_begin_worker, args=(self.worker_start, parcel), **options
            )
            self.processes.append(process)
            return process

        def Queue(self, maxsize: int = 0) -> LoaderQueue:  # noqa: N802
            return LoaderQueue(maxsize, ctx=self)

    return RecordingContext


class LoaderQueue(Queue):  # type: ignore[type-arg] # it is not generic at run time
    """A queue that notifies its reader when an item cannot be pickled.

    A multiprocessing queue pickles items in a thread. If pickling fails, the standard queue only
    prints the error, and the training loop would wait forever (pytorch#142884). This class
    overrides the hook that handles such errors, as ``concurrent.futures`` does.
    """

    def get(self, *args: Any, **options: Any) -> Any:
        """Return the next item, or raise `UnreadableError` if it cannot be read."""
        try:
            return super().get(*args, **options)
        except Empty:
            raise
        except Exception as error:
            let_through(error)
            raise UnreadableError(error) from error

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:
        # If the item that is sent instead cannot be pickled either, this hook is called again, and
        # the last case applies.
        match item:
            case (number, (batch, tuple(fields))) if batch is not None:
                self.put((number, (None, tuple(_report_unpicklable(BatchReport(*fields), error)))))
            case (number, tuple(fields)) if len(fields) == len(BatchRequest._fields):
                # A request could not be pickled. The worker answers an empty request with a
                # `TypeError`.
                self.put((number, ()))
            case _:
                # The item was sent by torch itself, for example an error. Raising an exception here
                # would end the queue's thread.
                Queue._on_queue_feeder_error(error, item)  # type: ignore[attr-defined]


def _report_unpicklable(report: BatchReport, error: Exception) -> BatchReport:
    """Return the report to send in place of a batch that cannot be pickled."""
    shortage = find_shortage(error)
    if shortage is not None:
        return report._replace(fatal=None, shortage=shortage)
    return report._replace(fatal=as_failure(None, error), shortage=None)


class _Parcel:
    """The target and arguments of a worker that is not forked.

    They are sent in an in-memory file, not through a pipe. A pipe is full after 64 KiB, and if the
    reader has died, a process that writes more data waits forever. In the worker, unpickling the
    parcel returns the target and the arguments as a tuple.
    """

    def __init__(self, target: Callable[..., Any], args: Sequence[Any]) -> None:
        self._content = (target, args)

    def __reduce__(self) -> tuple[Any, ...]:
        file = os.memfd_create("holdfast-worker")
        # The file is needed until the worker has started. It is closed when this parcel is
        # garbage-collected, which happens later.
        weakref.finalize(self, os.close, file)
        unwritten = memoryview(ForkingPickler.dumps(self._content))
        while unwritten:
            # Linux writes at most 2 GiB per call.
            written_bytes = os.write(file, unwritten)
            unwritten = unwritten[written_bytes:]
        return _unpack, (DupFd(file),)


def _unpack(file: Any) -> Any:
    descriptor = file.detach()
    try:
        with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as content:
            return ForkingPickler.loads(content)
    finally:
        os.close(descriptor)


# --- in the worker --------------------------------------------------------------------------------


class _WorkerStart(NamedTuple):
    """Settings with which a new worker prepares itself before torch's code runs.

    Args:
        parent: PID of the process that the worker must not outlive, or None if a fork server forks
            the worker.
        dies_with_thread: Whether the kernel kills the worker when the thread that forked it ends.
        share_by_file: Whether the worker shares tensors through named files.
    """

    parent: int | None
    dies_with_thread: bool
    share_by_file: bool


def _begin_worker(start: _WorkerStart, parcel: tuple[Callable[..., Any], Sequence[Any]]) -> None:
    """Prepare this process, which is a new worker, and call the worker's target function."""
    _die_with_parent(start)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in _SIGNALS_FOR_THE_PARENT:
        signal.signal(number, signal.SIG_IGN)
    # Under `holdfast run`, the observer writes stack traces to a file that the watchdog reads.
    if OBSERVE_VARIABLE not in os.environ:
        with suppress(OSError, ValueError, RuntimeError):
            faulthandler.register(STACKS_SIGNAL)
    if start.share_by_file:
        set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    # This process has copies of any unreachable loaders that the parent had at the time of the
    # fork. They must not be garbage-collected here, because that would end the parent's workers.
    gc.freeze()
    target, args = parcel
    del parcel
    target(*args)


def _die_with_parent(start: _WorkerStart) -> None:
    """Make the kernel kill this process when its parent ends, by the means that apply here."""
    if start.dies_with_thread:
        # The kernel sends this signal when the *thread* that forked this process ends, so only
        # workers that were forked by a main thread request the signal.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if start.parent is None:
        _let_fork_server_end()
    if start.parent is None or not start.dies_with_thread:
        _die_with_parents_pipe()
    if start.parent is not None and os.getppid() != start.parent:
        # The parent ended before the signal was requested.
        os._exit(1)


def _die_with_parents_pipe() -> None:
    """Make the kernel kill this process when the parent closes its end of their pipe.

    A forked worker also has copies of the parent's ends of the pipes to all earlier workers, so the
    workers die one after the other, beginning with the one that was started last.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    pipe = parent.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def _let_fork_server_end() -> None:
    """Close this process's copy of the descriptor that keeps the fork server alive.

    Without this, there would be a deadlock: the server would wait for its workers to end, and the
    workers only end when the server ends.
    """
    descriptor = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
    if descriptor is not None:
        forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
        os.close(descriptor)
