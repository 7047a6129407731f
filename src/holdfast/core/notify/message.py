"""`Message`: what is sent to a person when something happens in a run."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Literal

from holdfast.core.secrets import without_secrets
from holdfast.core.text import sanitise

MessageKind = Literal["end", "failure", "restart", "hang", "nan", "low_disk"]

# Discord, which has the smallest limit of the known services, accepts 2,000 characters.
_MOST_CHARACTERS = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message about a run. It contains neither the command of the run nor any secrets.

    Args:
        kind: What has happened.
        title: One line that names the run and what has happened.
        details: More about it, in one line.
        run: The name of the run, which is that of its directory.
        step: The number of optimizer steps made so far, or None if unknown.
    """

    kind: MessageKind
    title: str
    details: str
    run: str
    step: int | None = None

    @classmethod
    def about(
        cls, kind: MessageKind, run: str, *, what: str, details: str, step: int | None = None
    ) -> Message:
        """Return a message with a title such as ``"Run failed: lm-small on gpu3"``.

        Args:
            kind: What has happened.
            run: The name of the run.
            what: The beginning of the title, such as ``"Run failed"``.
            details: More about it. Text that looks like a secret is replaced by ``***``.
            step: The number of optimizer steps made so far, or None if unknown.
        """
        (shown_details,) = without_secrets([details])
        return cls(
            kind=kind,
            title=sanitise(f"{what}: {run} on {socket.gethostname()}", most=200),
            details=sanitise(shown_details, most=_MOST_CHARACTERS),
            run=sanitise(run, most=200),
            step=step,
        )

    def text(self) -> str:
        """Return the title and the details, on a line each."""
        return f"{self.title}\n{self.details}"
