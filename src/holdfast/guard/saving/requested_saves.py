"""`RequestedSaves`: the saves that were requested from outside and have not ended yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from holdfast.checkpoint.store import Entry

# Function that is called with the checkpoint, or with the reason why there is none. It may be
# called in the writer thread.
OnEnd: TypeAlias = Callable[[Entry | None, str | None], None]


class RequestedSaves:
    """Passes the result of a save on to those who have requested it.

    The next save that begins after a request answers it. Only one save runs at a time, so the
    result of a save belongs to the requests that came before it began.
    """

    def __init__(self) -> None:
        # The requests that no save has begun for.
        self._waiting: list[OnEnd] = []
        # The requests that the current save answers.
        self._attempted: list[OnEnd] = []

    @property
    def are_waiting(self) -> bool:
        """Return whether a save is due because of a request."""
        return bool(self._waiting)

    def add(self, on_end: OnEnd) -> None:
        """Add a request. `on_end` is called once, when the save has ended."""
        self._waiting.append(on_end)

    def note_attempt(self) -> None:
        """Record that a save begins now."""
        self._attempted += self._waiting
        self._waiting = []

    def note_end(self, entry: Entry | None, problem: str | None) -> None:
        """Record that the save has ended. The thread that has written the checkpoint calls this.

        Args:
            entry: The checkpoint, or None if the save has failed or was refused.
            problem: Why there is no checkpoint.
        """
        attempted = self._attempted
        self._attempted = []
        for on_end in attempted:
            on_end(entry, problem)

    def end_all(self, problem: str) -> None:
        """End all requests without a checkpoint. No save may be running.

        Args:
            problem: Why no save answers them.
        """
        # `note_end` ends only requests that a save has been attempted for.
        self.note_attempt()
        self.note_end(None, problem)
