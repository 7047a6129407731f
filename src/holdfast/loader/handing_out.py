"""A batch on its way from the workers to the loop: its place in the epoch, or the error in its stead."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sized
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

from holdfast.core.errors import LoaderError
from holdfast.loader.fetch import Failure, Report
from holdfast.loader.order.sampled import Drawn
from holdfast.loader.quarantine import last_line
from holdfast.loader.signalled import came_of_a_handler
from holdfast.loader.streams.stream import StreamPosition


class Place(NamedTuple):
    """Where an epoch stands after a batch.

    Args:
        position: Samples of all ranks, or batches of a batch sampler or a stream.
        indices: Dataset indices of the batch, or None if they are not known.
        streamed: Of a stream: as `StreamSource`.
        turn: Of a stream: as `StreamSource`.
        drawn: What a user's sampler drew for this epoch, or None.
    """

    position: int
    indices: tuple[Any, ...] | None = None
    streamed: Mapping[int, StreamPosition] = {}  # never changed; a proxy could not be pickled
    turn: int = 0
    drawn: Drawn | None = None

    @classmethod
    def of(cls, state: dict[str, Any]) -> Place:
        """Return the place that a loader's state tells of."""
        stream = state.get("stream", {"parts": [], "turn": 0})
        streamed = {
            shard: StreamPosition(items=items, state=kept, ended=ended)
            for shard, items, kept, ended in stream["parts"]
        }
        known = state["consumed"] and "drawn" in state  # at the beginning it may draw what it likes
        drawn = Drawn(state["drawn"], state.get("drawn_rank")) if known else None
        return cls(state["consumed"], None, streamed, stream["turn"], drawn)


class Failed:
    """An error in the place of a batch: raised outside of the generators, which an exception would end.

    Args:
        error: What to raise.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error


@dataclass(slots=True)
class Reached:
    """How far an iterator got, which need not be where its loader stands.

    Args:
        epoch: Which one.
        place: Where in it; None before its beginning.
    """

    epoch: int = 0
    place: Place | None = None


class Epoch:
    """The batches of an epoch, which go on after an error in the place of one, as torch's do.

    Args:
        batches: Returns those from a place on, which it moves on, and errors in the place of some.
        loader: Whose batches they are.
    """

    def __init__(self, batches: Callable[[Reached], Generator[Any]], loader: Sized) -> None:
        self._from = batches
        self._reached = Reached()
        self._batches = batches(self._reached)
        self._loader = loader

    def __len__(self) -> int:
        """Return the batches of an epoch, as an iterator of torch's."""
        return len(self._loader)

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) or came_of_a_handler(error):
                self._batches = self._from(self._reached)  # it is of no batch, but no generator goes on after it
            raise
        if isinstance(batch, Failed):
            raise batch.error
        return batch

    def close(self) -> None:
        """Give up the rest."""
        self._batches.close()


def as_error(failure: Failure, report: Report) -> Exception:
    """Return the exception that a worker met, if it can be had, with what it was doing."""
    error = None if failure.error is None else ForkingPickler.loads(failure.error)
    which = "a stream" if report.indices is None else f"samples {list(report.indices)}"
    if not isinstance(error, Exception) or isinstance(error, StopIteration):
        lines = failure.text.strip().splitlines()
        error = LoaderError(
            f"the batch of {which} cannot be made: {lines[-1] if lines else failure.kind}",
            limit="no other sample can stand in for what is missing",
            fix="repair the dataset or collate_fn; the note below shows where it failed.",
            rule="H613",
        )
    if report.failures:
        first = report.failures[0]
        error.add_note(
            f"None of {len(report.failures)} samples in a row could be read: is a folder or a drive missing? "
            f"The first was sample {first.index!r}: {last_line(first.text)}"
        )
    error.add_note(f"In holdfast.DataLoader, while making the batch of {which}:\n{failure.text}")
    return error
