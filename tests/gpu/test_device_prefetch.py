"""The prefetcher on a real device: nothing is read too early, nothing is written too early, and the host never waits.

Kernels that only wait stand for a slow device, so that a wrong order would be seen. Skipped by name elsewhere.
"""

from __future__ import annotations

import collections
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.gpu.marks import NEEDS_CUDA
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from holdfast.loader.device_prefetch import prefetched

pytestmark = NEEDS_CUDA
_CYCLES = 20_000_000  # about 10 ms
_NUMBERS = 2**20


def pinned(count: int) -> Iterator[torch.Tensor]:
    for number in range(count):
        yield torch.full((_NUMBERS,), float(number)).pin_memory()


@pytest.fixture
def no_host_sync() -> Iterator[None]:
    """Let every operation that makes the host wait for the device raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_a_slow_consumer_reads_whole_batches_and_no_later_ones() -> None:
    """While the device lags, batches are dropped at once and memory is used again: every sum is still its own."""
    sums = []
    for batch in prefetched(pinned(40), "cuda"):
        torch.cuda._sleep(_CYCLES)
        sums.append(batch.double().sum())
        del batch
    assert [float(found) for found in sums] == [number * _NUMBERS for number in range(40)]


@pytest.mark.usefixtures("no_host_sync")
def test_the_host_never_waits() -> None:
    """From pinned memory, no batch of a tree of tensors makes the host wait for the device."""
    items = prefetched(
        [{"x": [torch.ones(9).pin_memory()], "of": collections.UserDict(y=torch.ones(3).pin_memory())}] * 5, "cuda"
    )
    for item in items:
        torch.cuda._sleep(_CYCLES)
        assert item["x"][0].is_cuda
        assert item["of"]["y"].is_cuda


def test_the_next_copy_is_under_way_while_a_batch_is_worked_on() -> None:
    """When a batch is handed out, the next copy has been started, and its source is kept until it has ended."""
    torch.cuda.synchronize()
    alive: list[Any] = []

    def batches() -> Iterator[torch.Tensor]:
        for batch in pinned(4):
            alive.append(weakref.ref(batch))
            yield batch
            del batch

    items = prefetched(batches(), "cuda")
    torch.cuda._sleep(50 * _CYCLES)  # copies wait for earlier work of the loop
    next(items)
    assert [reference() is not None for reference in alive] == [True, True]
    torch.cuda.synchronize()
    next(items)
    assert [reference() is not None for reference in alive] == [False, False, True]
    items.close()


def test_a_loader_with_workers_and_odd_leaves() -> None:
    """Pinned batches of a torch loader, packed sequences and tensors that are not pinned arrive whole, in order."""
    data = TensorDataset(torch.arange(1000.0), torch.arange(1000))
    seen = []
    for x, y in prefetched(DataLoader(data, batch_size=32, num_workers=2, pin_memory=True), "cuda"):
        torch.cuda._sleep(_CYCLES // 10)
        assert torch.equal(x.long(), y)
        seen.append(y)
    assert torch.equal(torch.cat(seen).cpu(), torch.arange(1000))
    packed = pack_sequence([torch.arange(3.0), torch.arange(2.0)])
    ((there, also, position),) = prefetched([(packed, torch.eye(3), 7)], "cuda")
    assert torch.equal(there.data.cpu(), packed.data)
    assert torch.equal(also.cpu(), torch.eye(3))
    assert position == 7


def test_a_batch_that_does_not_fit_beside_another_is_copied_in_its_turn() -> None:
    """With room for one batch and a half, every batch still arrives."""
    size = 2**28
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1.5 * size) / total)
    try:
        found = []
        for batch in prefetched([torch.full((size // 4,), float(n)).pin_memory() for n in range(3)], "cuda"):
            found.append(float(batch.max()))
            del batch
            torch.cuda.empty_cache()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    assert found == [0.0, 1.0, 2.0]
