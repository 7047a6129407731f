"""The position of a loader in an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from holdfast.loader.order.sampler_order import Drawn
from holdfast.loader.streams.stream import StreamPosition


class LoaderPosition(NamedTuple):
    """The position of a loader in an epoch, between two batches.

    Args:
        consumed: Number of samples returned so far, on all ranks together. For a batch sampler or a
            stream, the number of batches.
        indices: Dataset indices of the samples in the batch before the position, or None if
            unknown.
        stream: The position in each part of a stream, by the number of the part. This dict must not
            be modified. (A read-only view could not be pickled.)
        turn: The worker that provides the next batch, in a stream that divides its items among
            workers itself.
        drawn: Identifies the order drawn from the user's sampler, or None if there is no sampler.
    """

    consumed: int
    indices: tuple[Any, ...] | None = None
    stream: Mapping[int, StreamPosition] = {}
    turn: int = 0
    drawn: Drawn | None = None

    def dataset_indices(self) -> list[int] | None:
        """Return the dataset indices of the samples in the batch before this position.

        Returns None if the indices are unknown or not numbers.
        """
        if not self.indices:
            return None
        if not all(isinstance(index, (int, np.integer)) for index in self.indices):
            return None
        return [int(index) for index in self.indices]

    def stream_state(self) -> dict[str, Any]:
        """Return the position in a stream in the form stored in the loader's ``state_dict``."""
        parts = [
            [shard, position.items, position.state, position.ended]
            for shard, position in sorted(self.stream.items())
        ]
        return {"parts": parts, "turn": self.turn}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> LoaderPosition:
        """Return the position stored in a loader's ``state_dict``."""
        stream_state = state.get("stream", {"parts": [], "turn": 0})
        stream = {
            shard: StreamPosition(items=items, state=dataset_state, ended=ended)
            for shard, items, dataset_state, ended in stream_state["parts"]
        }
        drawn = None
        # At the beginning of an epoch, the order may differ from the saved run, so its digest is
        # ignored.
        if state["consumed"] and "drawn" in state:
            drawn = Drawn(state["drawn"], state.get("drawn_rank"))
        return cls(state["consumed"], None, stream, stream_state["turn"], drawn)
