"""`RunNotifications`: choose which of the supervisor's events are worth a message to the user.

``core.notify`` sends the messages. A guard sends those about NaN or Inf and about the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.core.events import process_events
from holdfast.core.events.data import EventData
from holdfast.core.notify.message import Message, MessageKind
from holdfast.core.notify.notifier import Notifier
from holdfast.core.notify.receivers import parse_receiver
from holdfast.core.text import counted, duration
from holdfast.explain.signatures import ids
from holdfast.explain.verdict import Verdict

# A title that contains this quotes a line of the output, which may contain anything.
_QUOTES_THE_OUTPUT = "its output says: "


class RunNotifications:
    """Sends messages about the restarts, the hangs and the end of a supervised run.

    Args:
        notify: The receiver, as passed to ``--notify``.
        run: The name of the run.
        emit: Records an event.

    Raises:
        PolicyError: H118 if the receiver cannot be used.
    """

    def __init__(self, notify: str, run: str, emit: Callable[[EventData], None]) -> None:
        self._run = run
        self._emit = emit
        self._notifier = Notifier(parse_receiver(notify), self._report_failure)
        # Hangs are reported by other threads. Reentrant, because an event reports a message that
        # cannot be sent.
        self._lock = threading.RLock()
        # How many attempts this supervisor has started.
        self._attempts = 0
        # The kind and the innermost frame of each hang of this attempt that has been reported.
        self._hangs: set[tuple[str, str]] = set()
        self._end: process_events.AttemptEnded | None = None
        self._verdict: Verdict | None = None
        self._failures: list[str] = []

    def note(self, data: EventData, step: int) -> None:
        """Send a message if an event is worth one. Thread-safe.

        Args:
            data: An event that the supervisor has recorded.
            step: The current training step.
        """
        with self._lock:
            if isinstance(data, process_events.AttemptStarted):
                self._on_start(data, step)
            elif isinstance(data, process_events.AttemptEnded):
                self._end = data
            elif isinstance(data, process_events.Restart):
                self._on_restart(data, step)
            elif isinstance(data, process_events.Hang):
                self._on_hang(data)
            elif isinstance(data, process_events.Stopped):
                self._on_stop(data, step)

    def note_verdict(self, verdict: Verdict) -> None:
        """Remember why the newest attempt has ended."""
        self._verdict = verdict

    def close(self) -> str | None:
        """Wait until all messages are sent, for a few seconds at most.

        Returns:
            A sentence about the last message that could not be sent, or None if all were.
        """
        self._notifier.close()
        return self._failures[-1] if self._failures else None

    def _on_start(self, started: process_events.AttemptStarted, step: int) -> None:
        self._hangs.clear()
        self._attempts += 1
        if self._attempts == 1 and started.attempt > 0:
            details = f"The run is started again, as attempt {started.attempt}."
            self._send("restart", "Run continues", details, step)

    def _on_restart(self, restart: process_events.Restart, step: int) -> None:
        details = (
            f"{self._cause()}; restarting in {duration(restart.delay_seconds)}: {restart.why}."
        )
        self._send("restart", "Run restarts", details, step)

    def _on_hang(self, hang: process_events.Hang) -> None:
        """Report a hang on which the supervisor acts, once for each place."""
        place = (hang.hang_kind, hang.frame)
        if hang.remedy == "wait" or place in self._hangs:
            return
        self._hangs.add(place)
        self._send("hang", "Run hangs", f"{hang.sentence} [{hang.signature}].", hang.step)

    def _on_stop(self, stopped: process_events.Stopped, step: int) -> None:
        kind, what = self._judge_end()
        attempts = counted(self._attempts, "attempt")
        self._send(kind, what, f"{self._cause()}; {attempts}; {stopped.why}.", step)

    def _judge_end(self) -> tuple[MessageKind, str]:
        verdict = self._verdict
        was_asked = self._end is not None and self._end.asked_by is not None
        if was_asked or (verdict is not None and verdict.cause == ids.STOPPED):
            return "end", "Run stopped"
        if verdict is not None and verdict.family == "ended well":
            return "end", "Run ended"
        return "failure", "Run failed"

    def _cause(self) -> str:
        """Return why the newest attempt has ended, without the message of an exception.

        The message could contain anything, such as the command line of a subprocess.
        """
        verdict = self._verdict
        if verdict is None:
            return "The run has ended"
        title = verdict.title
        if verdict.cause == ids.ERROR_LINE:
            title = "its output ends with an error"
        if verdict.cause == ids.UNCAUGHT or _QUOTES_THE_OUTPUT in title:
            title = title.partition(": ")[0]
        return f"{title[:1].upper()}{title[1:]} [{verdict.cause}]"

    def _send(self, kind: MessageKind, what: str, details: str, step: int) -> None:
        if step:
            details += f" Step {step:,}."
        self._notifier.send(
            Message.about(kind, self._run, what=what, details=details, step=step or None)
        )

    def _report_failure(self, message: Message, why: str) -> None:
        event = process_events.MessageNotSent(
            message=message.kind, receiver=self._notifier.receiver.shown, error=why
        )
        self._failures.append(str(event))
        self._emit(event)
