"""Write a checkpoint in a background thread while training continues.

The thread is not a daemon thread: the interpreter waits for it at exit, so a save that has started
always finishes. The thread does not exist in a process forked during the save, so that process must
not wait for it.
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
# Largest number of elements that torch reduces in a single thread (at::internal::GRAIN_SIZE is
# 32768). More threads would compete with training for cores, and OpenMP threads do not survive the
# forking of loader workers.
_MAX_ELEMENTS = 32_767
_THREAD_NAME = "holdfast-writer"
_POLL_SECONDS = 0.02


class BackgroundJob(Generic[_Result]):
    """Runs a function in a background thread, which starts immediately.

    Args:
        run: The function to run.
        directory: The directory that the function writes to.

    Raises:
        MemoryError, RuntimeError: There is not enough memory for the thread or its stack.
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
        # `result` raises the error again.
        except BaseException as error:  # noqa: BLE001
            self._error = error
        finally:
            self._ended.set()

    @property
    def is_running(self) -> bool:
        """Whether the function is still running."""
        return not self._results and self._error is None and self._thread.is_alive()

    def result(self) -> _Result | None:
        """Wait for the function to finish and return its result, or raise its error.

        Returns:
            The function's result, or None in a forked process, where the thread does not exist.
        """
        # join() is not used here. If a signal handler raises an exception during join(), Python
        # 3.11 marks the thread as finished, and the interpreter no longer waits for it at exit.
        while self._thread.is_alive() and not self._ended.wait(_POLL_SECONDS):
            pass
        if self._error is not None:
            raise self._error
        if not self._ended.is_set() and os.getpid() == self._pid:
            raise MemoryError("the writer thread ended before it had started")
        return self._results[0] if self._results else None


def _thread_name(directory: Path) -> str:
    # The name contains the directory, so that `wait_for_jobs` can find the thread.
    return f"{_THREAD_NAME} {directory}"


def wait_for_jobs(directory: Path) -> None:
    """Wait until no background job of this process is writing to a directory.

    This includes jobs whose `BackgroundJob` object no longer exists.
    """
    for thread in threading.enumerate():
        if thread.name != _thread_name(directory) or thread is threading.current_thread():
            continue
        while thread.is_alive():
            time.sleep(_POLL_SECONDS)


def nonfinite_copies(
    named: Iterable[tuple[str, torch.Tensor]], *, most: int = 5
) -> tuple[list[str], int]:
    """Return the same result as `nonfinite_tensors`, but compute it in a single thread.

    The tensors must be contiguous and in host memory.
    """
    chunks = [
        (name, chunk)
        for name, tensor in named
        for chunk in torch.split(tensor.reshape(-1), _MAX_ELEMENTS)
    ]
    names, _ = nonfinite_tensors(chunks, most=len(chunks))
    # A tensor is listed once for each of its chunks that contains NaN or Inf.
    unique = list(dict.fromkeys(names))
    return unique[:most], len(unique)
