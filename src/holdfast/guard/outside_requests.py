"""`OutsideRequests`: carries out the requests of `holdfast save` and `holdfast stop`.

The requests are files in the run directory; see ``core.run_requests``. With several ranks, only the
first rank reads them. The other ranks learn of them from the row that the first rank sends with its
next step, as they learn of its stop requests and due saves (see ``ranks/decisions.py``).
"""

from __future__ import annotations

from holdfast.checkpoint.store import Entry
from holdfast.core.clock import Clock
from holdfast.core.events import run_events
from holdfast.core.run_requests import REQUESTED_FROM_OUTSIDE, Answer, Request, RequestFolder
from holdfast.guard.directory import RunDirectory
from holdfast.guard.record import RunRecord
from holdfast.guard.saving.saves import Saving
from holdfast.guard.stop import StopRequest

# The shortest time between two looks for requests, in seconds. A look takes a few microseconds, or
# perhaps a millisecond on a network disk.
_POLL_SECONDS = 0.25


class OutsideRequests:
    """Takes requests at the boundaries of one run, and answers them.

    Args:
        directory: The run directory.
        stop: The stop request of this process.
        saving: The object that saves the run's checkpoints.
        record: The record that receives events.
        clock: The source of time.
        is_enabled: Whether this process takes requests. False on all ranks but the first.
    """

    def __init__(
        self,
        *,
        directory: RunDirectory,
        stop: StopRequest,
        saving: Saving,
        record: RunRecord,
        clock: Clock,
        is_enabled: bool,
    ) -> None:
        self._directory = directory
        self._folder = RequestFolder(directory.path)
        self._stop = stop
        self._saving = saving
        self._record = record
        self._clock = clock
        self._is_enabled = is_enabled
        # Whether the requests of earlier processes were removed.
        self._is_cleared = False
        # When this process last looked for requests.
        self._polled_at = clock.monotonic_seconds()
        # The requests to stop that are answered when the run is closed.
        self._stops: list[Request] = []
        # Whether the run takes steps after its last save on purpose.
        self._steps_follow_last_save = False

    def open(self) -> None:
        """Remove the requests that earlier processes have left. The directory must be locked."""
        if self._is_cleared or not self._is_enabled:
            # If this process opens the directory again, a command may not have read its answer yet.
            return
        self._is_cleared = True
        try:
            self._folder.clear()
        except OSError:
            # The disk may be full, or someone has put a link in the place of the folder.
            self._is_enabled = False

    def poll(self) -> None:
        """Look for requests if the last look was some time ago. Called at every boundary."""
        if not self._is_enabled:
            return
        now = self._clock.monotonic_seconds()
        if now - self._polled_at < _POLL_SECONDS:
            return
        self._polled_at = now
        for request in self._folder.take(self._directory.holder):
            self._accept(request)

    def _accept(self, request: Request) -> None:
        """Record a request, and make the run save or stop at this boundary."""
        self._record.emit(run_events.RequestReceived(action=request.action, sender=request.sender))
        if request.action == "stop":
            self._stops.append(request)
            self._stop.request(REQUESTED_FROM_OUTSIDE, ends_process=True)
        else:
            self._saving.request(lambda entry, problem: self._answer(request, entry, problem))

    def expect_steps_after_last_save(self) -> None:
        """Record that the run saves now and will take a few more steps before it ends."""
        self._steps_follow_last_save = True

    def close(self) -> None:
        """Answer all open requests. The last save has ended, and the directory is still locked."""
        self._saving.end_requests()
        problem = None
        if self._saving.has_unsaved:
            problem = self._saving.newest_failure
            if problem is None and not self._steps_follow_last_save:
                problem = "the newest state is in no checkpoint"
        for request in self._stops:
            self._answer(request, self._saving.newest, problem)
        self._stops = []

    def _answer(self, request: Request, entry: Entry | None, problem: str | None) -> None:
        answer = Answer(
            checkpoint=None if entry is None else entry.path.name,
            global_step=None if entry is None else entry.global_step,
            problem=problem,
        )
        self._folder.answer(request, answer)
