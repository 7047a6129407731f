"""Several ranks: each sample goes to one of them, whoever divides them, and whenever the process
group is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.unit.loader.samples import items
from torch import distributed
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, get_worker_info

from holdfast import DataLoader, LoaderError
from holdfast.core.events.data import EventData


def test_a_process_group_may_be_made_after_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the next epoch on the ranks share the samples.

    That they do not share a stream is an event.
    """
    make: dict[str, Callable[[], DataLoader]] = {
        "samples": lambda: DataLoader(list(range(22)), batch_size=2, shuffle=True),
        "stream": lambda: DataLoader(Own(), batch_size=2, sharded=False),
        "sharded": lambda: DataLoader(Own(), batch_size=2),
        "given": lambda: DataLoader(list(range(22)), batch_size=2, rank=0, world_size=1),
    }
    ranks = [{name: each() for name, each in make.items()} for _ in range(2)]
    first = [next(iter(loaders["samples"])).tolist() for loaders in ranks]
    assert first[0] == first[1]
    events: list[EventData] = []
    found: dict[str, list[list[int]]] = {name: [] for name in make}
    with monkeypatch.context() as group:
        group.setattr(distributed, "is_initialized", lambda: True)
        group.setattr(distributed, "get_world_size", lambda: 2)
        for rank, loaders in enumerate(ranks):
            group.setattr(distributed, "get_rank", lambda rank=rank: rank)
            for name, loader in loaders.items():
                loader._record = events.append
                found[name].append(items(loader))
                assert len(loader) == (6 if name in ("samples", "stream") else 11)
    for name in ("samples", "stream"):
        assert sorted(sample for each in found[name] for sample in each) == list(range(22)), name
    for name in ("sharded", "given"):
        assert [sorted(each) for each in found[name]] == [list(range(22))] * 2, name
    assert [event.kind for event in events] == ["ranks_not_divided"] * 2
    assert len(ranks[1]["samples"]) == 6, "the ranks of an epoch outlast their process group"


def _of_rank(rank: int, *, batches: bool, **options: Any) -> DataLoader:
    sampler: Any = DistributedSampler(range(16), num_replicas=2, rank=rank, **options)  # type: ignore[arg-type]
    if batches:
        return DataLoader(list(range(16)), batch_sampler=BatchSampler(sampler, 2, drop_last=False))
    return DataLoader(list(range(16)), batch_size=2, sampler=sampler)


@pytest.mark.parametrize("batches", [False, True])
def test_the_position_of_one_rank_is_that_of_all(batches: bool) -> None:
    """What a distributed sampler draws is compared for the same rank only, so that one saved
    state serves all.
    """
    whole = [[batch.tolist() for batch in _of_rank(rank, batches=batches)] for rank in range(2)]
    loader = _of_rank(0, batches=batches)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    older = {name: value for name, value in state.items() if name != "drawn_rank"}
    for rank in range(2):
        for saved in (state, older):
            resumed = _of_rank(rank, batches=batches)
            resumed.load_state_dict(saved)
            assert [batch.tolist() for batch in resumed] == whole[rank][1:]
    changed = _of_rank(0, batches=batches, seed=9)
    with pytest.raises(LoaderError) as caught:
        changed.load_state_dict(state)
    assert caught.value.rule == "H604"


class Own(IterableDataset[int]):
    """The numbers to 22, dealt out to workers by itself; it knows no ranks."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(22) if info is None else range(info.id, 22, info.num_workers))

    def __len__(self) -> int:
        return 22


@pytest.mark.parametrize("sharded", [None, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_that_are_given_share_a_stream_that_divides_itself_among_workers(
    workers: int, sharded: bool | None
) -> None:
    """Every rank has equally many batches, together they have each item, and a position goes on
    on all of them.
    """

    def of_rank(rank: int) -> DataLoader:
        return DataLoader(
            Own(), batch_size=3, num_workers=workers, sharded=sharded, rank=rank, world_size=2
        )

    parts = [[batch.tolist() for batch in of_rank(rank)] for rank in range(2)]
    assert len(parts[0]) == len(parts[1])
    assert sorted(item for part in parts for batch in part for item in batch) == list(range(22))
    loader = of_rank(0)
    batches = iter(loader)
    next(batches), next(batches)
    for rank in range(2):
        resumed = of_rank(rank)
        resumed.load_state_dict(loader.state_dict())
        assert [batch.tolist() for batch in resumed] == parts[rank][2:]


@pytest.mark.parametrize(
    "options", [{"batch_size": 3}, {"batch_size": 3, "drop_last": True}, {"batch_size": None}]
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_length_of_a_stream_is_that_of_a_rank(options: dict[str, Any], world_size: int) -> None:
    """As many batches come as its length says, also where ranks share it."""
    loader = DataLoader(Own(), sharded=False, rank=0, world_size=world_size, **options)
    assert len(list(loader)) == len(loader)
