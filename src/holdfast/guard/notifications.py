"""`GuardNotifications`: choose which of a guard's events are worth a message to the user.

``core.notify`` sends the messages. Under `holdfast run --notify`, the supervisor sends those about
restarts and the end of the run, because it also learns of a killed process.
"""

from __future__ import annotations

import os
import time

from holdfast.core.clock import Clock
from holdfast.core.events import process_events, run_events
from holdfast.core.events.data import EventData
from holdfast.core.events.decisions import StepRefused
from holdfast.core.events.event import Event
from holdfast.core.interactive import is_interactive
from holdfast.core.notify.message import Message, MessageKind
from holdfast.core.notify.notifier import CLOSE_SECONDS, Notifier
from holdfast.core.notify.receivers import parse_receiver
from holdfast.core.policy.policy import Policy
from holdfast.guard.record import RunRecord
from holdfast.guard.saving.unsaved import call_after_runs, uncaught_exception
from holdfast.recorder.run_files import NOTIFY_VARIABLE

# All objects of this process that send messages.
_open: list[GuardNotifications] = []
# The shortest time between two messages about NaN or Inf. A run may skip a step every minute.
_NONFINITE_SECONDS = 3600.0
_NONFINITE_EVENTS = (
    run_events.NonfiniteStepTaken,
    run_events.SamplesDropped,
    run_events.MicroBatchDropped,
)
# How a run has ended, with the kind and the title of the message about it.
_ENDINGS: dict[str, tuple[MessageKind, str]] = {
    "finished": ("end", "Run finished"),
    "stopped": ("end", "Run stopped"),
    "left": ("end", "Run ended"),
    "failed": ("failure", "Run failed"),
    "not saved": ("failure", "Run could not save"),
}


class GuardNotifications:
    """Sends messages about one run of a guard.

    In a script, the message about the end is sent when the process exits, since the script may
    train again after its loop. In a notebook, it is sent when the loop ends.

    Args:
        notify: The receiver.
        run: The name of the run.
        record: The record whose events are reported.
        clock: The source of time.
        reports_end: Whether to send messages about resumes and the end of the run.

    Raises:
        PolicyError: H118 if the receiver cannot be used.
    """

    def __init__(
        self, notify: str, run: str, record: RunRecord, clock: Clock, *, reports_end: bool
    ) -> None:
        self._run = run
        self._record = record
        self._clock = clock
        self._reports_end = reports_end
        self._notifier = Notifier(parse_receiver(notify), self._report_failure)
        # When the last message about NaN or Inf was sent.
        self._nonfinite_at: float | None = None
        # How the run has ended most recently, and why it has stopped or failed.
        self._ending = "left"
        self._why = ""
        record.listen(self._note)

    def _note(self, data: EventData, event: Event) -> None:
        """Send a message if an event is worth one."""
        step = event.global_step
        is_refused = isinstance(data, StepRefused) and data.nonfinite
        if is_refused or isinstance(data, _NONFINITE_EVENTS):
            self._report_nonfinite(data, step)
        elif isinstance(data, run_events.DiskSpaceLow):
            self._send("low_disk", "Disk space is low", _sentence(data), step)
        elif self._reports_end:
            self._note_course(data, step)

    def _note_course(self, data: EventData, step: int) -> None:
        """Report a resume, and remember how the run ends."""
        if isinstance(data, run_events.Resumed):
            self._send("restart", "Run resumed", _sentence(data), step)
        elif isinstance(data, run_events.LoopStarted):
            self._ending = "left"
            self._why = ""
        elif isinstance(data, run_events.StopRequested):
            self._why = _sentence(data)
        elif isinstance(data, run_events.NotSaved):
            self._note_end("not saved", _sentence(data), step)
        elif isinstance(data, run_events.LeftByException):
            self._note_exception(data.exception, data.rule, step)
        elif isinstance(data, run_events.Closed) and self._ending not in ("failed", "not saved"):
            self._note_end(data.how, self._why, step)

    def _note_exception(self, name: str, rule: str | None, step: int) -> None:
        """Remember that an exception ends the run, by its type.

        Its message could contain anything, such as the command line of a subprocess.
        """
        ending = "stopped" if name == "KeyboardInterrupt" else "failed"
        self._note_end(ending, name if rule is None else f"{name} [{rule}]", step)

    def _note_end(self, ending: str, why: str, step: int) -> None:
        self._ending = ending
        self._why = why
        if is_interactive():
            self._report_end(step)

    def _report_nonfinite(self, data: EventData, step: int) -> None:
        now = self._clock.monotonic_seconds()
        if self._nonfinite_at is not None and now - self._nonfinite_at < _NONFINITE_SECONDS:
            return
        self._nonfinite_at = now
        self._send("nan", "NaN or Inf", _sentence(data), step)

    def _report_end(self, step: int) -> None:
        kind, what = _ENDINGS[self._ending]
        self._send(kind, what, self._why, step)

    def report_end_at_exit(self) -> None:
        """Send the message about the end of the run, because the process exits."""
        if not self._reports_end or is_interactive():
            return
        step = self._record.global_step
        error = uncaught_exception()
        # The exception may come from the code after the loop.
        if error is not None and self._ending in ("finished", "left"):
            self._note_exception(type(error).__name__, None, step)
        self._report_end(step)

    def close(self, seconds: float) -> None:
        """Wait until all messages are sent, for at most `seconds`."""
        self._notifier.close(seconds)

    def _send(self, kind: MessageKind, what: str, details: str, step: int) -> None:
        details = f"{details} Step {step:,}.".strip()
        self._notifier.send(Message.about(kind, self._run, what=what, details=details, step=step))

    def _report_failure(self, message: Message, why: str) -> None:
        self._record.emit(
            process_events.MessageNotSent(
                message=message.kind, receiver=self._notifier.receiver.shown, error=why
            )
        )


def notifications_for(
    policy: Policy, run: str, record: RunRecord, clock: Clock
) -> GuardNotifications | None:
    """Return an object that sends messages about a run, or None if nobody wants any.

    Args:
        policy: The policy of the run.
        run: The name of the run.
        record: The record whose events are reported.
        clock: The source of time.

    Raises:
        PolicyError: H118 if the receiver cannot be used.
    """
    of_supervisor = os.environ.get(NOTIFY_VARIABLE)
    notify = policy.notify or of_supervisor
    if not notify or of_supervisor == "":
        return None
    reports_end = policy.notify not in (None, of_supervisor)
    notifications = GuardNotifications(notify, run, record, clock, reports_end=reports_end)
    if not _open:
        call_after_runs(_finish)
    _open.append(notifications)
    return notifications


os.register_at_fork(after_in_child=_open.clear)


def _finish() -> None:
    """Send the last messages of all runs, because the process exits."""
    close_at = time.monotonic() + CLOSE_SECONDS
    for notifications in _open:
        notifications.report_end_at_exit()
    for notifications in _open:
        notifications.close(max(0.0, close_at - time.monotonic()))


def _sentence(data: EventData) -> str:
    """Return the sentence of an event, with a capital letter and a period."""
    text = str(data)
    return f"{text[:1].upper()}{text[1:]}."
