"""`SharedWriters`: let all ranks write a checkpoint together, each rank its own part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, final

from holdfast.checkpoint.saver import Writers, on_all
from holdfast.guard.ranks.messages import Messages

_T = TypeVar("_T")


@final
class SharedWriters(Writers):
    """The threads that write a checkpoint, one on each rank.

    Args:
        messages: The connection to the other ranks.
    """

    are_several = True

    def __init__(self, messages: Messages) -> None:
        self.rank = messages.rank
        self._messages = messages

    def all(self, work: Callable[[], _T]) -> list[_T]:
        """Call `work` on all ranks, and return their results, which must be plain values.

        An error on one rank is raised on all ranks.
        """

        def exchange(result: Any) -> list[Any]:
            return self._messages.exchange("share of a checkpoint", result, thread="saves")

        return on_all(work, exchange)

    def first(self, work: Callable[[], _T]) -> _T:
        """Call `work` on the first rank. All ranks return its result or raise its error."""
        results: list[Any] = self.all(work if self.rank == 0 else lambda: None)
        first_result: _T = results[0]
        return first_result
