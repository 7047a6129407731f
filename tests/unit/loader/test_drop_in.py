"""Programs that run with torch's loader run with ours, and positions stay right whatever they
do: a trap each.
"""

from __future__ import annotations

import copy
import gc
import json
import pickle
import random
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.loader.samples import Samples, items
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from holdfast import DataLoader, LoaderError
from holdfast.loader.order.orders import LengthBucketed
from holdfast.loader.workers import child_signals
from holdfast.loader.workers.processes import StartedProcesses


def test_a_batch_that_cannot_be_made_does_not_end_the_epoch_for_who_goes_on() -> None:
    """Torch's way of passing over a batch, catching its error around ``next``, passes over this
    one batch.
    """

    def collate(samples: list[int]) -> torch.Tensor:
        if 4 in samples:
            raise ValueError("cannot be collated")
        return torch.tensor(samples)

    for workers in (0, 2):
        iterator, found = (
            iter(
                DataLoader(list(range(10)), batch_size=2, collate_fn=collate, num_workers=workers)
            ),
            [],
        )
        while True:
            try:
                found.append(next(iterator).tolist())
            except ValueError:
                found.append(None)
            except StopIteration:
                break
        assert found == [[0, 1], [2, 3], None, [6, 7], [8, 9]]


_KEYS: dict[str, Callable[[], Any]] = {
    "tensors": lambda: torch.arange(12).split(3),
    "arrays": lambda: np.arange(12).reshape(4, 3),
    "slices": lambda: [slice(first, first + 3) for first in (0, 3, 6, 9)],
    "lists": lambda: BatchSampler(SequentialSampler(range(12)), 3, drop_last=False),
}


@pytest.mark.parametrize("keys", _KEYS.values(), ids=_KEYS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_key_may_name_many_samples(keys: Callable[[], Any], workers: int, tmp_path: Path) -> None:
    """With ``batch_size=None`` a sampler's arrays, slices and lists reach the dataset.

    A bad one is set aside.
    """
    bad = -1

    def read(key: Any) -> torch.Tensor:
        found = 10 * torch.arange(12)[key]
        if bad in found:
            raise ValueError("unreadable")
        return found

    def loader() -> DataLoader:
        return DataLoader(Samples(12, read), batch_size=None, sampler=keys(), num_workers=workers)

    assert items(loader()) == list(range(0, 120, 10))
    bad = 40
    for _ in range(2):  # the second time it is known from the file
        hurt = loader()
        hurt.ledger.keep_in(tmp_path / "ledger")
        assert items(hurt) == [0, 10, 20, *([60, 70, 80] * 2), 90, 100, 110]
        assert len(hurt.ledger) == 1


def test_a_loader_can_be_copied_and_sent_to_a_process() -> None:
    """As torch's; a dataset that reads through a loader of its own works in workers that are
    started, not forked.
    """
    loader = DataLoader(Samples(4, _normal), batch_size=2, seed=np.int64(3))
    expected = torch.cat(list(loader))
    for made in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert json.loads(json.dumps(made.state_dict()))["epoch"] == 1
        made.go_to(0)
        assert torch.equal(torch.cat(list(made)), expected)
    outer = DataLoader(
        Samples(2, Through()), batch_size=2, num_workers=1, multiprocessing_context="spawn"
    )
    events: list[str] = []
    outer._record = lambda data: events.append(data.kind)
    assert items(outer) == [6, 6]
    assert "loader_healed" not in events


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_a_loader_is_gone_with_its_last_reference(options: dict[str, Any]) -> None:
    """And its kept workers with it, as torch's: garbage may not be collected for a long time."""
    gc.collect()
    gc.disable()
    try:
        loader = DataLoader(list(range(8)), batch_size=2, **options)
        list(loader)
        kept = loader._recovery._kept_pool
        processes = [] if kept is None else list(kept._processes)
        del kept
        gone = weakref.ref(loader)
        del loader
        assert gone() is None
        for process in processes:
            process.join(30)
        assert not any(process.is_alive() for process in processes)
    finally:
        gc.enable()


def test_an_iterator_knows_its_length() -> None:
    """Programs that count with ``len(iter(loader))`` go on working."""
    assert len(iter(DataLoader(list(range(5)), batch_size=2))) == 3  # type: ignore[arg-type] # torch's says so too


def test_a_sample_that_comes_often_is_augmented_anew_each_time() -> None:
    """Drawn with replacement, 16 draws of 2 samples have 16 augmentations, also after a cut and
    with another size.
    """
    data, sampler = Samples(2, lambda index: torch.rand(())), WeightedRandomSampler([1.0, 1.0], 16)
    whole = torch.cat(list(DataLoader(data, batch_size=3, sampler=sampler)))
    assert len(whole.unique()) == 16
    loader = DataLoader(data, batch_size=3, sampler=sampler)
    iterator = iter(loader)
    head = [next(iterator), next(iterator)]
    rest = DataLoader(data, batch_size=5, sampler=sampler)
    rest.load_state_dict(loader.state_dict())
    assert torch.equal(torch.cat([*head, *rest]), whole)


def test_an_order_that_was_made_for_other_data_is_refused() -> None:
    """Too few lengths would leave samples out, too many would name some that are not there.

    H607.
    """
    for given in (
        {"sampler": LengthBucketed([1.0, 2.0])},
        {"sampler": LengthBucketed([1.0] * 5)},
        {"batch_sampler": LengthBucketed([1.0] * 3)},
    ):
        with pytest.raises(LoaderError) as caught:
            DataLoader([1, 2, 3], **given)
        assert caught.value.rule == "H607"


def test_torch_raises_about_no_worker_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its SIGCHLD handler is kept quiet about our processes from before they run, and about no
    others.

    Raised inside a queue, it leaves a lock locked for ever, once in some hundred early deaths: the
    process numbers are made up here, since that moment cannot be had at will.
    """
    ours = StartedProcesses([SimpleNamespace(pid=123)])
    monkeypatch.setattr(child_signals, "_own_processes", {ours})
    raised: list[str] = []

    def handler(number: int, frame: Any) -> None:
        if raised:
            raise RuntimeError(raised.pop())

    monkeypatch.setattr(child_signals, "_previous_handler", handler)
    raised.append("DataLoader worker (pid 123) is killed by signal: Killed.")
    child_signals._on_child(signal.SIGCHLD, None)
    raised.append("DataLoader worker (pid 1234) is killed by signal: Killed.")
    with pytest.raises(RuntimeError, match="1234"):
        child_signals._on_child(signal.SIGCHLD, None)


def test_worker_init_fn_finds_the_users_dataset() -> None:
    """``get_worker_info().dataset`` is what the program gave, so that it can open its files
    there.
    """

    def open_file(worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.read = range(100, 108).__getitem__  # type: ignore[attr-defined]

    assert items(DataLoader(Samples(8), batch_size=4, num_workers=2, worker_init_fn=open_file)) == [
        *range(100, 108)
    ]


def _normal(index: int) -> torch.Tensor:
    """Return a number each from the generators that make normal numbers in pairs."""
    return torch.tensor([np.random.randn(), random.gauss(0, 1)])


class Through:
    """Reads through a loader."""

    def __init__(self) -> None:
        self.loader = DataLoader(list(range(4)), batch_size=2)

    def __call__(self, index: int) -> int:
        return sum(items(self.loader))


def test_a_sampler_that_no_memory_holds_is_refused_with_the_way_out() -> None:
    """An epoch of minGPT is 1e10 draws, since steps end its runs."""
    sampler = RandomSampler(range(1000), replacement=True, num_samples=10**10)
    with pytest.raises(LoaderError, match=r"(?s)10,000,000,000.*H603"):
        DataLoader(range(1000), sampler=sampler, batch_size=64)
