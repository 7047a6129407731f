"""The codec: standard containers, numbers and tensors come back as they were.

All else is refused by name.
"""

from __future__ import annotations

import collections
import json
from enum import IntEnum
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from holdfast.checkpoint.codec import Encoder, decode
from holdfast.core.errors import CheckpointError


class Color(IntEnum):
    RED = 1


class Point(NamedTuple):
    x: int


class OwnDict(dict[str, int]):
    pass


def _round_trip(value: Any) -> Any:
    encoder = Encoder("test")
    body = json.loads(json.dumps(encoder.encode(value), allow_nan=False))
    return decode(body, {name: tensor.clone() for name, tensor in encoder.tensors.items()})


def test_tied_tensors_are_stored_once_and_stay_tied() -> None:
    """Two names of one tensor give one stored tensor and, after decoding, one object."""
    weight = torch.randn(3, 2)
    encoder = Encoder("model")
    body = encoder.encode({"embedding": weight, "head": weight, "parameter": nn.Parameter(weight)})
    assert list(encoder.tensors) == ["embedding"]
    found = decode(body, encoder.tensors)
    assert found["embedding"] is found["head"] is found["parameter"]


def test_other_views_of_the_same_memory_are_not_tied() -> None:
    """A slice, a transposition and another type at the same address are tensors of their own."""
    square = torch.arange(4.0).reshape(2, 2)
    tree = {"whole": square, "row": square[0], "turned": square.T, "bits": square.view(torch.int32)}
    encoder = Encoder("model")
    found = decode(encoder.encode(tree), encoder.tensors)
    assert len(encoder.tensors) == 4
    assert all(torch.equal(found[name], tensor) for name, tensor in tree.items())


@pytest.mark.parametrize(
    "value",
    [
        object(),
        lambda: None,
        SimpleNamespace(a=1),
        Color.RED,
        Point(1),
        OwnDict(a=1),
        np.array(["text"]),
        np.ma.array([1.0, 9e9], mask=[0, 1]),
        np.eye(2).view(np.matrix),
        np.arange(3.0).view(np.recarray),
        np.array([object()]),
        np.zeros(2, dtype=np.longdouble),
        np.datetime64("2020-01-01"),
        collections.defaultdict(lambda: 0),
        torch.zeros(3).to_mkldnn(),
        TwoTensor(torch.zeros(3), torch.ones(3)),
        nn.Linear(1, 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_needs_pickle_is_refused_with_its_place(value: Any) -> None:
    """Anything that only pickle could store, or that would lose its type, is an H310 with its
    path.
    """
    with pytest.raises(CheckpointError, match=r"^state\['a'\]\['1'\] is a") as caught:
        Encoder("state").encode({"a": [0, value]})
    assert caught.value.rule == "H310"
    assert "pickle" in caught.value.limit
    if type(value) not in (np.ndarray, np.datetime64) and isinstance(value, np.ndarray):
        assert type(value).__name__ in caught.value.what
        assert "numpy.asarray" in caught.value.fix


@pytest.mark.parametrize("coalesced", [True, False])
def test_a_sparse_tensor_comes_back_as_it_lay(coalesced):
    """Indices in their order, repeated ones too, values and the flag."""
    tensor = torch.sparse_coo_tensor([[2, 0, 2]], torch.randn(3, 4), (5, 4), check_invariants=True)
    tensor = tensor.coalesce() if coalesced else tensor
    found = _round_trip({"momentum": tensor})["momentum"]
    assert found.is_coalesced() == coalesced
    assert torch.equal(found._indices(), tensor._indices())
    assert torch.equal(found._values(), tensor._values())
    assert found.shape == tensor.shape


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(24).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.ones(4, 1, 2, 2).to(memory_format=torch.channels_last),
        torch.arange(6.0).reshape(2, 3).t().to(torch.complex64),
        torch.arange(6.0).reshape(2, 3).to(torch.complex128).t().conj(),
    ],
    ids=["permuted", "channels_last", "one_channel", "complex", "conjugated"],
)
def test_a_dense_tensor_comes_back_as_it_lay(tensor: torch.Tensor) -> None:
    """Its strides are those that were saved, whatever order the bytes had in the file."""
    encoder = Encoder("run")
    body = encoder.encode({"one": tensor, "two": tensor})
    stored = {name: each.contiguous() for name, each in encoder.tensors.items()}
    found = decode(body, stored)
    assert found["one"].stride() == tensor.stride()
    assert torch.equal(found["one"], tensor)
    tied = found["one"].data_ptr() == found["two"].data_ptr()
    assert tied is not tensor.is_conj(), "as before: a lazy conjugate is computed at each place"


def test_a_tensor_of_bytes_is_written_as_ever() -> None:
    """Equal states give equal files in every version: the order of the keys is part of that."""
    tensor = torch.zeros(2, 3, dtype=torch.uint8).view(torch.float8_e4m3fnuz).t()
    encoded = Encoder("model").encode(tensor)
    assert list(encoded) == ["$", "name", "dtype", "stride"]
