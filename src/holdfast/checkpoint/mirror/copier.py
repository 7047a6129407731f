"""`Copier`: copies checkpoints to a mirror in a background thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.checkpoint.mirror.location import describe
from holdfast.checkpoint.mirror.mirror import Mirror, MirrorLostError
from holdfast.checkpoint.store import Entry
from holdfast.core.errors import RunDirectoryError
from holdfast.core.events import run_events
from holdfast.core.events.data import EventData

# Time from a failed copy to the next try. It doubles with each failure, up to the second number. A
# new checkpoint is tried at once.
_FIRST_DELAY_SECONDS = 5.0
_LONGEST_DELAY_SECONDS = 300.0
# How long the end of a run waits for a copy that makes no progress.
_PATIENCE_SECONDS = 30.0
_POLL_SECONDS = 0.05


class Copier:
    """Copies the newest checkpoint to a mirror, in a thread that starts when there is one to copy.

    If checkpoints are saved faster than they can be copied, those in between are left out. If the
    store cannot be used, one event says so, the copy is tried again, and another event says when it
    has succeeded. If another process takes over the mirror, an event says so and copying ends.

    Args:
        mirror: The mirror. Once a checkpoint was offered, only the thread uses it.
        emit: Records an event.
    """

    def __init__(self, mirror: Mirror, emit: Callable[[EventData], None]) -> None:
        self._mirror = mirror
        self._emit = emit
        self._changed = threading.Condition()
        # The newest checkpoint that is still to be copied.
        self._offered: Entry | None = None
        # The checkpoint that is being copied.
        self._current: Entry | None = None
        # The newest checkpoint that was copied.
        self._copied: Entry | None = None
        self._is_ending = False
        # Whether another process owns the mirror.
        self._is_lost = False
        self._failed_at: float | None = None
        self._thread: threading.Thread | None = None

    def note_failure(self, error: BaseException) -> None:
        """Record that the store cannot be used, unless that is recorded already."""
        if self._failed_at is None:
            self._failed_at = time.monotonic()
            self._emit(run_events.MirrorFailed(error=describe(error)))

    def offer(self, entry: Entry) -> None:
        """Copy a checkpoint as soon as possible, instead of any older one. Returns at once."""
        with self._changed:
            if self._is_lost:
                return
            self._offered = entry
            self._is_ending = False
            self._changed.notify_all()
            if self._thread is None:
                # A daemon, because a store that does not answer must not keep the process alive.
                self._thread = threading.Thread(
                    target=self._work, name="holdfast-mirror", daemon=True
                )
                self._thread.start()

    def in_use(self) -> tuple[Path, ...]:
        """Return the checkpoint that is being copied, which must not be deleted now."""
        current = self._current
        return () if current is None else (current.path,)

    def finish(self) -> None:
        """Wait until the newest checkpoint is copied, or until that makes no more progress."""
        thread = self._thread
        if thread is None:
            return
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        parts = self._mirror.parts_copied
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(_POLL_SECONDS)
            if parts != self._mirror.parts_copied:
                parts = self._mirror.parts_copied
                deadline = time.monotonic() + _PATIENCE_SECONDS
        newest = self._offered or self._current
        if newest is not None and not self._is_lost:
            copied = None if self._copied is None else self._copied.path.name
            self._emit(run_events.MirrorBehind(newest=newest.path.name, mirrored=copied))

    # --- the thread

    def _work(self) -> None:
        delay = _FIRST_DELAY_SECONDS
        while (entry := self._take()) is not None:
            is_last_try = self._is_ending
            if self._try_to_copy(entry):
                delay = _FIRST_DELAY_SECONDS
                continue
            self._put_back(entry)
            if is_last_try and self._may_end():
                return
            self._wait_to_retry(entry, delay)
            delay = min(2 * delay, _LONGEST_DELAY_SECONDS)

    def _take(self) -> Entry | None:
        """Wait for a checkpoint and return it, or return None if the thread has to end."""
        with self._changed:
            while self._offered is None and not self._is_ending and not self._is_lost:
                self._changed.wait()
            self._current = None if self._is_lost else self._offered
            self._offered = None
            if self._current is None:
                self._thread = None
            return self._current

    def _may_end(self) -> bool:
        """Return whether the thread has to end, because the run has not continued meanwhile."""
        with self._changed:
            if self._is_ending:
                self._thread = None
            return self._is_ending

    def _put_back(self, entry: Entry) -> None:
        """Offer a checkpoint again that could not be copied, unless there is a newer one."""
        with self._changed:
            if self._offered is None:
                self._offered = entry
            self._current = None

    def _wait_to_retry(self, entry: Entry, delay: float) -> None:
        """Wait until a failed copy is tried again, a newer checkpoint comes, or the run ends."""
        with self._changed:
            if self._offered is entry and not self._is_ending:
                self._changed.wait(delay)

    def _try_to_copy(self, entry: Entry) -> bool:
        """Copy a checkpoint, and return whether there is nothing left to retry."""
        try:
            self._ensure_ownership()
            self._mirror.push(entry)
        except MirrorLostError as error:
            self._is_lost = True
            self._emit(run_events.MirrorStopped(why=str(error)))
        # The library of any store may raise anything, and training must not notice.
        except Exception as error:  # noqa: BLE001
            if entry.path.exists():
                self.note_failure(error)
                return False
        else:
            self._copied = entry
            self._note_success()
        self._current = None
        return True

    def _ensure_ownership(self) -> None:
        """Take the mirror over, if the store could not be reached when the run started.

        Raises:
            MirrorLostError: Another process has continued the run in the meantime.
        """
        if self._mirror.is_owned:
            return
        try:
            self._mirror.take_over(may_pull=False)
        except RunDirectoryError as error:
            raise MirrorLostError(error.what) from error

    def _note_success(self) -> None:
        if self._failed_at is not None:
            seconds = time.monotonic() - self._failed_at
            self._failed_at = None
            self._emit(run_events.MirrorRecovered(seconds=round(seconds, 3)))
