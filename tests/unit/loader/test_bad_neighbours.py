"""Many bad samples in a row, as in a file that is cut short: replaced as far as the cap allows, and told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler, WeightedRandomSampler

from holdfast.core.errors import LoaderError
from holdfast.loader.loader import DataLoader
from holdfast.loader.order.orders import Sequential
from holdfast.loader.order.plan import ByBatch, ByPosition
from holdfast.loader.order.sampled import Sampled
from holdfast.loader.quarantine import FILE_NAME, read_ledger

_BAD = range(10, 30)
_LENGTH = 60


class CutShort:
    """Samples of which twenty in a row raise."""

    def __init__(self, bad: range = _BAD) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return _LENGTH

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if index in self.bad:
            raise OSError("truncated")
        return index, torch.rand(2)


def _loader(events: list[tuple[str, Any]], run_dir: Path | None = None, **options: Any) -> DataLoader:
    loader = DataLoader(**{"dataset": CutShort(), "quarantine": 25, **options})
    happened = lambda kind, **facts: events.append((kind, facts.get("sample")))  # noqa: E731
    if run_dir is None:
        loader._happened = happened
    else:
        loader.attach(happened, run_dir)
    return loader


def _samples(loader: DataLoader) -> list[int]:
    return [index for batch in loader for index in batch[0].tolist()]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_a_block_of_bad_samples_below_the_cap_is_replaced(batch_size: int, workers: int, tmp_path: Path) -> None:
    """By the first good one after it, whatever the batch size and the workers, and all of it is in the ledger."""
    events: list[tuple[str, Any]] = []
    loader = _loader(events, tmp_path, batch_size=batch_size, num_workers=workers)
    states, found = [loader.state_dict()], []
    for batch in loader:
        found.append(batch)
        states.append(loader.state_dict())
    expected = [30 if index in _BAD else index for index in range(_LENGTH)]
    assert [index for batch in found for index in batch[0].tolist()] == expected
    assert events == [("sample_quarantined", index) for index in _BAD]
    assert list(read_ledger(tmp_path / FILE_NAME)) == list(_BAD)

    before = 12 // batch_size  # within the block
    events.clear()
    resumed = _loader(events, tmp_path, batch_size=batch_size, num_workers=2 - workers)
    resumed.load_state_dict(states[before])
    again = list(resumed)
    assert not events
    for first, second in zip(found[before:], again, strict=True):
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])


def test_the_batches_of_a_sampler_go_on_over_the_batches_that_follow() -> None:
    """What stands in is no further from the bad sample than it has to be."""
    for size in (2, 7):
        events: list[tuple[str, Any]] = []
        batches = BatchSampler(SequentialSampler(range(_LENGTH)), size, drop_last=False)
        expected = [30 if index in _BAD else index for index in range(_LENGTH)]
        assert _samples(_loader(events, batch_sampler=batches)) == expected
        assert sorted(index for _, index in events) == list(_BAD)


def test_random_numbers_of_a_stand_in_are_the_same_once_it_is_known() -> None:
    """Where samples come more than once, they depend on the position, however many were passed over."""
    bad = range(48)
    sampler = WeightedRandomSampler([1.0] * _LENGTH, 40)
    events: list[tuple[str, Any]] = []
    loader = _loader(events, dataset=CutShort(bad), batch_size=4, sampler=sampler, quarantine=48)
    first = list(loader)
    assert events
    loader.go_to(0)
    events.clear()
    for before, after in zip(first, loader, strict=True):
        assert torch.equal(before[0], after[0])
        assert torch.equal(before[1], after[1])
    assert not events


@pytest.mark.parametrize("workers", [0, 1])
def test_more_in_a_row_than_allowed_are_told_and_taken_back(workers: int, tmp_path: Path) -> None:
    """The evidence is kept, and once a missing drive is back no sample is lost to it."""
    events: list[tuple[str, Any]] = []
    gone = CutShort(range(10, _LENGTH))
    loader = _loader(events, tmp_path, dataset=gone, batch_size=2, quarantine=12, num_workers=workers)
    with pytest.raises(LoaderError, match="12 are set aside already") as caught:
        list(loader)
    assert caught.value.rule == "H612"
    assert isinstance(caught.value.__cause__, OSError)
    assert events == [*(("sample_quarantined", index) for index in range(10, 22)), ("samples_taken_back", None)]
    kept = read_ledger(tmp_path / FILE_NAME).values()
    assert [each.index for each in kept] == list(range(10, 22))
    assert all(each.released and "truncated" in each.evidence for each in kept)
    assert not len(loader.ledger)
    repaired = _loader(events, tmp_path, dataset=CutShort(range(0)), batch_size=2, quarantine=12)
    repaired.load_state_dict(loader.state_dict())
    assert _samples(repaired) == list(range(10, _LENGTH))


def test_a_dataset_without_a_good_sample_says_so() -> None:
    """The sample's own error, however many might be set aside, and none is."""
    events: list[tuple[str, Any]] = []
    loader = _loader(events, dataset=CutShort(range(_LENGTH)), batch_size=4, quarantine=100)
    with pytest.raises(OSError, match="truncated") as caught:
        next(iter(loader))
    assert "is a folder or a drive missing?" in caught.value.__notes__[0]
    assert events[-1][0] == "samples_taken_back"
    assert len(events) == _LENGTH + 1
    assert not len(loader.ledger)


def test_what_cannot_be_collated_keeps_the_evidence_of_its_samples() -> None:
    """The batch fails with its own error, and the bad sample in it is known."""

    def collate(samples: list[Any]) -> Any:
        raise TypeError("cannot be collated")

    events: list[tuple[str, Any]] = []
    loader = _loader(events, dataset=CutShort(range(2, 3)), batch_size=4, collate_fn=collate)
    with pytest.raises(TypeError, match="cannot be collated"):
        next(iter(loader))
    assert events == [("sample_quarantined", 2)]


def test_what_is_set_aside_takes_no_place_among_those_that_may_stand_in() -> None:
    """There are always as many good ones, at the places that they have without it."""
    plan = ByPosition(order=Sequential(40), seed=1, batch_size=4, drop_last=False, rank=0, world_size=1)
    entries = [entry for entry, _ in plan.entries(0, 0, set(range(5, 25)))]
    assert entries[0].spares == tuple(range(4, 32))
    assert entries[6].spares == (*range(28, 36),)
    assert entries[9].spares == (*range(5), *range(5, 28))
    assert plan.spares(0, 0, set(range(5, 25)), 3) == tuple(range(4, 27))
    batches = ByBatch(sampler=Sampled([[0, 1], [2], [3, 4], [5]], 1, repeats=None))
    found = [entry.spares for entry, _ in batches.entries(0, 0, {2, 3})]
    assert found == [(2, 3, 4), (3, 4, 5), (5,), (0, 1)]
    assert batches.spares(0, 3, {0}, 2) == (0, 1, 2)
