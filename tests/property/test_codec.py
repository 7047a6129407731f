"""The codec: any tree of supported values goes through strict JSON and real files, bit for bit."""

from __future__ import annotations

import collections
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.codec import SAVED_AS, Encoder, decode
from holdfast.checkpoint.loading import read_components
from holdfast.checkpoint.saver import snapshot, write
from holdfast.checkpoint.store import Store

# torch warns once in a process when the first tensor of complex32 is made.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

_DTYPES = [*SAVED_AS, torch.complex32, torch.complex64, torch.complex128]


@st.composite
def _tensors(draw: st.DrawFn) -> torch.Tensor:
    """Return tensors of any bits: NaN payloads, negative zeros, subnormals.

    Also empty, 0-dim and transposed.
    """
    dtype = draw(st.sampled_from(_DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size_bytes = int(np.prod(shape)) * dtype.itemsize
    raw = bytearray(draw(st.binary(min_size=size_bytes, max_size=size_bytes)))
    if dtype is torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    if not raw:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(raw, dtype=torch.uint8).clone().view(dtype).reshape(shape)
    return tensor.permute(tuple(reversed(range(tensor.ndim)))) if draw(st.booleans()) else tensor


@st.composite
def _arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    kind = draw(st.sampled_from(["f8", "f4", "f2", "i8", "u1", "u2", "u4", "u8", "?"]))
    shape = draw(st.lists(st.integers(1, 3), max_size=2))
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    return np.frombuffer(
        bytes(byte & 1 for byte in raw) if kind == "?" else raw, dtype=kind
    ).reshape(shape)


_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(max_size=5),
    st.complex_numbers(),
    st.sampled_from(_DTYPES),
    st.sampled_from(
        [torch.device("cpu"), torch.device("cuda:1"), Path("/a b/c"), torch.Size([2, 0])]
    ),
    st.floats(width=32).map(np.float32),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.booleans().map(np.bool_),
)
_HASHABLE = st.one_of(
    st.none(), st.integers(), st.text(max_size=3), st.tuples(st.integers(0, 3), st.text(max_size=2))
)
_KEYS = st.one_of(st.sampled_from(["$", "items", "name", "a.b", "a", ""]), _HASHABLE)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    few = st.lists(inner, max_size=3)
    pairs = st.lists(st.tuples(_KEYS, inner), max_size=3)
    return st.one_of(
        few,
        few.map(tuple),
        st.builds(collections.deque, few, st.none() | st.just(5)),
        st.lists(_HASHABLE, max_size=3).map(set),
        st.lists(_HASHABLE, max_size=3).map(frozenset),
        pairs.map(dict),
        pairs.map(collections.OrderedDict),
        st.builds(collections.defaultdict, st.sampled_from([None, int, list]), pairs),
        st.text("ab", max_size=4).map(collections.Counter),
    )


_TREES = st.recursive(st.one_of(_SCALARS, _tensors(), _arrays()), _containers, max_leaves=8)


def _bits(value: Any) -> Any:
    """Return a value that is equal only for equal types and equal bits."""
    if isinstance(value, torch.Tensor):
        whole = value.contiguous()
        raw = whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
        return torch.Tensor, value.dtype, tuple(value.shape), raw
    if isinstance(value, np.ndarray):
        return np.ndarray, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return type(value), value.tobytes()
    if isinstance(value, float):
        return float, "nan" if value != value else struct.pack("d", value)
    if isinstance(value, complex):
        return complex, _bits(value.real), _bits(value.imag)
    if isinstance(value, dict):
        extra = getattr(value, "default_factory", None)
        return type(value), extra, [(_bits(key), _bits(item)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return type(value), {_bits(item) for item in value}
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value), getattr(value, "maxlen", None), tuple(_bits(item) for item in value)
    return type(value), value


@settings(deadline=None, max_examples=250)
@given(_TREES)
def test_any_tree_comes_back_bit_for_bit(tree: Any) -> None:
    """Types, order, keys and every bit of every tensor survive, and the JSON part is strict
    JSON.
    """
    encoder = Encoder("tree")
    text = json.dumps(encoder.encode(tree), allow_nan=False)
    assert _bits(decode(json.loads(text), encoder.tensors)) == _bits(tree)


@settings(deadline=None, max_examples=25)
@given(st.dictionaries(st.text("abc.$ ", max_size=3), _TREES, max_size=4))
def test_any_tree_goes_through_a_checkpoint_bit_for_bit(tree: dict[str, Any]) -> None:
    """What is read from a verified checkpoint on disk is what was saved, NaN payloads included."""
    with tempfile.TemporaryDirectory() as directory:
        entry = write(Store(Path(directory)), snapshot({"part": tree}, 1), unix_seconds=0.0)
        entry.verify()
        assert _bits(read_components(entry, ["part"])["part"]) == _bits(tree)
