"""Whether a sample batch is made again in any size, and refused where nobody can say how."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from holdfast.core.errors import BatchError
from holdfast.forecast.job.sample_batch import ArraySpec, SampleBatch


def make(leaf: ArraySpec) -> torch.Tensor:
    if leaf.values is None:
        return torch.full(leaf.shape, 7, dtype=leaf.dtype)
    return torch.from_numpy(np.ascontiguousarray(leaf.values)).reshape(leaf.shape)


def read(tensor: torch.Tensor) -> Any:
    return tensor.numpy()


def sample(batch: Any, **options: Any) -> SampleBatch:
    return SampleBatch(batch, read=read, make=make, **options)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Utterances:
    frames: torch.Tensor
    names: list[str]
    rate: int


class Encoding(collections.UserDict[str, Any]):
    """Stands for Hugging Face's BatchEncoding, a UserDict whose tensors are read as items."""


def test_all_kinds_of_containers_are_resized_and_keep_their_types() -> None:
    """Dicts, named tuples, lists, dataclasses and user dicts come back as themselves, with the
    size asked for.
    """
    batch = {
        "a": Pair(torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)),
        "b": [torch.zeros(8, 5), np.zeros((8, 2))],
        "c": Utterances(torch.zeros(8, 80, 11), [f"u{i}" for i in range(8)], 16000),
        "d": Encoding(ids=torch.zeros(8, 20, dtype=torch.long)),
        "e": None,
    }
    made = sample(batch).resized(3)
    assert isinstance(made["a"], Pair)
    assert [tuple(leaf.shape) for leaf in (*made["a"], *made["b"])] == [
        (3, 3),
        (3,),
        (3, 5),
        (3, 2),
    ]
    assert isinstance(made["c"], Utterances)
    assert (tuple(made["c"].frames.shape), made["c"].names, made["c"].rate) == (
        (3, 80, 11),
        ["u0", "u1", "u2"],
        16000,
    )
    assert isinstance(made["d"], Encoding)
    assert tuple(made["d"]["ids"].shape) == (3, 20)
    assert made["e"] is None
    assert tuple(batch["b"][0].shape) == (8, 5), "the sample batch itself stays as it was"


def test_all_samples_are_like_the_longest() -> None:
    """Token ids, masks and lengths are those of the longest sample of the batch."""
    ids = torch.arange(4 * 6).reshape(4, 6)
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [1] * 6, [1, 0, 0, 0, 0, 0], [1] * 5 + [0]])
    lengths = mask.sum(1)
    made = sample({"ids": ids, "mask": mask, "lengths": lengths}).resized(2)
    assert made["lengths"].tolist() == [6, 6]
    assert made["mask"].min() == 1, "every sample is like the longest, the second"
    assert made["ids"][0].tolist() == [6, 7, 8, 9, 10, 11]


class Graph:
    """Stands for torch_geometric's Data, which is no mapping and keeps its tensors in a store of
    its own.
    """

    def __init__(self) -> None:
        self.store = {"x": torch.zeros(4, 3)}


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (
            {"graph": Graph(), "y": torch.zeros(4)},
            r"Graph.*batch\['graph'\]",
        ),
        (
            pack_sequence([torch.zeros(5, 3), torch.zeros(2, 3)]),
            "PackedSequence.*batch",
        ),
        (
            [{"x": torch.zeros(3)}, {"x": torch.zeros(3)}],
            "list .* batch",
        ),
        (
            {"waves": [torch.zeros(9), torch.zeros(7)]},
            r"list .* batch\['waves'\]",
        ),
        (
            {"x": torch.zeros(0, 3), "i": torch.zeros(0, dtype=torch.long)},
            r"empty: batch\['x'\]",
        ),
    ],
)
def test_a_batch_that_would_keep_its_size_is_refused(batch: Any, said: str) -> None:
    """Tensors that nobody could make larger, and samples that are not there, are named before a
    step is made.
    """
    with pytest.raises(BatchError, match=said) as caught:
        sample(batch)
    assert caught.value.rule == "H413"


def test_what_does_not_depend_on_the_batch_stays_and_is_written_down() -> None:
    """A table among batch tensors is kept, and named in an assumption."""
    found = sample(
        {
            "x": torch.zeros(8, 4),
            "y": torch.zeros(8),
            "weights": torch.zeros(10),
            "scale": torch.tensor(1.0),
        }
    )
    assert found.resized(2)["weights"].shape == (10,)
    assert any("batch['weights'] (10,)" in assumption.what for assumption in found.assumptions())


def test_parts_are_views_of_equal_size_that_share_the_rest() -> None:
    """A batch for gradient accumulation is cut without copies.

    What does not depend on the batch is in each part.
    """
    batch = {
        "x": torch.zeros(8, 4),
        "y": torch.zeros(8),
        "names": list("abcdefgh"),
        "table": torch.zeros(10),
    }
    found = sample(batch)
    made = found.resized(6)
    parts = found.parts(made, 3)
    assert [(tuple(part["x"].shape), len(part["names"]), len(part["table"])) for part in parts] == [
        ((2, 4), 2, 10)
    ] * 3
    assert parts[1]["x"].untyped_storage().data_ptr() == made["x"].untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "batch",
    [torch.tensor(1.0), {"scale": 1.0, "name": "x"}, [], (torch.zeros(3, 4), torch.zeros(5, 6, 7))],
    ids=["scalar", "numbers", "empty", "tie"],
)
def test_a_batch_without_a_batch_dimension_is_refused(batch: Any) -> None:
    """Where no batch dimension can be found, the error shows the shapes and how to say it."""
    with pytest.raises(BatchError, match="micro_batch_size") as caught:
        sample(batch)
    assert caught.value.rule == "H413"


@given(size=st.integers(2, 9), length=st.integers(2, 20), new=st.integers(1, 12))
def test_bytes_grow_evenly_with_the_size(size: int, length: int, new: int) -> None:
    """A new batch holds exactly that many samples in each tensor, whatever the sample batch was
    like.
    """
    ids = torch.zeros(size, length, dtype=torch.long)
    made = sample(
        {"ids": ids, "x": torch.zeros(size, length, 5), "y": torch.zeros(size)}, size=size
    ).resized(new)
    shapes = {key: tuple(value.shape) for key, value in made.items()}
    assert shapes == {"ids": (new, length), "x": (new, length, 5), "y": (new,)}
