"""Batches on a device: what is moved, and what is not.

Copies go to torch's "meta" device, which is real.

What only an accelerator can show is in ``tests/gpu/test_loader_device.py``.
"""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import holdfast
from holdfast.core.errors import LoaderError
from holdfast.loader.device import find_copy_target, move_to_device


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    x: Any
    name: str = "a"
    length: int = dataclasses.field(init=False, default=3)

    def __post_init__(self) -> None:
        assert self.x.device.type == "cpu", "a copy is not checked anew"


class Blocking:
    """Has ``to``, as a graph of another library, and no way not to wait."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Blocking:
        return Blocking(self.x.to(device))


class Encoding(collections.UserDict[str, Any]):
    """As Hugging Face's BatchEncoding: a UserDict that moves in place."""

    def to(self, device: torch.device) -> Encoding:
        raise AssertionError("moving in place would free what is being copied")


@pytest.mark.parametrize("device", ["cpu", None, torch.device("cpu")])
def test_without_an_accelerator_a_batch_is_handed_out_as_it_is(device) -> None:
    """On a CPU nothing is copied or wrapped."""
    given = (torch.zeros(1), object())
    assert move_to_device(given, find_copy_target(device)) is given


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_every_tensor_of_a_tree_is_moved_and_the_tree_keeps_its_shape(device) -> None:
    """Containers keep their types, facts their identity, and what was given stays where it was."""
    facts = [{"epoch": 3}, object()]
    x = torch.zeros(2)
    packed = pack_sequence([torch.zeros(2, 1), torch.zeros(1, 1)])
    given = {
        "dict": collections.OrderedDict(b=x, a=[x, "name", None]),
        "tuple": (x, Pair(x, 1)),
        "frozen": Frozen(x=x),
        "packed": packed,
        "objects": [Blocking(x)],
        "encoding": Encoding(x=x),
        "proxy": types.MappingProxyType({"x": x}),
        "facts": facts,
        "type": torch.Tensor,
    }
    there = move_to_device(given, find_copy_target(device))
    assert list(there) == list(given)
    assert (type(there["dict"]), list(there["dict"])) == (collections.OrderedDict, ["b", "a"])
    assert there["dict"]["a"][1:] == ["name", None]
    assert (type(there["tuple"][1]), there["tuple"][1].y) == (Pair, 1)
    assert (type(there["frozen"]), there["frozen"].length) == (Frozen, 3)
    assert (type(there["packed"]), type(there["encoding"])) == (PackedSequence, Encoding)
    assert there["facts"] is facts
    assert there["type"] is torch.Tensor
    tensors = [
        there["dict"]["b"],
        there["dict"]["a"][0],
        there["tuple"][0],
        there["tuple"][1].x,
        there["frozen"].x,
    ]
    tensors += [
        there["packed"].data,
        there["objects"][0].x,
        there["encoding"]["x"],
        there["proxy"]["x"],
    ]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert {given["encoding"]["x"].device.type, packed.data.device.type, x.device.type} == {"cpu"}


def test_a_batch_that_does_not_fit_was_not_handed_out() -> None:
    """Out of memory at a copy is an error, and the position stays before that batch."""

    class Large:
        def to(self, device: torch.device) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    loader = holdfast.DataLoader([0, 1], batch_size=1, collate_fn=lambda _: Large(), device="meta")
    with pytest.raises(torch.OutOfMemoryError):
        next(iter(loader))
    assert loader.state_dict()["consumed"] == 0


@pytest.mark.parametrize("device", ["nope", "xpu", "cuda:99", -1, 1.5])
def test_a_device_that_is_not_there_is_told_before_a_batch_is_loaded(device: Any) -> None:
    """A name that torch does not know and a device that this machine has not got are H607, with
    what was given.
    """
    asked: list[Any] = []
    loader = holdfast.DataLoader([0, 1], batch_size=1, collate_fn=asked.append, device=device)
    with pytest.raises(LoaderError, match="device=") as caught:
        next(iter(loader))
    assert caught.value.rule == "H607"
    assert repr(device) in caught.value.what
    assert not asked
