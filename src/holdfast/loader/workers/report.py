"""The report that a worker sends with each batch, including any failures.

The failure of a sample is sent in a report, never as an exception. An exception could end the epoch
(``StopIteration``), make the parent wait forever if it cannot be pickled (pytorch#142884), or lose
the index of the sample.
"""

from __future__ import annotations

import errno
import traceback
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

from holdfast.core.errors import LoaderError
from holdfast.loader.quarantine import last_line

# Value of `BatchReport.number` if a worker of a stream has no batch when it is the worker's turn.
PASSED_TURN = -1

# The exhausted resource that an error indicates, by the error's errno.
_SHORTAGES_BY_NUMBER = {
    errno.EMFILE: "file descriptors",
    errno.ENFILE: "file descriptors",
    errno.ENOMEM: "memory",
}

# The exhausted resource that a torch error indicates, by a part of the error's message.
_SHORTAGES_BY_TEXT = {
    "Too many open files": "file descriptors",
    # This error means that a tensor arrived without its file descriptor.
    "ancdata": "file descriptors",
    "shared memory": "shared memory",
    # torch's shared memory objects have names that begin like this.
    "</torch_": "shared memory",
    "can't allocate memory": "memory",
}

# The file system for shared memory. holdfast creates no files in it.
_SHARED_MEMORY_FOLDER = "/dev/shm/"  # noqa: S108


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailure:
    """A sample that could not be read, or a batch that could not be made.

    Args:
        index: Dataset index of the sample, or None for a batch.
        text: The traceback.
        error: The pickled exception, or None if it cannot be pickled.
    """

    index: Any
    text: str
    error: bytes | None = None


class BatchReport(NamedTuple):
    """Describes how a batch was made, or why it could not be made.

    Args:
        number: Number of the request. For a stream, the number of the worker or `PASSED_TURN`.
        indices: Dataset indices of the samples in the batch, or None if they are the same as in the
            request.
        failures: Samples that could not be read and were left out of the batch.
        fatal: Why there is no batch: collating failed, or no replacement was found for a sample.
        shortage: The resource that the machine ran out of (``"shared memory"``, ``"file
            descriptors"`` or ``"memory"``), or None.
        seconds: How long it took to make the batch.
        state: The position of an iterable dataset after this batch.
        draws: Whether this batch or an earlier one drew from Python's or NumPy's generator (see
            `LazySeeding`).
    """

    number: int
    indices: tuple[Any, ...] | None = None
    failures: tuple[LoadFailure, ...] = ()
    fatal: LoadFailure | None = None
    shortage: str | None = None
    seconds: float = 0.0
    state: Any = None
    draws: bool = False

    @property
    def has_batch(self) -> bool:
        """Whether a batch was made."""
        return self.fatal is None and self.shortage is None

    @property
    def is_passed_turn(self) -> bool:
        """Whether a worker of a stream had no batch when it was the worker's turn."""
        return self.number == PASSED_TURN


def as_failure(index: Any, error: BaseException) -> LoadFailure:
    """Convert an exception to a `LoadFailure`, which can be pickled even if the exception cannot.

    Args:
        index: Dataset index of the sample that raised the exception, or None for a batch.
        error: The exception.
    """
    text = "".join(traceback.format_exception(error))
    try:
        pickled = bytes(ForkingPickler.dumps(error))
        survives = type(ForkingPickler.loads(pickled)) is type(error)
    except Exception:  # noqa: BLE001 - an exception class may do anything here
        survives = False
    return LoadFailure(index=index, text=text, error=pickled if survives else None)


def as_error(failure: LoadFailure, report: BatchReport) -> Exception:
    """Return the exception to raise for a batch that could not be made.

    This is the exception from the worker if it could be pickled, otherwise a `LoaderError` (H613).
    Notes are added that name the batch and contain the worker's traceback.

    Args:
        failure: Why the batch could not be made.
        report: The worker's report for the batch.
    """
    batch = "a stream"
    if report.indices is not None:
        batch = f"samples {list(report.indices)}"
    error = None
    if failure.error is not None:
        error = ForkingPickler.loads(failure.error)
    if not isinstance(error, Exception) or isinstance(error, StopIteration):
        reason = last_line(failure.text) or "it raised"
        error = LoaderError(
            f"the batch of {batch} cannot be made: {reason}",
            limit="no other sample can replace the failed one",
            fix="fix the dataset or collate_fn; the note below shows where it failed.",
            rule="H613",
        )
    if report.failures:
        first = report.failures[0]
        error.add_note(
            f"None of {len(report.failures)} consecutive samples could be read. Is a folder or a"
            f" drive missing? The first was sample {first.index!r}: {last_line(first.text)}"
        )
    error.add_note(f"In holdfast.DataLoader, while making the batch of {batch}:\n{failure.text}")
    return error


def find_shortage(error: BaseException) -> str | None:
    """Return the resource that ran out, according to an error, or None if none did.

    The resources are listed at `BatchReport.shortage`. If one ran out, the sample that was being
    read is not at fault.
    """
    if isinstance(error, MemoryError):
        return "memory"
    try:
        text = str(error)
        number = getattr(error, "errno", None)
        path = str(getattr(error, "filename", None) or "")
    except Exception:  # noqa: BLE001 - an exception class may do anything here
        return None
    if isinstance(number, int) and number in _SHORTAGES_BY_NUMBER:
        return _SHORTAGES_BY_NUMBER[number]
    # An error with any other path means that a disk is full, and fewer workers would not help.
    if number == errno.ENOSPC and (path == "" or path.startswith(_SHARED_MEMORY_FOLDER)):
        return "shared memory"
    # Some libraries raise this error without an errno.
    if isinstance(error, OSError) and "Too many open files" in text:
        return "file descriptors"
    # The message of any other error may be arbitrary text, such as a key, so it is not searched.
    if isinstance(error, RuntimeError):
        for part, shortage in _SHORTAGES_BY_TEXT.items():
            if part in text:
                return shortage
    return None
