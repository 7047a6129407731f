"""The prefetcher without an accelerator: what is moved, in which order, and what happens at errors and at the end.

Copies go to torch's "meta" device, which is real. Its streams are not: a few lines below stand in for them and write
down who waits for whom. What only a device can show is in ``tests/gpu/test_device_prefetch.py``.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from holdfast.core.errors import LoaderError
from holdfast.loader.device_prefetch import prefetched


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


class Streams:
    """Stands in for torch's module of a device: writes down what streams are told, and copies end on demand."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current, self.done = "main", False
        self.copies = 0

    def Stream(self, device: torch.device) -> Any:  # noqa: N802 - torch's name
        def record_event() -> Any:
            self.copies += 1
            self.log.append(f"copy {self.copies}")
            number = self.copies
            return types.SimpleNamespace(
                query=lambda: self.done,
                synchronize=lambda: self.log.append(f"host waits for {number}"),
                number=number,
            )

        return types.SimpleNamespace(
            wait_stream=lambda other: self.log.append(f"copies wait for {other.name}"), record_event=record_event
        )

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: torch.device) -> Any:
        name = self.current
        return types.SimpleNamespace(
            name=name, wait_event=lambda event: self.log.append(f"{name} waits for {event.number}")
        )

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, "side"
        yield
        self.current = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    note = lambda tensor, stream: made.log.append(f"{stream.name} uses {tensor.numel()}")  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", note)
    return made


def source(log: list[str], count: int = 3, error: BaseException | None = None) -> Iterator[Any]:
    try:
        for number in range(1, count + 1):
            log.append(f"asked for {number}")
            yield torch.zeros(number), number
        if error is not None:
            raise error
    finally:
        log.append("closed")


@pytest.mark.parametrize("device", ["cpu", None, torch.device("cpu")])
def test_without_an_accelerator_items_pass_as_they_are_and_when_asked_for(device) -> None:
    """On a CPU nothing is copied, wrapped or fetched ahead, and closing early closes the source."""
    log: list[str] = []
    given = [(torch.zeros(1), object()), "text"]
    assert all(new is old for new, old in zip(prefetched(given, device), given, strict=True))
    items = prefetched(source(log), device)
    assert next(items)[1] == 1
    items.close()
    assert log == ["asked for 1", "closed"]


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
    (there,) = prefetched([given], device)
    assert list(there) == list(given)
    assert (type(there["dict"]), list(there["dict"])) == (collections.OrderedDict, ["b", "a"])
    assert there["dict"]["a"][1:] == ["name", None]
    assert (type(there["tuple"][1]), there["tuple"][1].y) == (Pair, 1)
    assert (type(there["frozen"]), there["frozen"].length) == (Frozen, 3)
    assert (type(there["packed"]), type(there["encoding"])) == (PackedSequence, Encoding)
    assert there["facts"] is facts
    assert there["type"] is torch.Tensor
    moved = [there["dict"]["b"], there["dict"]["a"][0], there["tuple"][0], there["tuple"][1].x, there["frozen"].x]
    moved += [there["packed"].data, there["objects"][0].x, there["encoding"]["x"], there["proxy"]["x"]]
    assert {tensor.device.type for tensor in moved} == {"meta"}
    assert {given["encoding"]["x"].device.type, packed.data.device.type, x.device.type} == {"cpu"}


def test_the_next_copy_is_begun_before_a_batch_is_worked_on_and_waits_for_the_batch_before(streams) -> None:
    """A batch is handed out when its stream waits for its copy; the next copy was begun, after all earlier work."""
    for _, number in prefetched(source(streams.log), "meta"):
        streams.log.append(f"work on {number}")
    assert streams.log == [
        "asked for 1", "copies wait for main", "copy 1", "main waits for 1", "main uses 1",
        "asked for 2", "copies wait for main", "copy 2", "work on 1", "main waits for 2", "main uses 2",
        "asked for 3", "copies wait for main", "copy 3", "work on 2", "main waits for 3", "main uses 3",
        "closed", "work on 3", "host waits for 1", "host waits for 2", "host waits for 3",
    ]  # fmt: skip


def test_a_source_is_kept_until_its_copy_has_ended_and_a_batch_is_not(streams) -> None:
    """What is copied stays alive while the event has not happened; what was handed out is the loop's alone."""
    kept: list[Any] = []

    def batches() -> Iterator[Any]:
        for number in range(5):
            batch = torch.zeros(number + 1)
            kept.append(weakref.ref(batch))
            yield batch
            del batch

    items = prefetched(batches(), "meta")
    there = weakref.ref(next(items))
    assert there() is None
    next(items)
    assert [reference() is not None for reference in kept] == [True] * 3
    streams.done = True
    next(items)
    assert [reference() is not None for reference in kept] == [False] * 3 + [True]


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_an_error_comes_after_all_that_came_before_it(streams, where) -> None:
    """The batch before the error is handed out first, then the very error is raised, and the source is closed."""
    error = ValueError("sample 4")
    seen = []
    with pytest.raises(ValueError, match="sample 4") as found:
        for _, number in prefetched(source(streams.log, 3, error), where):
            seen.append(number)
    assert seen == [1, 2, 3]
    assert found.value is error
    assert "closed" in streams.log


def test_closing_early_waits_for_the_copies_and_closes_the_source(streams) -> None:
    """After `close` nothing is in flight any more, and the source is closed although an item was fetched ahead."""
    items = prefetched(source(streams.log), "meta")
    next(items)
    streams.log.clear()
    items.close()
    assert streams.log == ["host waits for 1", "host waits for 2", "closed"]


class Large:
    """Does not fit into the device's memory the first time, or ever."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def to(self, device: torch.device) -> str:
        self.failures -= 1
        if self.failures >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return "there"


def test_a_batch_that_does_not_fit_ahead_is_copied_in_its_turn(streams) -> None:
    """Out of memory beside another batch is no error; it is one if the batch still does not fit when asked for."""
    assert list(prefetched([torch.zeros(1), Large(1)], "meta"))[1] == "there"
    items = prefetched([torch.zeros(1), Large(2)], "meta")
    next(items)
    with pytest.raises(torch.OutOfMemoryError):
        next(items)


@pytest.mark.parametrize("device", ["nope", "xpu", "cuda:99", -1, 1.5])
def test_a_device_that_is_not_there_is_told_before_a_batch_is_loaded(device: Any) -> None:
    """A name that torch does not know and a device that this machine has not got are H607, with what was given."""
    asked: list[int] = []
    with pytest.raises(LoaderError, match="device=") as caught:
        prefetched((asked.append(number) for number in range(2)), device)
    assert caught.value.rule == "H607"
    assert repr(device) in caught.value.what
    assert not asked
