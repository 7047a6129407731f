"""Write a checkpoint while training continues: one job in its own thread.

The thread is not a daemon: the interpreter waits for it at exit, so a save that has started is
always finished. A process forked in the meantime does not have the thread and must not wait for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

import torch

from holdfast.checkpoint.health import nonfinite_tensors
from holdfast.core.threads import start_thread

_Result = TypeVar("_Result")
# torch splits a reduction of more elements over threads (at::internal::GRAIN_SIZE is 32768).
# Training would lose these threads, and OpenMP's do not survive a fork of loader workers.
_MOST_ELEMENTS = 32_767
_THREAD_NAME = "holdfast-writer"
_POLL_SECONDS = 0.02


class BackgroundJob(Generic[_Result]):
    """A function that runs while training continues. It is started at once.

    Args:
        run: The function.
        directory: The directory that it writes to.

    Raises:
        MemoryError, RuntimeError: There is not enough memory for a thread or its stack.
    """

    def __init__(self, run: Callable[[], _Result], directory: Path) -> None:
        # Empty until the function has returned.
        self._results: list[_Result] = []
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._work, args=(run,), name=_thread_name(directory), daemon=False
        )
        self._pid = os.getpid()
        start_thread(self._thread)

    def _work(self, run: Callable[[], _Result]) -> None:
        try:
            self._results.append(run())
        # Raised again by `result`.
        except BaseException as error:  # noqa: BLE001
            self._error = error
        finally:
            self._ended.set()

    @property
    def is_running(self) -> bool:
        """Whether the function is still running."""
        return not self._results and self._error is None and self._thread.is_alive()

    def result(self) -> _Result | None:
        """Wait for the end and return the result, or raise the error.

        Returns:
            None in a forked process, which does not have the thread.
        """
        # Not join(): if a signal handler raises in it, Python 3.11 takes the thread for finished,
        # and the interpreter no longer waits for it either.
        while self._thread.is_alive() and not self._ended.wait(_POLL_SECONDS):
            pass
        if self._error is not None:
            raise self._error
        if not self._ended.is_set() and os.getpid() == self._pid:
            raise MemoryError("the writer thread ended before it had started")
        return self._results[0] if self._results else None


def _thread_name(directory: Path) -> str:
    return f"{_THREAD_NAME} {directory}"


def wait_for_jobs(directory: Path) -> None:
    """Wait until no job of this process writes to a directory, even one whose owner is gone."""
    for thread in threading.enumerate():
        if thread.name != _thread_name(directory) or thread is threading.current_thread():
            continue
        while thread.is_alive():
            time.sleep(_POLL_SECONDS)


def nonfinite_copies(
    named: Iterable[tuple[str, torch.Tensor]], *, most: int = 5
) -> tuple[list[str], int]:
    """Do the same as `nonfinite_tensors` in a single thread, for contiguous tensors on the host."""
    chunks = [
        (name, chunk)
        for name, tensor in named
        for chunk in torch.split(tensor.reshape(-1), _MOST_ELEMENTS)
    ]
    names, _ = nonfinite_tensors(chunks, most=len(chunks))
    # Several chunks of one tensor may be bad.
    unique = list(dict.fromkeys(names))
    return unique[:most], len(unique)
