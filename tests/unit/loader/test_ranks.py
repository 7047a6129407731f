"""Several ranks: each sample goes to one of them, whoever divides them, and whenever the process group is made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import distributed
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, get_worker_info

from holdfast import DataLoader, LoaderError

_RANK = """
import json, sys
from torch import distributed
from torch.utils.data import IterableDataset, get_worker_info
from holdfast import DataLoader

class Plain(IterableDataset):
    def __iter__(self):
        return iter(range(8))
    def __len__(self):
        return 8

class Own(Plain):
    def __iter__(self):
        info = get_worker_info()
        return iter(range(8)) if info is None else iter(range(info.id, 8, info.num_workers))

rank, store = int(sys.argv[1]), sys.argv[2]
loaders = {
    "samples": DataLoader(list(range(8)), batch_size=2, shuffle=True),
    "stream": DataLoader(Plain(), batch_size=2),
    "sharded": DataLoader(Own(), batch_size=2),
    "given": DataLoader(list(range(8)), batch_size=2, rank=0, world_size=1),
}
first = next(iter(loaders["samples"])).tolist()
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
events = []
for loader in loaders.values():
    loader._record = lambda data: events.append((data.kind, data.why))
found = {name: [len(loader), sum((batch.tolist() for batch in loader), [])] for name, loader in loaders.items()}
distributed.destroy_process_group()
print(json.dumps({"first": first, "found": found, "events": events, "after": len(loaders["samples"])}))
"""


@pytest.mark.skipif(not distributed.is_available(), reason="torch was built without distributed")
def test_a_process_group_may_be_made_after_the_loader(tmp_path: Path) -> None:
    """From the next epoch on the ranks share the samples; a stream that they do not share is told of."""
    command = [sys.executable, "-c", _RANK]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True, env=environment
        )
        for rank in range(2)
    ]
    try:
        one, other = (json.loads(rank.communicate(timeout=120)[0]) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert one["first"] == other["first"]
    for name in ("samples", "stream"):
        (length, samples), (others_length, others) = one["found"][name], other["found"][name]
        assert sorted(samples + others) == list(range(8)), name
        assert length == others_length == 2, name
    for name in ("sharded", "given"):
        assert one["found"][name] == other["found"][name], name
        assert sorted(one["found"][name][1]) == list(range(8))
    assert [kind for kind, why in one["events"] if "pass rank= and world_size=" in why] == ["ranks_not_divided"]
    assert one["after"] == 2, "the ranks of an epoch outlast their process group"


def _of_rank(rank: int, *, batches: bool, **options: Any) -> DataLoader:
    sampler: Any = DistributedSampler(range(16), num_replicas=2, rank=rank, **options)  # type: ignore[arg-type]
    if batches:
        return DataLoader(list(range(16)), batch_sampler=BatchSampler(sampler, 2, drop_last=False))
    return DataLoader(list(range(16)), batch_size=2, sampler=sampler)


@pytest.mark.parametrize("batches", [False, True])
def test_the_position_of_one_rank_is_that_of_all(batches: bool) -> None:
    """What a distributed sampler draws is compared for the same rank only, so that one saved state serves all."""
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
    with pytest.raises(LoaderError, match="another order") as caught:
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
    """Every rank has equally many batches, together they have each item, and a position goes on on all of them."""

    def of_rank(rank: int) -> DataLoader:
        return DataLoader(Own(), batch_size=3, num_workers=workers, sharded=sharded, rank=rank, world_size=2)

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


@pytest.mark.parametrize("options", [{"batch_size": 3}, {"batch_size": 3, "drop_last": True}, {"batch_size": None}])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_length_of_a_stream_is_that_of_a_rank(options: dict[str, Any], world_size: int) -> None:
    """As many batches come as its length says, also where ranks share it."""
    loader = DataLoader(Own(), sharded=False, rank=0, world_size=world_size, **options)
    assert len(list(loader)) == len(loader)
