"""What a worker reports beside each batch: samples that failed, shortages, the time it took.

Whatever goes wrong with a sample arrives as a report, never as an exception. An exception could end
the epoch (``StopIteration``), make the parent wait forever because it cannot be pickled
(pytorch#142884), or lose the index of the sample.
"""

from __future__ import annotations

import errno
import traceback
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

from holdfast.core.errors import LoaderError
from holdfast.loader.quarantine import last_line

# The number in the report of a stream's worker that has no batch when it is its turn.
PASSED_TURN = -1

_OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}

# Where shared memory is. No file is made here.
_SHARED_MEMORY_FOLDER = "/dev/shm/"  # noqa: S108


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailure:
    """A sample that could not be read, or a batch that could not be made.

    Args:
        index: Dataset index of the sample; None for a batch.
        text: The traceback.
        error: The pickled exception, if it survives pickling.
    """

    index: Any
    text: str
    error: bytes | None = None


class BatchReport(NamedTuple):
    """What happened while a batch was made.

    Args:
        number: Number of the request. In a stream, the worker, or `PASSED_TURN`.
        indices: Dataset indices of the samples in the batch; None if they are those of the request.
        failures: Samples that could not be read and are not in the batch.
        fatal: Why there is no batch at all: collating failed, or nothing was left to replace a
            sample with.
        shortage: What the machine was short of: ``"shared memory"``, ``"file descriptors"``,
            ``"memory"``, or None.
        seconds: How long it took.
        state: State of an iterable dataset after this batch.
        draws: Whether this batch, or one before it, has drawn from python's or numpy's generator
            (see `LazySeeding`).
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
        """Whether a worker of a stream had no batch when it was its turn."""
        return self.number == PASSED_TURN


def as_failure(index: Any, error: BaseException) -> LoadFailure:
    """Return an exception as a `LoadFailure`, which can always be pickled."""
    text = "".join(traceback.format_exception(error))
    try:
        pickled = bytes(ForkingPickler.dumps(error))
        survives = type(ForkingPickler.loads(pickled)) is type(error)
    except Exception:  # noqa: BLE001 - an exception class may do anything here
        survives = False
    return LoadFailure(index=index, text=text, error=pickled if survives else None)


def as_error(failure: LoadFailure, report: BatchReport) -> Exception:
    """Return the exception to raise for a batch that could not be made.

    It is the worker's own exception if that could be sent, otherwise a `LoaderError` (H613). Notes
    say which batch was made and show the worker's traceback.
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
            limit="no other sample can replace what is missing",
            fix="repair the dataset or collate_fn; the note below shows where it failed.",
            rule="H613",
        )
    if report.failures:
        first = report.failures[0]
        error.add_note(
            f"None of {len(report.failures)} samples in a row could be read: is a folder or a drive"
            f" missing? The first was sample {first.index!r}: {last_line(first.text)}"
        )
    error.add_note(f"In holdfast.DataLoader, while making the batch of {batch}:\n{failure.text}")
    return error


def find_shortage(error: BaseException) -> str | None:
    """Return what the machine is short of if an error says so, as `BatchReport.shortage`.

    Such an error is not the fault of the sample that was being read.
    """
    try:
        text = str(error)
        number = getattr(error, "errno", None)
        path = str(getattr(error, "filename", None) or "")
    except Exception:  # noqa: BLE001 - an exception class may do anything here
        return None
    if not isinstance(number, int):
        number = None
    # Only texts that the system or torch may have written are searched: that of a KeyError, for
    # instance, may be anything.
    is_of_torch = isinstance(error, RuntimeError)
    torch_text = text if is_of_torch else ""
    system_text = text if is_of_torch or isinstance(error, OSError) else ""

    # torch says "ancdata" when it receives a tensor without its descriptor.
    has_no_descriptor = "Too many open files" in system_text or "ancdata" in torch_text
    if has_no_descriptor or number in _OUT_OF_DESCRIPTORS:
        return "file descriptors"
    # With another path a disk is full, which fewer workers do not cure.
    is_full = number == errno.ENOSPC and (path == "" or path.startswith(_SHARED_MEMORY_FOLDER))
    if is_full or "shared memory" in torch_text or "</torch_" in torch_text:
        return "shared memory"
    has_no_memory = number == errno.ENOMEM or "can't allocate memory" in torch_text
    if has_no_memory or isinstance(error, MemoryError):
        return "memory"
    return None
