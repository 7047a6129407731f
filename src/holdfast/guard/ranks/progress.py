"""Track how far this rank has got in the program, compared with the other ranks.

All ranks call their guards in the same order. Three counts reveal a rank that takes a different
path: a guard's exchanges, its steps, and the calls to all guards.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import NamedTuple, final

from holdfast.core.errors import RankError

# An upper bound on the number of calls to one guard.
_CALLS_OF_A_GUARD = 2**40


@final
class GuardsOfProcess:
    """The state that all guards in this process share. `GUARDS` is the only instance.

    A script may have several guards, for example one for each of two models. The order of the calls
    to all of them reveals ranks that call different guards. If one guard learns of a failure, the
    other guards must stop waiting as well.
    """

    def __init__(self) -> None:
        # The number of guards that have been created so far.
        self._guards = 0
        # The number of steps and exchanges that all guards have started, which is the same on all
        # ranks.
        self.calls = 0
        # The error of another rank that has failed. None if no failure is known.
        self.failure: RankError | None = None

    def number_of_new_guard(self) -> int:
        """Return the number of a new guard, from 0, which is the same on all ranks.

        If all ranks have caught an error, their numbers of calls may differ. Creating a guard makes
        these numbers equal again.
        """
        number = self._guards
        self._guards += 1
        self.calls = number * _CALLS_OF_A_GUARD
        return number

    def count_call(self) -> int | None:
        """Count a step or an exchange, and return the number of earlier ones.

        Outside of the main thread, exchanges have no fixed order relative to other calls, so they
        are not counted and the result is None.
        """
        if threading.current_thread() is not threading.main_thread():
            return None
        self.calls += 1
        return self.calls - 1

    def note_failure(self, error: RankError) -> None:
        """Record the error of another rank that has failed."""
        self.failure = error


GUARDS = GuardsOfProcess()


class Whereabouts(NamedTuple):
    """The point in the program that a rank has reached, in the form in which it tells other ranks.

    Attributes:
        rank: The rank.
        exchange: The number of the rank's next exchange. A rank with a larger number has passed
            this point.
        steps: How many steps the rank has started.
        calls: How many calls the rank has made to all its guards. None if it may still call other
            guards.
        action: What the rank is doing, as a verb phrase that follows its name.
        is_ending: Whether the process of the rank is exiting.
        is_waiting: Whether the rank is waiting for the ranks that receive this message.
    """

    rank: int
    exchange: int
    steps: int
    calls: int | None
    action: str
    is_ending: bool
    is_waiting: bool


@final
class Progress:
    """How far one guard on this rank has got in the program.

    The main thread advances the counts, and the thread of the `Listener` reads them. The end of an
    epoch counts as a step, because in both cases the ranks wait for each other in collectives
    rather than in exchanges.
    """

    def __init__(self) -> None:
        self.steps = 0
        # The number of the next exchange, keyed by the name of the thread. "" is the main thread.
        self._exchanges: defaultdict[str, int] = defaultdict(int)

    @property
    def next_exchange(self) -> int:
        """Return the number of the next exchange of the main thread."""
        return self._exchanges[""]

    def begin_step(self) -> None:
        """Count a step or the end of an epoch."""
        self.steps += 1
        GUARDS.count_call()

    def number_of_new_exchange(self, thread: str = "") -> int:
        """Count a new exchange, and return its number.

        Args:
            thread: The name of the thread. Empty for the main thread.
        """
        self._exchanges[thread] += 1
        return self._exchanges[thread] - 1
