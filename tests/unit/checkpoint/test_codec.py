"""The codec: standard containers, numbers and tensors come back as they were; all else is refused by name."""

from __future__ import annotations

import collections
import json
import math
from enum import IntEnum
from pathlib import Path
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


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**80),
        0.1,
        -0.0,
        math.inf,
        -math.inf,
        "text \u2028 \U0001f600 \x00",
        b"\x00\xff",
        1 - 2j,
        [],
        {},
        (),
        (1, (2,)),
        {1, 2},
        frozenset({"a"}),
        {"$": "tensor", "name": "x"},
        {1: "a", "1": "b", (1, 2): "c", None: "d", 1.5: "e", False: "f"},
        collections.OrderedDict([("b", 1), ("a", 2)]),
        collections.Counter("hello"),
        collections.defaultdict(list, {"a": [1]}),
        collections.defaultdict(None, {"a": 1}),
        collections.deque([1, 2], maxlen=5),
        torch.Size([2, 3]),
        torch.float16,
        torch.device("cuda", 3),
        Path("/data/x"),
        np.float32(0.1),
        np.int64(-7),
        np.bool_(True),
        np.complex128(1j),
    ],
    ids=repr,
)
def test_a_value_comes_back_with_its_type(value: Any) -> None:
    """Every supported value survives real JSON, with its type, its order and its extras."""
    found = _round_trip(value)
    assert type(found) is type(value)
    assert found == value
    assert repr(found) == repr(value)


def test_extras_of_containers_survive() -> None:
    """The default factory and the longest length go on working after a round trip."""
    assert _round_trip(collections.defaultdict(list))["new"] == []
    assert _round_trip(collections.deque([1, 2], maxlen=2)).maxlen == 2
    assert list(_round_trip(collections.OrderedDict(b=1, a=2))) == ["b", "a"]


def test_nan_is_kept_as_strict_json() -> None:
    """NaN is no JSON number, and still comes back as NaN, also as the real part of a complex."""
    assert math.isnan(_round_trip({"lowest": math.nan})["lowest"])
    found = _round_trip(complex(math.nan, -math.inf))
    assert math.isnan(found.real)
    assert found.imag == -math.inf


def test_optimizer_state_comes_back_and_goes_on_equally() -> None:
    """The state of Adam, with its integer keys and tuples, loads into a twin that then takes the same step."""
    weights = [nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(2, 2))]
    adam = torch.optim.AdamW(weights, lr=0.1, betas=(0.8, 0.9))
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    adam.step()
    twins = [nn.Parameter(weight.detach().clone()) for weight in weights]
    other = torch.optim.AdamW(twins, lr=0.5)
    other.load_state_dict(_round_trip(adam.state_dict()))
    for weight, twin in zip(weights, twins, strict=True):
        twin.grad = weight.grad
    adam.step()
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(weights, twins, strict=True))


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


def test_a_conjugated_view_is_not_its_original() -> None:
    """A lazy conjugate shares memory with its original and still comes back with its own sign."""
    number = torch.tensor([1 + 2j, 3 - 4j])
    found = _round_trip({"plain": number, "conjugated": number.conj()})
    assert torch.equal(found["plain"], number)
    assert torch.equal(found["conjugated"], number.conj().resolve_conj())


def test_equal_paths_do_not_overwrite_each_other() -> None:
    """Keys that read alike once joined are still stored apart."""
    tree = {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), 1: torch.tensor(3), "1": torch.tensor(4)}
    found = _round_trip(tree)
    assert (int(found["a"]["b"]), int(found["a.b"]), int(found[1]), int(found["1"])) == (1, 2, 3, 4)


def test_arrays_come_back_as_copies() -> None:
    """A numpy array keeps type and shape, can be written to, and does not alias the original."""
    array = np.arange(6, dtype=np.uint16).reshape(2, 3)[:, ::2]
    encoder = Encoder("test")
    body = encoder.encode({"a": array, "scalar": np.array(2.5)})
    array[:] = 0
    found = decode(body, encoder.tensors)
    assert found["a"].dtype == np.uint16
    assert found["a"].tolist() == [[0, 2], [3, 5]]
    found["a"][0, 0] = 9
    assert found["scalar"].shape == ()


@pytest.mark.parametrize(
    "value",
    [
        object(),
        lambda: None,
        SimpleNamespace(a=1),
        Color.RED,
        Point(1),
        OwnDict(a=1),
        bytearray(b"x"),
        range(3),
        np.array(["text"]),
        np.array([object()]),
        np.zeros(2, dtype=np.longdouble),
        np.zeros(2, dtype=np.dtype(np.float32).newbyteorder()),
        np.str_("text"),
        np.datetime64("2020-01-01"),
        collections.defaultdict(lambda: 0),
        collections.UserDict(a=1),
        torch.zeros(3).to_mkldnn(),
        TwoTensor(torch.zeros(3), torch.ones(3)),
        slice(1),
        nn.Linear(1, 1),
        int,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_needs_pickle_is_refused_with_its_place(value: Any) -> None:
    """Anything that only pickle could store, or that would lose its type, is an H310 with its path."""
    with pytest.raises(CheckpointError, match=r"^state\['a'\]\['1'\] is a") as caught:
        Encoder("state").encode({"a": [0, value]})
    assert caught.value.rule == "H310"
    assert "pickle" in caught.value.limit


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


@pytest.mark.parametrize("dtype", ["complex128", "object", "<U1", ">i4"])
def test_an_array_that_cannot_be_stored_is_named_by_what_it_holds(dtype: str) -> None:
    """That it is an array is not what is wrong with it."""
    with pytest.raises(CheckpointError) as caught:
        Encoder("model").encode(np.zeros(2, dtype))
    assert caught.value.what == f"model is an array of {np.dtype(dtype)}"
