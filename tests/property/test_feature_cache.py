"""`FeatureCache`: what is stored comes back, and whatever happens to an unfinished build, the
file is the same.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes.features.cache import FeatureCache
from recipes.features.items import decode, digest_of, encode

from holdfast.core.errors import LoaderError
from holdfast.testing import flip_bit

_FAST = settings(deadline=None, max_examples=60)
_DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int16,
    torch.bool,
    torch.complex64,
    torch.uint8,
]
_SHAPES = st.lists(st.integers(0, 4), max_size=3)
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.builds(
        lambda shape, dtype: torch.randint(0, 2, shape).to(dtype), _SHAPES, st.sampled_from(_DTYPES)
    ),
    st.builds(
        lambda shape, kind: np.ones(shape, kind),
        _SHAPES,
        st.sampled_from(["<f4", "<i8", "<u2", "|b1"]),
    ),
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=3),
    ),
    max_leaves=6,
)
_ITEMS = 12
_STOP_AT: list[int | None] = [None]


class Random:
    """Samples of random length."""

    def __len__(self) -> int:
        return _ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == _STOP_AT[0]:
            raise OSError("not now")
        return torch.randn(random.randrange(4), 3)


def double(sample: torch.Tensor) -> dict[str, Any]:
    return {"twice": 2 * sample, "frames": len(sample)}


def build(path: Path) -> FeatureCache:
    return FeatureCache.build(Random(), double, path, version=1, num_workers=0, progress=False)


def _plain(value: Any) -> Any:
    """Return a value in a form that compares as it is: type, shape and bits."""
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, tuple(value.shape), value.reshape(-1).tolist()
    if isinstance(value, np.ndarray):
        return "array", value.dtype, value.shape, value.tolist()
    if isinstance(value, dict):
        return "dict", [(key, _plain(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [_plain(item) for item in value]
    return type(value), repr(value)


@_FAST
@given(_VALUES, st.integers(0, 2**40))
def test_what_is_encoded_is_decoded(value: Any, index: int) -> None:
    """Any nesting of tensors, arrays, numbers and text comes back as it was, and its bytes
    depend on it alone.
    """
    data = encode(value)
    assert _plain(decode(bytearray(data))) == _plain(value)
    assert encode(decode(bytearray(data))) == data
    assert digest_of(index, data) != digest_of(index + 1, data)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("undisturbed") / "f.h5"
    build(path).close()
    return path.read_bytes()


@_FAST
@given(st.data())
def test_whatever_a_kill_leaves_the_build_ends_with_the_same_file(
    undisturbed: bytes, data: st.DataObject
) -> None:
    """Stopped at any item, its file cut anywhere or with a flipped bit, it ends with the
    undisturbed file.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f.h5"
        for stop_at in sorted(
            data.draw(st.sets(st.integers(0, _ITEMS - 1), min_size=1, max_size=3))
        ):
            _STOP_AT[0] = stop_at
            try:
                with pytest.raises(LoaderError, match=f"item {stop_at} .* not now"):
                    build(path)
            finally:
                _STOP_AT[0] = None
            file = path.with_name("f.h5.building") / "data"
            size = file.stat().st_size
            harm = data.draw(st.sampled_from(["none", "cut", "flip", "longer"]))
            if harm == "cut":
                with file.open("r+b") as opened:
                    opened.truncate(data.draw(st.integers(0, size)))
            elif harm == "flip" and size:
                flip_bit(file, data.draw(st.integers(0, 8 * size - 1)))
            elif harm == "longer":
                with file.open("ab") as opened:
                    opened.write(data.draw(st.binary(min_size=1, max_size=40)))
        build(path).close()
        assert path.read_bytes() == undisturbed
        assert [each.name for each in Path(folder).iterdir()] == ["f.h5"]
