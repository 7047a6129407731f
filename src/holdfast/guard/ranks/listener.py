"""`Listener`: a thread that reads the messages to this rank, and ends the process if necessary.

The thread ends the process if another rank has failed, or is waiting at a point that this rank will
never reach. The main thread cannot do so, since it may be blocked in a collective that will never
complete.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from typing import final

from holdfast.core.errors import RankError
from holdfast.guard.ranks.failures import Failures, out_of_step, print_error
from holdfast.guard.ranks.inbox import (
    ARE_YOU_ALIVE,
    READ_FAILURE,
    answer,
    letter_key,
    whereabouts_in,
)
from holdfast.guard.ranks.main_thread import collective_of_main_thread
from holdfast.guard.ranks.progress import GUARDS, Progress, Whereabouts
from holdfast.guard.ranks.store import LONGEST_PAUSE_SECONDS, RankStore
from holdfast.guard.ranks.threads import StoreThreads

# How long a process may stay blocked in a collective after another rank has failed, in seconds.
_GRACE_SECONDS = 3.0
# Whereabouts are evaluated after this delay, in seconds, because a rank that leaves its loop with
# an error sends its whereabouts before the error.
_JUDGEMENT_DELAY_SECONDS = 1.0
# How long a collective may take to complete once all ranks have started it, in seconds.
_COLLECTIVE_SECONDS = 5.0


@final
class Listener:
    """Reads the messages to this rank. Used by `Messages`.

    Args:
        rank: This rank.
        other_ranks: How many other ranks there are.
        threads: The threads of the guard. The listening thread is one of them.
        progress: How far this rank has got in the program.
        failures: The failures that this rank knows about.
    """

    def __init__(
        self,
        *,
        rank: int,
        other_ranks: int,
        threads: StoreThreads,
        progress: Progress,
        failures: Failures,
    ) -> None:
        self._rank = rank
        self._threads = threads
        self._failures = failures
        self._meetings = Meetings(rank, other_ranks, progress)

    def run(self, store: RankStore) -> None:
        """Exit this process if another rank has failed or waits where this rank will never arrive.

        This runs in a thread of its own. The main thread first gets a few seconds to notice the
        error and exit normally.

        Args:
            store: The store connection of this thread.
        """
        try:
            error = self._wait_for_failure(store)
            self._failures.note(error)
            self._failures.confirm_reading(store)
        except RuntimeError:
            # The store is gone, so the run is over.
            return
        if error is None:
            return
        # If the main thread is in a collective started by the script, torch may end the process
        # with a connection error as soon as the other ranks exit, so print the cause first.
        is_printed = collective_of_main_thread() is not None
        if is_printed:
            print_error(error)
        until = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < until:
            if self._failures.has_failed:
                return
            time.sleep(0.05)
        if not is_printed:
            print_error(error)
        os._exit(1)

    def _wait_for_failure(self, store: RankStore) -> RankError | None:
        """Read messages until another rank has failed, or waits where this rank will never arrive.

        Returns:
            The error, or None if this process is exiting or has failed itself.
        """
        for position in itertools.count():
            key = letter_key(self._rank, position)
            error = self._judge_until_letter(store, key)
            if error is not None:
                self._failures.post(error)
                return error
            letter = self._threads.wait_for_text(store, key)
            if letter is None:
                return None
            if letter == READ_FAILURE:
                return self._failures.read(store)
            if letter == ARE_YOU_ALIVE:
                answer(store, self._rank)
            else:
                self._meetings.add(whereabouts_in(letter))
        raise AssertionError("the letters never end")

    def _judge_until_letter(self, store: RankStore, key: str) -> RankError | None:
        """While other ranks are waiting, check whether this rank will reach them.

        Args:
            store: The store connection of this thread.
            key: The key of the next message. The check ends when this message arrives.

        Returns:
            H116 if this rank will not reach them. None if no rank is waiting any more, or if there
            is a new message.
        """
        while self._meetings.are_expected and not self._threads.is_ending and not store.has(key):
            error = self._meetings.judge()
            if error is not None:
                return error
            time.sleep(LONGEST_PAUSE_SECONDS)
        return None


@final
class Meetings:
    """Checks whether this rank will reach the points where other ranks wait for it or have ended.

    Used by `Listener`.

    Args:
        rank: This rank.
        other_ranks: How many other ranks there are.
        progress: How far this rank has got in the program.
    """

    def __init__(self, rank: int, other_ranks: int, progress: Progress) -> None:
        self._rank = rank
        self._other_ranks = other_ranks
        self._progress = progress
        # The whereabouts of other ranks, with the monotonic time at which each was received.
        self._received: list[tuple[float, Whereabouts]] = []
        # The monotonic time at which this rank was first seen waiting in a collective started by
        # the script while other ranks waited for it in the guard. None if that is not the case now.
        self._elsewhere_since: float | None = None

    @property
    def are_expected(self) -> bool:
        """Return whether another rank is at a point that this rank has not reached yet."""
        return bool(self._received)

    def add(self, whereabouts: Whereabouts) -> None:
        """Record the point at which another rank is waiting or has ended."""
        self._received.append((time.monotonic(), whereabouts))

    def judge(self) -> RankError | None:
        """Return H116 if this rank will not reach the point where another rank is, or None.

        Points that this rank has reached are no longer checked.
        """
        due = [
            whereabouts
            for received, whereabouts in self._received
            if time.monotonic() > received + _JUDGEMENT_DELAY_SECONDS
        ]
        missed = [error for other in due if (error := self._missed(other)) is not None]
        error = missed[0] if missed else self._elsewhere(due)
        if error is None:
            self._received = [
                (received, other)
                for received, other in self._received
                if other.is_ending or self._progress.next_exchange <= other.exchange
            ]
        return error

    def _missed(self, other: Whereabouts) -> RankError | None:
        """Return H116 if this rank will not reach another one, or None.

        Args:
            other: Where the other rank is waiting or has ended.
        """
        # Read these counts before the number of the exchange, which changes first when this rank
        # reaches the same point.
        has_begun_step = self._progress.steps > other.steps
        has_called = other.calls is not None and GUARDS.calls > other.calls
        is_beyond = self._progress.next_exchange > other.exchange
        if is_beyond:
            if not other.is_ending:
                return None
            action = "waits for it"
        elif has_begun_step:
            action = "makes another step"
        elif has_called:
            action = "calls another guard"
        else:
            return None
        rank = self._rank
        return out_of_step(f"rank {other.rank} {other.action}, and rank {rank} {action}")

    def _elsewhere(self, others: Sequence[Whereabouts]) -> RankError | None:
        """Return H116 if this rank waits in a collective for ranks that are waiting in the guard.

        If the collective synchronizes all ranks, a single rank that waits in the guard is enough to
        prove this. Otherwise, that rank may already have completed the collective, so all other
        ranks must be waiting in the guard.

        Args:
            others: Where the other ranks are.
        """
        next_exchange = self._progress.next_exchange
        waiting = {
            other.rank: other
            for other in others
            if other.is_waiting and next_exchange <= other.exchange
        }
        collective = collective_of_main_thread() if waiting else None
        all_others_wait = len(waiting) == self._other_ranks
        if collective is None or not (collective.synchronizes or all_others_wait):
            self._elsewhere_since = None
            return None
        # The collective may be about to complete, so give it some time.
        if self._elsewhere_since is None:
            self._elsewhere_since = time.monotonic()
        if time.monotonic() < self._elsewhere_since + _COLLECTIVE_SECONDS:
            return None
        other = waiting[min(waiting)]
        return out_of_step(
            f"rank {other.rank} {other.action}, and rank {self._rank} is in {collective.name}"
        )
