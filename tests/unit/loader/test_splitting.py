"""Splitting: what is cut, what is shared, and what is refused with the name of the leaf."""

from __future__ import annotations

import collections
from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from holdfast.core.errors import BatchError
from holdfast.loader.splitting import batch_size, micro_batches, tensors_in
from holdfast.memory.tensors import versions_of


class Pair(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True)
class Utterances:
    frames: torch.Tensor
    names: list[str]
    rate: int = 16_000


@pytest.fixture
def x() -> torch.Tensor:
    return torch.arange(10.0).reshape(5, 2)


def _parts(batch: Any, micro_batch_size: int, split: Any = 0) -> list[Any]:
    size = batch_size(batch, split)
    pairs = micro_batches(batch, size, micro_batch_size, split)
    assert sum(length for _, length in pairs) == size
    return [part for part, _ in pairs]


def test_named_tuples_dataclasses_and_mappings_are_kept(x: torch.Tensor) -> None:
    """Structures with names come back as themselves, also frozen, nested and user-made ones."""
    batch = UserDict(
        pair=Pair(x, torch.arange(5)),
        utterances=Utterances(x, list("abcde")),
        ordered=collections.OrderedDict(y=x),
    )
    first, second = _parts(batch, 3)
    assert type(first) is UserDict
    assert type(first["pair"]) is Pair
    assert type(second["ordered"]) is collections.OrderedDict
    assert second["pair"].targets.tolist() == [3, 4]
    assert second["utterances"].names == ["d", "e"]
    assert second["utterances"].rate == 16_000
    assert torch.equal(second["utterances"].frames, x[3:])
    assert list(batch) == ["pair", "utterances", "ordered"]
    assert batch["pair"].targets.shape == (5,)


def test_a_function_that_cuts_another_number_of_parts_is_refused(x: torch.Tensor) -> None:
    """A user's function that loses or invents parts would weigh samples wrongly, so it is an
    H204.
    """
    with pytest.raises(BatchError, match=r"split\(batch, 2\)") as caught:
        micro_batches(x, 5, 2, lambda batch, _: [batch])
    assert caught.value.rule == "H204"


def test_disagreeing_leaves_are_named_with_their_shapes(x: torch.Tensor) -> None:
    """Both leaves and both shapes are in the error, in the fast path and in the general one."""
    with pytest.raises(BatchError, match=r"batch\[0\] \(5, 2\), batch\[1\] \(4,\)") as caught:
        batch_size((x, torch.zeros(4)))
    assert caught.value.rule == "H204"
    with pytest.raises(BatchError, match=r"batch\['a'\]\['x'\] \(5, 2\), batch\['y'\] 3 items"):
        batch_size({"a": {"x": x}, "y": ["a", "b", "c"]}, {"a": 0, "y": "items"})


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        (pack_sequence([torch.zeros(3), torch.zeros(2)]), "PackedSequence"),
        (
            torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)], layout=torch.jagged),
            "NestedTensor",
        ),
        ({1, 2}, "set"),
        (object(), "object"),
    ],
    ids=["packed", "nested", "set", "object"],
)
def test_what_is_not_understood_is_refused_by_name(leaf: Any, kind: str, x: torch.Tensor) -> None:
    """A leaf whose samples cannot be told apart is an H205 with its place and kind, never a
    silent share.
    """
    with pytest.raises(BatchError, match=rf"batch\['deep'\]\[1\].*{kind}") as caught:
        batch_size({"x": x, "deep": [x, leaf]})
    assert caught.value.rule == "H205"
    assert "split=" in caught.value.fix
    assert batch_size({"x": x, "deep": [x, leaf]}, {"x": 0, "deep": [0, None]}) == 5


@pytest.mark.parametrize(
    "batch", [None, {}, [], "text", (torch.tensor(1.0),), {"names": ["a", "b"]}, 3.5]
)
def test_a_batch_without_a_batch_dimension_is_refused(batch: Any) -> None:
    """Where nothing can be cut, that is an H205 and not a batch of one."""
    with pytest.raises(BatchError) as caught:
        batch_size(batch)
    assert caught.value.rule == "H205"


def test_in_place_changes_are_noticed(x: torch.Tensor) -> None:
    """The counters of all tensors of a batch, also nested ones, tell a change from none."""
    with torch.inference_mode():
        uncounted = torch.zeros(5)
    batch = {
        "x": x,
        "pair": Pair(torch.zeros(5), uncounted),
        "names": list("abcde"),
        "a": np.zeros(5),
    }
    tensors = tensors_in(batch)
    assert len(tensors) == 3
    before = versions_of(tensors)
    assert before[2] == -1
    _ = x * 2
    assert versions_of(tensors) == before
    batch["pair"].inputs.add_(1)
    assert versions_of(tensors) == [before[0], before[1] + 1, -1]


@pytest.mark.parametrize(
    ("batch", "split"),
    [
        ({"x": torch.zeros(2, 3)}, [0]),
        ({"x": torch.zeros(2, 3)}, {"x": "itmes"}),
        ({"x": torch.zeros(2, 3)}, {"x": {"y": 0}}),
        ({"x": 5}, {"x": "items"}),
        ({"x": {"y": torch.zeros(2)}}, {"x": "items"}),
    ],
)
def test_a_split_that_does_not_fit_is_said(batch: Any, split: Any) -> None:
    """Whatever is wrong with split=, the error names the part of the batch and what may be said
    about it.
    """
    with pytest.raises(BatchError, match=r"(?s)batch\['x'\].*H204"):
        batch_size(batch, split)
