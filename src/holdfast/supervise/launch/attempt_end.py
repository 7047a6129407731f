"""`AttemptEnd`: how one attempt ended, for the restart rules and the recording."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.events.process_events import Hang


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """How one attempt ended.

    Args:
        status: Exit code of the command, or the negated number of the signal that killed it.
        seconds: How long the command ran.
        requested_by: The signal with which a user or a scheduler asked us to end, or None. See
            `Shutdown.requested_by`.
        signal_sent: The last signal that the supervisor sent on its own initiative: after a hang,
            after a failure on another host, or at the end of the grace period. None if it sent
            none.
        hang: The hang for which the supervisor ended the attempt, or None.
        failed_elsewhere: Why another host had ended the attempt before this one, or None.
    """

    status: int
    seconds: float
    requested_by: int | None = None
    signal_sent: int | None = None
    hang: Hang | None = None
    failed_elsewhere: str | None = None

    @property
    def was_ended_by_supervisor(self) -> bool:
        """Return whether the supervisor ended the command on its own initiative."""
        return self.signal_sent is not None or self.failed_elsewhere is not None

    @property
    def exit_code(self) -> int:
        """Return the exit code as a shell reports it: 128 + n for signal n."""
        return self.status if self.status >= 0 else 128 - self.status
