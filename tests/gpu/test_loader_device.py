"""Batches on a real device.

Nothing is read too early, nothing is written too early, and the host never waits.

Kernels that only wait stand for a slow device, so that a wrong order would be seen. Skipped by name
elsewhere.
"""

from __future__ import annotations

import collections
import warnings
from collections.abc import Iterator

import pytest
import torch
from tests.gpu.marks import NEEDS_CUDA
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import TensorDataset

import holdfast
from holdfast.loader.device import find_copy_target, move_to_device

pytestmark = NEEDS_CUDA
_CYCLES = 20_000_000  # about 10 ms


@pytest.fixture
def no_host_sync() -> Iterator[None]:
    """Let every operation that makes the host wait for the device raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("no_host_sync")
def test_the_host_never_waits() -> None:
    """From pinned memory, no batch of a tree of tensors makes the host wait for the device."""
    items = [
        {
            "x": [torch.ones(9).pin_memory()],
            "of": collections.UserDict(y=torch.ones(3).pin_memory()),
        }
    ] * 5
    for item in (move_to_device(item, find_copy_target("cuda")) for item in items):
        torch.cuda._sleep(_CYCLES)
        assert item["x"][0].is_cuda
        assert item["of"]["y"].is_cuda


def test_a_loader_with_workers_and_odd_leaves() -> None:
    """Pinned batches of a slow loop, packed sequences and tensors that are not pinned arrive
    whole, in order.
    """
    data = TensorDataset(torch.arange(1000.0), torch.arange(1000))
    seen = []
    for x, y in holdfast.DataLoader(
        data, batch_size=32, num_workers=2, pin_memory=True, device="cuda"
    ):
        torch.cuda._sleep(_CYCLES // 10)
        assert torch.equal(x.long(), y)
        seen.append(y)
    assert torch.equal(torch.cat(seen).cpu(), torch.arange(1000))
    packed = pack_sequence([torch.arange(3.0), torch.arange(2.0)])
    there, also, position = move_to_device((packed, torch.eye(3), 7), find_copy_target("cuda"))
    assert torch.equal(there.data.cpu(), packed.data)
    assert torch.equal(also.cpu(), torch.eye(3))
    assert position == 7
