"""Work on a checkpoint beside the training.

One job in a thread of its own, and what it may do there.

The thread is no daemon: an interpreter that ends waits for it, so a save that was begun is
finished. A process that is forked meanwhile does not have the thread and must not wait for it.
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
# torch splits a reduction of more elements over threads (at::internal::GRAIN_SIZE is 32768): they
# would be taken from the training, and OpenMP's do not survive a fork of loader workers.
_ELEMENTS = 32_767
_NAME = "holdfast-writer"
_LOOK_SECONDS = 0.02


class Job(Generic[_Result]):
    """A function that runs beside the training, begun at once; `directory` is where it may write.

    MemoryError or RuntimeError where there is none for a thread or its stack.
    """

    def __init__(self, run: Callable[[], _Result], directory: Path) -> None:
        self._found: list[_Result] = []
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._work, args=(run,), name=f"{_NAME} {directory}", daemon=False
        )
        self._pid = os.getpid()
        start_thread(self._thread)

    def _work(self, run: Callable[[], _Result]) -> None:
        try:
            self._found.append(run())
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            self._error = error
        finally:
            self._ended.set()

    @property
    def is_running(self) -> bool:
        """Return whether it is under way."""
        return not self._found and self._error is None and self._thread.is_alive()

    def result(self) -> _Result | None:
        """Wait for the end and return what came of it, or raise it.

        None in a forked process, which lacks it.
        """
        # Not join: an exception of a signal handler in it makes Python 3.11 believe that the thread
        # has ended, and then the interpreter does not wait for it either.
        while self._thread.is_alive() and not self._ended.wait(_LOOK_SECONDS):
            pass
        if self._error is not None:
            raise self._error
        if not self._ended.is_set() and os.getpid() == self._pid:
            raise MemoryError("the thread that writes ended before it had begun")
        return self._found[0] if self._found else None


def wait_for_jobs(directory: Path) -> None:
    """Wait until no job of this process writes to a directory, also one whose owner is gone."""
    for thread in threading.enumerate():
        if thread.name == f"{_NAME} {directory}" and thread is not threading.current_thread():
            while thread.is_alive():
                time.sleep(_LOOK_SECONDS)


def nonfinite_copies(
    named: Iterable[tuple[str, torch.Tensor]], *, most: int = 5
) -> tuple[list[str], int]:
    """Return what `nonfinite_tensors` returns for tensors on the host in one piece, with one
    thread only.
    """
    pieces = [
        (name, piece)
        for name, tensor in named
        for piece in torch.split(tensor.reshape(-1), _ELEMENTS)
    ]
    bad = list(dict.fromkeys(nonfinite_tensors(pieces, most=len(pieces))[0]))
    return bad[:most], len(bad)
