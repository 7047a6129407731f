"""Notice that a loop changes the weights without a step that the guard can see."""

from __future__ import annotations

from holdfast.core.events import run_events
from holdfast.guard.run.session import Session
from holdfast.memory.tensors import versions_of


class UnseenSteps:
    """Compares the weights before and after a batch in which no optimizer step was counted.

    A step is not seen if it is compiled, or if the script updates the weights by hand.

    Args:
        session: The session of the run.
    """

    def __init__(self, session: Session) -> None:
        self._parts = session.parts
        self._record = session.record
        # The versions of the weights before the batch.
        self._versions: list[int] = []
        # Whether such a step was found, and reported.
        self.were_found = False

    def begin_batch(self) -> None:
        """Remember the weights before the loop body receives a batch."""
        self._versions = self._versions_of_weights()

    def end_batch(self) -> None:
        """Report it if the loop body has changed the weights since `begin_batch`."""
        if self._versions_of_weights() != self._versions:
            self.were_found = True
            self._record.emit(run_events.StepsNotSeen())

    def _versions_of_weights(self) -> list[int]:
        return versions_of(parameter for _, parameter in self._parts.named_parameters())
