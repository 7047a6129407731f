"""Tensors in memory.

Copies in host buffers, and expanded ones, of which each place is copied once.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.checkpoint.buffers import HostBuffers, needed_bytes
from holdfast.checkpoint.expanded import made_dense
from holdfast.checkpoint.saver import encode, snapshot

_DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e5m2,
]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(_DTYPES), st.lists(st.integers(0, 5), max_size=3), st.booleans()),
        min_size=1,
        max_size=8,
    )
)
def test_copies_are_equal_and_share_nothing(
    kinds: list[tuple[torch.dtype, list[int], bool]],
) -> None:
    """Whatever type, shape and layout.

    A copy has the values of then, in one piece, after the source has changed.
    """
    live = {}
    for number, (dtype, shape, turned) in enumerate(kinds):
        tensor = torch.randint(0, 2, shape).to(dtype)
        live[str(number)] = tensor.mT if turned and tensor.ndim >= 2 else tensor
    expected = {name: tensor.clone() for name, tensor in live.items()}
    buffers = HostBuffers(needed_bytes({"group": live}))
    buffers.touch()
    copies = buffers.fill({"group": live})["group"]
    for tensor in live.values():
        tensor.zero_()
    for name, copy in copies.items():
        assert copy.is_contiguous()
        assert (copy.dtype, copy.shape) == (expected[name].dtype, expected[name].shape)
        assert torch.equal(copy.float(), expected[name].float())


def test_forked_processes_do_not_get_the_memory() -> None:
    """The pages are left out of a fork, so that workers neither hold them nor make every save
    copy them first.
    """
    buffers = HostBuffers(2**20)
    buffers.touch()
    address = buffers.fill({"g": {"a": torch.ones(4)}})["g"]["a"].data_ptr()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"there" if _is_mapped(address) else b"away")
        os._exit(0)
    os.waitpid(child, 0)
    assert _is_mapped(address)
    assert os.read(reading, 10) == b"away"
    os.close(reading)
    os.close(writing)


def _is_mapped(address: int) -> bool:
    ranges = (
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    )
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def test_loading_leaves_a_view_or_makes_it_dense() -> None:
    """Equal elements are written through to what shares the memory.

    Others need memory of their own.
    """
    base = torch.zeros(1)
    one, two, plain = base.expand(3), torch.zeros(1).expand(3), torch.zeros(3)
    weight = nn.Parameter(base.expand(2), requires_grad=False)
    with made_dense([one, two, plain, weight]):
        for tensor in (one, two, plain, weight):
            tensor.copy_(torch.full_like(tensor, 7.0))
        two.copy_(torch.arange(3.0))
    assert one.tolist() == plain.tolist() == [7, 7, 7]
    assert base.tolist() == [7]
    assert one.stride() == weight.stride() == (0,)
    assert one.data_ptr() == base.data_ptr() == weight.data_ptr()
    assert two.tolist() == [0, 1, 2]
    assert two.stride() == (1,)


def test_a_snapshot_knows_the_copy_of_a_live_tensor() -> None:
    """The copy of a weight is found by the weight, one of a tensor that was not saved is not."""
    weight = torch.nn.Parameter(torch.ones(3))
    encoded = encode({"model": {"w": weight.detach()}})
    shot = snapshot(encoded, 0, HostBuffers(needed_bytes(encoded.tensors)))
    copy = shot.copy_of(weight)
    assert copy is not None
    assert copy.tolist() == [1, 1, 1]
    assert copy.data_ptr() != weight.data_ptr()
    assert shot.copy_of(torch.ones(3)) is None
