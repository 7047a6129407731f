"""What the codec must not take for something plainer: arrays that are more than their numbers; sets have no order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from holdfast.checkpoint.codec import Encoder, decode
from holdfast.core.errors import CheckpointError


class WithUnit(np.ndarray):
    """An array of the caller's own."""


@pytest.mark.parametrize(
    "array",
    [
        np.ma.array([1.0, 9e9], mask=[0, 1]),
        np.eye(2).view(np.matrix),
        np.arange(3.0).view(WithUnit),
        np.rec.array([(1.0, 2)], dtype=[("a", "f8"), ("b", "i4")]),
        np.arange(3.0).view(np.recarray),
    ],
    ids=["masked", "matrix", "own", "records", "record_view"],
)
def test_an_array_that_is_more_than_its_numbers_is_refused(array: Any) -> None:
    """It would come back without its mask, product or unit: H310 names the place, the kind and the way out."""
    with pytest.raises(CheckpointError, match=r"state\.own\['deep'\]\['0'\] is a ") as caught:
        Encoder("state.own").encode({"deep": [array]})
    assert caught.value.rule == "H310"
    assert type(array).__name__ in caught.value.what
    assert "numpy.asarray" in caught.value.fix
    assert "mask" in caught.value.fix


def test_what_the_fix_says_is_stored(tmp_path: Any) -> None:
    """Plain arrays of them are, and so is a memory map, which comes back as an array of its values."""
    masked = np.ma.array([1.0, 9e9], mask=[0, 1])
    mapped = np.memmap(tmp_path / "values", dtype="f4", mode="w+", shape=(3,))
    mapped[:] = [1, 2, 3]
    tree = {"data": np.asarray(masked.data), "mask": np.ma.getmaskarray(masked), "mapped": mapped}
    encoder = Encoder("state.own")
    found = decode(encoder.encode(tree), encoder.tensors)
    for name, array in tree.items():
        assert type(found[name]) is np.ndarray
        assert np.array_equal(found[name], array)


def test_equal_sets_are_stored_alike() -> None:
    """The order in which a set was filled, or that a process gives it, is not seen in what is stored."""
    numbers = list(range(0, 4000, 8))
    numbers_back = [*reversed(numbers)]
    there, back = set(numbers), set(numbers_back)
    assert list(there) != list(back)
    assert Encoder("run").encode({"seen": there}) == Encoder("run").encode({"seen": back})
    words = {f"word {number}" for number in range(99)}
    assert decode(Encoder("run").encode(frozenset(words)), {}) == words


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


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3).expand(4, 3), torch.arange(24.0).reshape(4, 6)[:, ::2], torch.zeros(2, 0).t(), torch.ones(()),
        torch.arange(9.0).as_strided((3, 3), (1, 1)), torch.arange(4.0).reshape(2, 2),
    ],
    ids=["expanded", "slice", "empty", "scalar", "overlapping", "rows"],
)  # fmt: skip
def test_other_tensors_come_back_row_by_row(tensor: torch.Tensor) -> None:
    """No memory is made for the gaps of a slice, and none is shared within a tensor that overlaps itself."""
    encoder = Encoder("run")
    body = encoder.encode(tensor)
    assert "stride" not in body
    stored = {name: each.contiguous() for name, each in encoder.tensors.items()}
    assert torch.equal(decode(body, stored), tensor)
