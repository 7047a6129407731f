"""`Notifier`: send messages in the background, so that no receiver can delay a run.

Each message is delivered by a process of its own, which is killed if it takes too long.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from holdfast.core.notify import post
from holdfast.core.notify.message import Message
from holdfast.core.notify.receivers import Delivery, Receiver, Webhook
from holdfast.core.text import sanitise
from holdfast.core.threads import start_thread

# How long one delivery may take.
DELIVERY_SECONDS = 10.0
# How long a run may wait at its end until its last messages are delivered. Schedulers usually allow
# 30 s between SIGTERM and SIGKILL, most of which a run needs to save.
CLOSE_SECONDS = 5.0
# The pauses before the second and the third try. The network may be what has failed.
_PAUSES_SECONDS = (5.0, 30.0)
_PAUSE_WHILE_CLOSING_SECONDS = 1.0
_MOST_WAITING = 20
# How often the deadline of a delivery is checked.
_POLL_SECONDS = 0.05
_MOST_CHARACTERS = 300

# Called with a message that could not be sent and the reason.
OnFailure = Callable[[Message, str], None]


class _Failure(NamedTuple):
    """Why a try to deliver a message has failed."""

    why: str
    may_retry: bool = False


class Notifier:
    """Sends messages to one receiver, in the order in which they are passed to `send`.

    Args:
        receiver: The receiver.
        on_failure: Called with every message that could not be sent, in the thread that has tried
            it. If it was not even tried, this is the thread that called `send`.
    """

    def __init__(self, receiver: Receiver, on_failure: OnFailure) -> None:
        self.receiver = receiver
        self._on_failure = on_failure
        self._waiting: deque[Message] = deque()
        # Protects the queue, and is notified when a message is added and when `close` begins.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        # The monotonic time at which every delivery ends. None until `close` begins.
        self._close_at: float | None = None

    def send(self, message: Message) -> None:
        """Send a message in the background. This takes about a millisecond, and never fails."""
        refusal = ""
        with self._changed:
            if self._close_at is not None:
                refusal = "the run has ended"
            elif len(self._waiting) >= _MOST_WAITING:
                refusal = "too many messages are waiting"
            else:
                self._waiting.append(message)
                self._changed.notify_all()
                self._start_thread()
        if refusal:
            self._on_failure(message, refusal)

    def _start_thread(self) -> None:
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name="holdfast notifier", daemon=True)
        # Python starts no thread while the interpreter exits, and memory may be short. The messages
        # are then sent by `close`.
        with suppress(RuntimeError, MemoryError):
            start_thread(thread)
            self._thread = thread

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Send the messages that are still waiting, for at most `seconds`.

        Further calls do nothing.
        """
        with self._changed:
            if self._close_at is not None:
                return
            self._close_at = time.monotonic() + seconds
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(seconds + 10 * _POLL_SECONDS)
        # The thread may not have been started, or may still be busy with a slow receiver.
        self._run()

    def _run(self) -> None:
        """Send messages until `close` has begun and none is waiting."""
        while (message := self._next_message()) is not None:
            self._send_with_retries(message)

    def _next_message(self) -> Message | None:
        """Wait for a message and remove it from the queue, or return None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._close_at is not None)
            return self._waiting.popleft() if self._waiting else None

    def _send_with_retries(self, message: Message) -> None:
        failure = self._deliver(message)
        for pause in _PAUSES_SECONDS:
            if failure is None or not failure.may_retry:
                break
            if self._waits_until_close(pause):
                # There is no time for long pauses at the end of the run.
                time.sleep(_PAUSE_WHILE_CLOSING_SECONDS)
            failure = self._deliver(message)
        if failure is not None:
            self._on_failure(message, sanitise(failure.why, most=_MOST_CHARACTERS))

    def _waits_until_close(self, seconds: float) -> bool:
        """Wait for some seconds, and return whether the notifier is being closed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._close_at is not None, timeout=seconds)

    def _deliver(self, message: Message) -> _Failure | None:
        """Try to deliver a message once. Return why that has failed, or None."""
        deadline = time.monotonic() + DELIVERY_SECONDS
        if self._is_over(deadline):
            return _Failure("no time was left at the end of the run")
        delivery = self.receiver.delivery(message)
        has_answer = isinstance(self.receiver, Webhook)
        try:
            process = _start(delivery, has_answer=has_answer)
        except (OSError, ValueError, MemoryError) as error:
            return _Failure(f"its process could not be started ({type(error).__name__})")
        with process:
            while process.poll() is None:
                if self._is_over(deadline):
                    _kill(process)
                    return _Failure("it did not finish in time")
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
            answer = "" if process.stdout is None else process.stdout.read().strip()
        if process.returncode == 0:
            return None
        may_retry = has_answer and process.returncode == post.TRY_AGAIN
        return _Failure(answer or f"it ended with status {process.returncode}", may_retry=may_retry)

    def _is_over(self, deadline: float) -> bool:
        """Return whether a delivery must end, because of its own deadline or that of `close`."""
        now = time.monotonic()
        return now >= deadline or (self._close_at is not None and now >= self._close_at)


def _start(delivery: Delivery, *, has_answer: bool) -> subprocess.Popen[str]:
    """Start the process of a delivery.

    Args:
        delivery: The delivery.
        has_answer: Whether to read the output of the process. That of a command of the user is
            discarded, because it may contain a password.
    """
    process = subprocess.Popen(  # noqa: S603 - the user's own command, or `post`
        delivery.words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if has_answer else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=delivery.environment,
        text=True,
        encoding="utf-8",
        errors="replace",
        # Ctrl-C must not interrupt the process. In the supervisor, it must not get a session of its
        # own, because it would then count as a process of the supervised command.
        process_group=0,
    )
    assert process.stdin is not None
    # The text fits into the pipe's buffer, so this does not wait. The process may have ended.
    with suppress(OSError):
        process.stdin.write(delivery.stdin)
    with suppress(OSError):
        process.stdin.close()
    return process


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and all processes that it has started in its group."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
