"""What is done for one batch.

Seeds for each sample, replacements, collation, and a report of all that went wrong.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.loader.samples import Samples, items, noise

from holdfast.loader.loader import DataLoader
from holdfast.loader.order.batches import BatchRequest
from holdfast.loader.random_state import capture
from holdfast.loader.workers.fetch import Fetcher
from holdfast.loader.workers.report import BatchReport, find_shortage


def _fetch(dataset: Any, *indices: int, epoch: int = 0, seed: int = 5) -> Any:
    """Return the samples of a batch, or None if there is no batch."""
    return Fetcher(dataset, seed, list)[BatchRequest(0, epoch, indices)][0]


def test_loading_leaves_the_random_state_of_training_alone() -> None:
    """In the main process nothing is drawn from the global generators, also when a sample fails."""

    def broken(index: int) -> None:
        noise(index)
        raise LookupError("broken sample")

    before = capture()
    _fetch(Samples(10, noise), 1, 2)
    assert _fetch(Samples(10, broken), 1) is None
    after = capture()
    assert after.python == before.python
    assert np.array_equal(after.numpy[1], before.numpy[1])
    assert after.numpy[2:] == before.numpy[2:]
    assert torch.equal(after.cpu, before.cpu)


def test_generators_that_are_drawn_from_late_are_noticed() -> None:
    """A dataset that draws from python or numpy only now and then gets the same numbers as if
    always seeded.
    """

    def rare(index: int) -> tuple[int, float]:
        return index, (
            random.random() if index == 3 else float(np.random.rand()) if index == 5 else 0.0
        )

    together = _fetch(Samples(8, rare), *range(8))
    assert together == [_fetch(Samples(8, rare), index)[0] for index in range(8)]
    assert together[3][1]
    assert together[5][1]


def _report(dataset: Any, request: BatchRequest, **options: Any) -> tuple[Any, BatchReport]:
    batch, fields = Fetcher(dataset, 0, list, **options)[request]
    return batch, BatchReport(*fields)


class Patchy:
    """Samples of which some raise."""

    def __init__(self, *bad: int, error: Exception | None = None) -> None:
        self.bad = bad
        self.error = error or ValueError("bad sample")
        self.asked: list[int] = []

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        if index in self.bad:
            raise self.error
        return index


def test_a_bad_sample_is_tried_again_and_the_next_of_the_order_takes_its_place() -> None:
    """The batch keeps its size, and the report names the sample, the traceback and who stands
    in.
    """
    dataset = Patchy(1)
    batch, report = _report(dataset, BatchRequest(0, 0, (0, 1, 2), spares=(7, 8)))
    assert batch == [0, 2, 2]
    assert report.indices == (0, 2, 2)
    assert dataset.asked == [0, 1, 1, 2, 2]
    assert [each.index for each in report.failures] == [1]
    assert "ValueError: bad sample" in report.failures[0].text


def test_the_last_of_a_batch_is_replaced_by_a_spare_that_is_not_bad_itself() -> None:
    """Behind the end of the batch come the spares, and those that are bad or quarantined are
    passed over.
    """
    batch, report = _report(Patchy(2, 7), BatchRequest(0, 0, (0, 1, 2), spares=(6, 7, 8), bad=(6,)))
    assert batch == [0, 1, 8]
    assert [each.index for each in report.failures] == [2, 7]


def test_without_replacement_the_error_itself_is_reported() -> None:
    """With quarantine off a sample is read once, and its exception is the outcome of the batch."""
    dataset = Patchy(1, error=LookupError("gone"))
    batch, report = _report(dataset, BatchRequest(0, 0, (0, 1, 2), spares=(7,)), replaces=False)
    assert batch is None
    assert report.fatal is not None
    assert "LookupError: gone" in report.fatal.text
    assert dataset.asked.count(7) == 0


class SpeechlessError(Exception):
    """An exception that cannot even be printed."""

    errno = (1,)

    def __str__(self) -> str:
        raise TypeError("no text")


class EvasiveError(Exception):
    """An exception that says something about itself only in an exception."""

    @property
    def errno(self) -> int:
        raise ValueError("not known")


@pytest.mark.parametrize(
    "error", [StopIteration(), SystemExit(3), KeyError("x"), SpeechlessError(), EvasiveError()]
)
def test_no_exception_leaves_a_fetch(error: Any) -> None:
    """StopIteration, which would end the epoch, SystemExit, which would end the worker, and
    broken ones come back.
    """
    batch, report = _report(Patchy(0, error=error), BatchRequest(0, 0, (0, 1)))
    assert batch == [1, 1]
    assert report.failures[0].index == 0


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (OSError(24, "Too many open files"), "file descriptors"),
        (RuntimeError("received 0 items of ancdata"), "file descriptors"),
        (
            RuntimeError(
                "unable to allocate shared memory(shm) for file </torch_1>: No space left"
            ),
            "shared memory",
        ),
        (MemoryError(), "memory"),
        (
            RuntimeError("unable to write to file </torch_1>: No space left on device (28)"),
            "shared memory",
        ),
        (OSError(28, "No space left on device"), "shared memory"),
        (OSError(28, "No space left on device", "/cache/7.npy"), None),
        (ValueError("bad sample"), None),
        (KeyError("freshman"), None),
        (ValueError("a picture of shared memory"), None),
        (FileNotFoundError(2, "No such file", "/dev/shm/data/7.png"), None),
        (OSError(2, "No such file"), None),
    ],
)
def test_what_a_machine_is_short_of_is_told_from_what_a_sample_lacks(
    error: Exception, what: str | None
) -> None:
    """An error that more room would cure does not count against the sample."""
    assert find_shortage(error) == what


@pytest.mark.parametrize("workers", [0, 2])
def test_a_row_of_bad_samples_is_replaced_or_a_missing_drive(workers: int) -> None:
    """Up to sixteen behind a batch are passed over and quarantined.

    Beyond that none is, and its own error comes.
    """
    bad = range(10, 30)

    def read(index: int) -> int:
        if index in bad:
            raise OSError("truncated")
        return index

    loader = DataLoader(Samples(60, read), batch_size=8, num_workers=workers, quarantine=30)
    assert items(loader) == [30 if index in bad else index for index in range(60)]
    assert [entry.index for entry in loader.ledger] == list(bad)
    bad = range(10, 60)
    loader = DataLoader(Samples(60, read), batch_size=8, num_workers=workers, quarantine=60)
    with pytest.raises(OSError, match="truncated") as caught:
        list(loader)
    assert "22 consecutive samples" in caught.value.__notes__[0]
    assert not len(loader.ledger)
