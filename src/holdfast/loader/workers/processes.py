"""Worker processes that die with their parent, whose death is known at once, and that are dropped
without waiting.

torch starts them through a multiprocessing context; ours notes each process and lets it begin with
what an orphan must not be without. When one of them ends, torch raises an exception in the main
thread *wherever that is*, in the middle of an optimizer step if it must be; here it is raised only
while the loop waits for a batch.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import functools
import gc
import mmap
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.queues import Queue
from multiprocessing.reduction import DupFd, ForkingPickler
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple

from torch.multiprocessing import set_sharing_strategy
from torch.utils.data._utils import signal_handling

from holdfast.core.threads import start_thread
from holdfast.loader.order.plan import Entry
from holdfast.loader.signalled import let_through
from holdfast.loader.workers.fetch import Report, failure_of, shortage_in
from holdfast.recorder.run_files import OBSERVE_VARIABLE, STACKS_SIGNAL

_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 1.0
_left: list[list[Any]] = []  # iterators that no thread could be had for
# A terminal, a scheduler or Slurm's --signal sends these to all processes of a job. The parent
# decides what comes of them; until then workers, and programs that read samples for them, go on.
# SIGTERM ends a worker, as always.
_OF_THE_PARENT = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LOOKS, _LOOK_SECONDS = 50, 0.01  # half a second: a process whose sentinel fires is dead already


class WorkerLostError(BaseException):
    """A worker ended, or was ended, while the loop waited for a batch.

    Not an `Exception`, for which torch's loader opens ten temporary files to see whether
    descriptors are left.
    """


class UnreadableError(BaseException):
    """What was received cannot be read, mostly since the worker that holds its tensors is dead."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(repr(cause))
        self.cause = cause


class Started(list[Any]):
    """Worker processes of ours, known from before they run, so that torch never raises about one
    of them.
    """

    __hash__ = object.__hash__  # type: ignore[assignment] # so that a weak set can hold it
    __eq__ = object.__eq__


# --- the signal of a child's end

_alive: weakref.WeakSet[Any] = weakref.WeakSet()
_started: weakref.WeakSet[Started] = weakref.WeakSet()
_previous: Any = None
_closing = 0


# Before that of multiprocessing, which would wait for ever for a worker that is stopped
@atexit.register
def _kill_all() -> None:
    for each in list(_alive):
        each.end(kills=True)


def _on_child(number: int, frame: Any) -> None:
    """Wake who waits for a batch of a lost worker.

    Let torch raise about workers that are not ours.
    """
    for each in list(_alive):
        # This runs in the main thread: if that is not the one that waits, it must not be
        # interrupted.
        if each.lost and not each.called and each.waiter == threading.get_ident() and not _closing:
            each.called = True
            raise WorkerLostError
    while callable(_previous):
        try:
            _previous(number, frame)
        except RuntimeError as error:
            named = set(re.findall(r"\d+", str(error)))
            if any(str(process.pid) in named for started in list(_started) for process in started):
                continue  # torch forgets a loader that it has raised about, so this ends
            raise
        return


def wake_on_loss(watch: Any) -> None:
    """Let a lost worker interrupt the waiting of a `Watch`.

    Without effect outside the main thread, as with torch.
    """
    _alive.add(watch)


@contextmanager
def undisturbed() -> Generator[None]:
    """Have a loss wait until the end of the block.

    A dropped loader is closed wherever it is collected, also where the main thread waits for
    another one's batch.
    """
    global _closing
    counts = threading.current_thread() is threading.main_thread()  # nobody else is interrupted
    _closing += counts
    try:
        yield
    finally:
        _closing -= counts


def _handle_children() -> None:
    """Have our handler of SIGCHLD around torch's, which raises even in a queue, and so locks it
    for ever.
    """
    global _previous
    if threading.current_thread() is not threading.main_thread() or _previous is not None:
        return  # once: a handler that is set after ours may call ours, and must not be called by it
    # Else it would be set around ours when the first workers start
    signal_handling._set_SIGCHLD_handler()
    _previous = signal.signal(signal.SIGCHLD, _on_child) or signal.SIG_DFL


def silence_torch() -> None:
    """Let torch's handler, which ours calls, raise about no worker any more.

    The process was asked to end.
    """
    global _previous
    if callable(_previous):
        _previous = signal.SIG_DFL


def wake_main_thread() -> None:
    """Interrupt a wait of the main thread, so that it runs the handler."""
    with suppress(ProcessLookupError, RuntimeError):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGCHLD)


# --- starting


def recording_context(method: str | None, started: Started, *, share_by_file: bool = False) -> Any:
    """Return a multiprocessing context that appends the processes it starts to `started`.

    With `share_by_file` tensors are shared through named files, which takes no file descriptors.
    """
    _handle_children()
    _started.add(started)
    context = multiprocessing.get_context(method)
    kind: Any = type(context)
    recording = _recording(kind)()
    recording.started = started
    by_server = context.get_start_method() == "forkserver"  # it forks in its main thread
    recording.how = _Beginning(
        parent=None if by_server else os.getpid(),
        dies_with_thread=by_server or threading.current_thread() is threading.main_thread(),
        share_by_file=share_by_file,
    )
    return recording


@functools.cache  # a class is a cycle of references: one for each pool would keep its pipes open
def _recording(kind: Any) -> Any:
    class Recording(kind):  # type: ignore[misc]
        started: Started
        how: _Beginning

        def Process(  # noqa: N802
            self, *, target: Callable[..., Any], args: Sequence[Any], **options: Any
        ) -> Any:
            parcel = (target, args) if self.get_start_method() == "fork" else _Parcel(target, args)
            process = kind.Process(target=_begin, args=(self.how, parcel), **options)
            self.started.append(process)
            return process

        def Queue(self, maxsize: int = 0) -> LoaderQueue:  # noqa: N802
            return LoaderQueue(maxsize, ctx=self)

    return Recording


class LoaderQueue(Queue):  # type: ignore[type-arg] # it takes none while it runs
    """A queue that pickles in a thread of its own, as every other, but whose reader hears of what
    cannot be pickled.

    Else it would only be printed, and the loop wait for ever (pytorch#142884).
    ``concurrent.futures`` has this hook.
    """

    def get(self, *args: Any, **named: Any) -> Any:
        """Return the next item; `UnreadableError` if there is one and it cannot be read."""
        try:
            return super().get(*args, **named)
        except Empty:
            raise
        except Exception as error:
            let_through(error)
            raise UnreadableError(error) from error

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:
        match item:  # once: what is put here instead and fails too is handled as by every queue
            case (number, (batch, tuple(fields))) if batch is not None:
                shortage = shortage_in(error)
                fatal = None if shortage else failure_of(None, error)
                self.put(
                    (
                        number,
                        (None, tuple(Report(*fields)._replace(fatal=fatal, shortage=shortage))),
                    )
                )
            case (number, tuple(fields)) if len(fields) == len(Entry._fields):
                self.put((number, ()))
            case _:  # what torch itself sends, such as an error: raising here would end the thread
                Queue._on_queue_feeder_error(error, item)  # type: ignore[attr-defined]


class _Parcel:
    """What a worker that is not forked gets, which arrives as a tuple of both.

    It lies in a file: a pipe is full after 64 KiB, and who writes more waits for ever for a reader
    that has died.
    """

    def __init__(self, target: Callable[..., Any], args: Sequence[Any]) -> None:
        self._content = target, args

    def __reduce__(self) -> tuple[Any, ...]:
        file = os.memfd_create("holdfast-worker")
        # It is needed until the worker is started, and this is then dropped
        weakref.finalize(self, os.close, file)
        left = memoryview(ForkingPickler.dumps(self._content))
        while left:  # no more than 2 GiB are written at once
            left = left[os.write(file, left) :]
        return _unpacked, (DupFd(file),)


def _unpacked(file: Any) -> Any:
    descriptor = file.detach()
    try:
        with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as content:
            return ForkingPickler.loads(content)
    finally:
        os.close(descriptor)


# --- in the worker


class _Beginning(NamedTuple):
    """How a worker begins.

    What it must not outlive (None if a server forks it), how it shares tensors.
    """

    parent: int | None
    dies_with_thread: bool
    share_by_file: bool


def _begin(how: _Beginning, parcel: tuple[Callable[..., Any], Sequence[Any]]) -> None:
    """Start as a worker.

    No orphan, no handler of the parent's, and deaf to signals that are meant for the parent.
    """
    parent = how.parent
    if how.dies_with_thread:
        # The signal comes when the *thread* that forked ends, so only the main thread may ask for
        # it.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is None:
        _leave_server_alone()
    if parent is None or not how.dies_with_thread:
        _die_with_parent()
    if parent is not None and os.getppid() != parent:
        os._exit(1)  # it died before we asked
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in _OF_THE_PARENT:
        signal.signal(number, signal.SIG_IGN)
    # Under `holdfast run` the observer has the stacks written into a file that the watchdog reads.
    if OBSERVE_VARIABLE not in os.environ:
        with suppress(OSError, ValueError, RuntimeError):
            faulthandler.register(STACKS_SIGNAL)
    if how.share_by_file:
        set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    # Loaders of the parent that nobody has collected yet must not be collected here: on their way
    # out they would make the parent's other workers end.
    gc.freeze()
    target, args = parcel
    del parcel
    target(*args)


def _die_with_parent() -> None:
    """Have the kernel kill this process when the parent's end of the pipe between them closes,
    whatever it is doing.

    A forked worker holds copies of those ends of workers before it, so the last one dies first.
    """
    starter = multiprocessing.parent_process()
    assert starter is not None
    pipe = starter.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def _leave_server_alone() -> None:
    """Close what keeps the server of forks alive.

    It would wait for its workers, which die with it.
    """
    held = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
    if held is not None:
        forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
        os.close(held)


# --- ending


def _keeps_files(pid: int) -> bool:
    """Return whether a process is torch's keeper of shared files, which ends by itself when
    nobody needs it.
    """
    try:
        return "torch_shm_manager".startswith(Path(f"/proc/{pid}/comm").read_text().strip() or "-")
    except OSError:
        return False


def _offspring(pid: int) -> list[int]:
    """Return the processes that a process has started, and these.

    The main process needs a keeper of files.
    """
    found = []
    with suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # that thread has; others go on
                found += [int(child) for child in (thread / "children").read_text().split()]
    return [
        each for child in found if not _keeps_files(child) for each in (child, *_offspring(child))
    ]


def strike(process: Any) -> None:
    """Kill a process, and what it waits for, such as a program that reads a sample and hangs."""
    offspring = []
    with suppress(ProcessLookupError, ValueError):
        if process.exitcode is None:  # else its number may be another's by now
            offspring = _offspring(process.pid)
        process.kill()
    for pid in offspring:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def kill(processes: Sequence[Any]) -> None:
    """Kill processes, also stopped ones, with what they have started, and reap them."""
    for process in processes:
        if process.pid is not None:
            strike(process)
    for process in processes:
        if process.pid is not None:
            with suppress(AssertionError, ValueError):
                process.join(_GRACE_SECONDS)


def drop(iterator: list[Any]) -> None:
    """Drop the last reference to a torch iterator, in a list that is emptied, without waiting for
    it for long.

    Its clean-up may wait for a lock that a killed worker held, so it happens in a thread that
    nobody needs.
    """
    # No thread can be started any more, and torch does nothing more on its way out
    if sys.is_finalizing():
        iterator.clear()
        return
    try:
        thread = threading.Thread(
            target=iterator.clear, daemon=True, name="holdfast-loader-cleanup"
        )
        start_thread(thread, _GRACE_SECONDS / 4)
        # Mostly a matter of milliseconds, and frees descriptors for the next ones
        thread.join(_GRACE_SECONDS / 4)
    except (MemoryError, RuntimeError):
        _left.append(iterator)


def oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory since the machine
    started, 0 if unknown.
    """
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def exit_code(process: Any) -> int | None:
    """Return the exit code of a process that has just ended, or None if it cannot be had."""
    for _ in range(_LOOKS):
        process.join(_LOOK_SECONDS)
        if process.exitcode is not None:
            break
        # Another thread, mostly torch's own, is reaping it and has not written it down yet
        time.sleep(_LOOK_SECONDS)
    code: int | None = process.exitcode
    return code


def how_it_ended(process: Any, oom_kills_before: int) -> str:
    """Return in words how a worker process ended."""
    code = exit_code(process) if process.pid is not None else None
    if code is None:
        return "is gone"
    if code >= 0:
        return f"exited with code {code}"
    if code == -signal.SIGKILL and oom_kills() > oom_kills_before:
        return "was killed by the kernel, which was out of memory"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"
