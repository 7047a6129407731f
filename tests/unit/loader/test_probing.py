"""Measuring with real loaders: what a probe sees, what a transfer costs, and that nothing of the process changes."""

from __future__ import annotations

import dataclasses
import resource
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from holdfast.loader.tuning.machine import Machine
from holdfast.loader.tuning.probing import (
    Instant,
    Transfer,
    kept,
    measure_throughput,
    measure_transfer,
    probe,
    sample_of,
    with_workers,
)


class Waits(Dataset[Any]):
    """Samples that wait, or compute, for 5 ms."""

    def __init__(self, *, computing: bool) -> None:
        self.computing = computing

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.computing:
            start = time.thread_time_ns()
            while time.thread_time_ns() - start < 5_000_000:
                pass
        else:
            time.sleep(0.005)
        return torch.zeros(100 + index)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


def test_a_probe_tells_waiting_from_computing() -> None:
    """The times of each batch: both kinds take 5 ms at least, but only one of them takes a processor."""
    for computing in (False, True):
        samples, largest = probe(iter(DataLoader(Waits(computing=computing), batch_size=None)), None, 4)
        assert len(samples) == 4
        assert min(sample.load_seconds for sample in samples) >= 0.005
        assert (min(sample.load_cpu_seconds for sample in samples) >= 0.0049) is computing
        assert largest.shape == (103,)


def test_a_probe_times_the_steps_and_loads_no_more_than_it_may() -> None:
    """What is done with a batch is the step; a set with fewer batches gives fewer samples."""
    drawn = iter(range(20))
    samples, _ = probe(drawn, lambda _: time.sleep(0.002), 5)
    assert [sample.step_seconds >= 0.002 for sample in samples] == [True] * 5
    assert next(drawn) == 5
    assert probe(iter([])) == ([], None)


def test_the_clocks_only_go_forward() -> None:
    """Each of the three clocks counts up."""
    a, b = Instant.now(), Instant.now()
    assert b.wall > a.wall
    assert b.cpu >= a.cpu
    assert b.queued >= a.queued >= 0


def test_a_transfer_is_measured_without_touching_the_process() -> None:
    """A real worker sends copies: costs come out above zero, no random number is drawn, and no tensor is moved."""
    batch = {"x": torch.zeros(1000), "names": ["a"], "table": np.zeros(3)}
    before = torch.get_rng_state()
    found = measure_transfer(batch)
    assert found.hand_over_seconds > 0
    assert found.hand_over_cpu_seconds > 0
    assert found.worker_seconds > 0
    assert found != Transfer.assumed(4000, 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert not batch["x"].is_shared()


def test_what_cannot_be_tried_out_is_assumed() -> None:
    """A batch that no worker could send, and one that is too large to be copied a few times, get the assumed cost."""
    assert measure_transfer([torch.zeros(10), iter(x for x in range(3))]) == Transfer.assumed(40, 1)
    large = torch.empty(2**25)
    assert measure_transfer(large) == Transfer.assumed(2**27, 1)
    assert Transfer.assumed(0, 4).hand_over_seconds > Transfer.assumed(0, 1).hand_over_seconds


def test_copies_must_fit_into_shared_memory() -> None:
    """As few copies as are needed are made where /dev/shm is small, and none where it is too small for them."""
    batch = torch.zeros(2**18)
    small, least = (Machine(cpu_quota=1, shared_memory_free_bytes=mib * 2**20) for mib in (3, 5))
    assert measure_transfer(batch, machine=small) == Transfer.assumed(2**20, 1)
    assert measure_transfer(batch, machine=least) != Transfer.assumed(2**20, 1)


def test_copies_must_fit_into_the_descriptors() -> None:
    """Twelve copies of eight tensors are more than may be open here: four are sent, and nobody waits for more."""
    batch = [torch.zeros(10) for _ in range(8)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (Machine.here().open_files + 62, hard))
    try:
        assert measure_transfer(batch) != Transfer.assumed(320, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_loader_with_other_workers(workers: int) -> None:
    """Order, batches and collate function are kept, for batched, unbatched and streamed data."""
    data = TensorDataset(torch.arange(10))
    depth = 2 if workers else None
    for loader in (
        DataLoader(data, batch_size=3, drop_last=True, collate_fn=lambda rows: [int(row[0]) for row in rows]),
        DataLoader(data, batch_size=None, collate_fn=lambda row: int(row[0])),
        DataLoader(data, batch_sampler=[[3, 1], [9]], collate_fn=len),
    ):
        assert list(with_workers(loader, workers, depth)) == list(loader)
    streamed = with_workers(DataLoader(Stream(), batch_size=4), workers, depth)
    assert [len(batch) for batch in streamed] == ([4, 4, 4, 4, 2, 2] if workers else [4, 4, 2])  # it is not sharded


def test_throughput_needs_batches() -> None:
    """A loader that ends before its queues are full has no throughput; a longer one has, and is left early."""
    data = TensorDataset(torch.zeros(100, 2))
    assert measure_throughput(DataLoader(data, batch_size=20)) is None
    assert (measure_throughput(DataLoader(data, batch_size=5)) or 0) > 0
    steps: list[Any] = []
    assert (measure_throughput(DataLoader(Waits(computing=False), batch_size=None), steps.append, 0.05) or 0) > 0
    assert 5 < len(steps) < 60


def test_looking_at_a_batch_counts_neither_as_loading_nor_as_a_step() -> None:
    """What is noted of the first batches takes milliseconds where they hold thousands of objects."""
    asked, loaded, handed, stepped = (Instant(wall=at, cpu=at / 2, queued=0.0) for at in (0.0, 1.0, 4.0, 6.0))
    sample = sample_of(asked, loaded, stepped, handed)
    assert (sample.load_seconds, sample.step_seconds, sample.step_cpu_seconds) == (1.0, 2.0, 1.0)
    assert sample_of(asked, loaded, stepped).step_seconds == 5.0


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    more: Any


def test_what_is_kept_of_a_batch_is_out_of_the_reach_of_its_loop() -> None:
    """Containers are new, tensors are cut off from their graph and share their memory."""
    x = torch.ones(3, requires_grad=True) * 2
    batch = {"pair": Pair(x, [np.zeros(2), "name", None]), "numbers": (1, 2.0)}
    copy = kept(batch)
    batch["pair"].more.append(lambda: 0)  # type: ignore[attr-defined]
    batch["result"] = x
    assert list(copy) == ["pair", "numbers"]
    assert copy["pair"].x.grad_fn is None
    assert copy["pair"].x.data_ptr() == x.data_ptr()
    assert len(copy["pair"].more) == 3
    assert copy["numbers"] == (1, 2.0)


@pytest.mark.parametrize("part", [object(), {1, 2}, np.array([{}], dtype=object)], ids=["object", "set", "array"])
def test_a_batch_that_may_change_from_within_is_not_kept(part: Any) -> None:
    """What it is by then is not what it was."""
    assert kept([torch.zeros(2), part]) is None
