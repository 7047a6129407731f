"""Start worker processes that die with their parent.

torch starts workers through a multiprocessing context. Ours records each process, sends the
worker's arguments in a file instead of a pipe, and prepares the worker (`_begin_worker`) before
torch's code runs. The end of a worker is handled in `child_signals` and `ending`.
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

# From linux/prctl.h: the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1

# A terminal, a scheduler or Slurm's --signal sends these to all processes of a job. The parent
# decides how to react; until then, workers and the programs that read samples for them continue.
# SIGTERM ends a worker, as usual.
_SIGNALS_FOR_THE_PARENT = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class UnreadableError(BaseException):
    """A received item cannot be read, usually because the worker that holds its tensors is dead.

    It is not derived from `Exception`, for the same reason as `WaitInterruptedError`.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(repr(cause))
        self.cause = cause


class StartedProcesses(list[Any]):
    """The worker processes of a pool, recorded before they run, so that torch never reports them.

    It is compared and hashed by identity, so that a weak set can hold it.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


# --- in the parent --------------------------------------------------------------------------------


def recording_context(
    method: str | None, processes: StartedProcesses, *, share_by_file: bool = False
) -> Any:
    """Return a multiprocessing context that records each process that it starts.

    Args:
        method: ``"fork"``, ``"spawn"``, ``"forkserver"``, or None for Python's default.
        processes: The list to which the processes are appended.
        share_by_file: Whether workers share tensors through named files, which need no file
            descriptors.
    """
    handle_child_signals(processes)
    context = multiprocessing.get_context(method)
    context_class: Any = type(context)
    recording = _recording_class(context_class)()
    recording.processes = processes
    # A fork server forks workers in its main thread, whichever thread requests it.
    is_forked_by_server = context.get_start_method() == "forkserver"
    is_main_thread = threading.current_thread() is threading.main_thread()
    recording.worker_start = _WorkerStart(
        parent=None if is_forked_by_server else os.getpid(),
        dies_with_thread=is_forked_by_server or is_main_thread,
        share_by_file=share_by_file,
    )
    return recording


# Cached because a class is a reference cycle: one class for each pool would keep its pipes open
# until garbage is collected.
@functools.cache
def _recording_class(context_class: Any) -> Any:
    class RecordingContext(context_class):  # type: ignore[misc]
        processes: StartedProcesses
        worker_start: _WorkerStart

        # The two methods have the names of those that they replace.
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
    """A queue that informs its reader when an item cannot be pickled.

    A multiprocessing queue pickles items in its own thread. If that fails, the standard one only
    prints the error, and the loop would wait forever (pytorch#142884). ``concurrent.futures`` uses
    the same hook.
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
        # If the substitute cannot be pickled either, it matches the last case.
        match item:
            case (number, (batch, tuple(fields))) if batch is not None:
                self.put((number, (None, tuple(_report_unpicklable(BatchReport(*fields), error)))))
            case (number, tuple(fields)) if len(fields) == len(BatchRequest._fields):
                # The worker answers an empty request with a `TypeError`.
                self.put((number, ()))
            case _:
                # An item that torch itself sends, such as an error. Raising an exception here would
                # end the thread.
                Queue._on_queue_feeder_error(error, item)  # type: ignore[attr-defined]


def _report_unpicklable(report: BatchReport, error: Exception) -> BatchReport:
    """Return a report without a batch, because the batch could not be sent."""
    shortage = find_shortage(error)
    if shortage is not None:
        return report._replace(fatal=None, shortage=shortage)
    return report._replace(fatal=as_failure(None, error), shortage=None)


class _Parcel:
    """The target and arguments of a worker that is not forked; they arrive as a tuple.

    They are sent in an in-memory file. A pipe is full after 64 KiB, and a process that writes more
    waits forever if the reader has died.
    """

    def __init__(self, target: Callable[..., Any], args: Sequence[Any]) -> None:
        self._content = (target, args)

    def __reduce__(self) -> tuple[Any, ...]:
        file = os.memfd_create("holdfast-worker")
        # The file is needed until the worker is started. After that the parcel is dropped.
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
    """How a worker prepares itself before torch's code runs.

    Args:
        parent: PID of the process that it must not outlive; None if a fork server forks it.
        dies_with_thread: Whether the kernel kills it when the thread that forked it ends.
        share_by_file: Whether it shares tensors through named files.
    """

    parent: int | None
    dies_with_thread: bool
    share_by_file: bool


def _begin_worker(start: _WorkerStart, parcel: tuple[Callable[..., Any], Sequence[Any]]) -> None:
    """Prepare this process, which is a new worker, and run its target."""
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
    # Loaders that the parent had not garbage-collected before the fork must not be collected here:
    # they would end the parent's other workers.
    gc.freeze()
    target, args = parcel
    del parcel
    target(*args)


def _die_with_parent(start: _WorkerStart) -> None:
    """Make the kernel kill this process when its parent ends, by whichever means is available."""
    if start.dies_with_thread:
        # The kernel sends this signal when the *thread* that forked ends, so only workers that the
        # main thread has started may ask for it.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if start.parent is None:
        _let_fork_server_end()
    if start.parent is None or not start.dies_with_thread:
        _die_with_parents_pipe()
    if start.parent is not None and os.getppid() != start.parent:
        # The parent has ended before we asked for the signal.
        os._exit(1)


def _die_with_parents_pipe() -> None:
    """Make the kernel kill this process when the parent's end of their pipe closes.

    A forked worker holds copies of those ends for workers before it, so the last one dies first.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    pipe = parent.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def _let_fork_server_end() -> None:
    """Close our copy of the descriptor that keeps the fork server alive.

    The server would wait for its workers, and they die with the server.
    """
    descriptor = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
    if descriptor is not None:
        forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
        os.close(descriptor)
