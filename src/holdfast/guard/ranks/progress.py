"""How far this rank is in the program, compared with the other ranks.

All ranks call the guards in the same order. So they can tell from three counts whether one of them
has gone another way: the exchanges of a guard, its steps, and the calls of all guards.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import NamedTuple, final

from holdfast.core.errors import RankError

# No guard makes more calls than this.
_CALLS_OF_A_GUARD = 2**40


@final
class GuardsOfProcess:
    """What all guards of this process share; there is one instance, `GUARDS`.

    It belongs to the process and not to a guard, since guards that know nothing of each other, such
    as those of two models in one script, need it: ranks that call different guards are found out by
    the order of calls of all guards, and a failure that one guard has learned about ends the waits
    of the others.
    """

    def __init__(self) -> None:
        # The number of guards created so far.
        self._guards = 0
        # The number of steps and exchanges that all guards have started. It is the same on all
        # ranks.
        self.calls = 0
        # The error with which another rank has failed.
        self.failure: RankError | None = None

    def number_of_new_guard(self) -> int:
        """Return the number of a new guard, from 0, which is the same on all ranks.

        If all ranks have caught an error, their numbers of calls may differ. This makes them equal
        again.
        """
        number = self._guards
        self._guards += 1
        self.calls = number * _CALLS_OF_A_GUARD
        return number

    def count_call(self) -> int | None:
        """Count a step or an exchange, and return how many there were before it.

        Outside the main thread, return None and count nothing, since exchanges there have no order
        relative to others.
        """
        if threading.current_thread() is not threading.main_thread():
            return None
        self.calls += 1
        return self.calls - 1

    def note_failure(self, error: RankError) -> None:
        """Note the error with which another rank has failed."""
        self.failure = error


GUARDS = GuardsOfProcess()


class Whereabouts(NamedTuple):
    """Where a rank is in the program. It sends this to ranks that have not got there yet.

    Attributes:
        rank: The rank.
        exchange: The number of its next exchange. A rank with a larger number has passed this
            point.
        steps: How many steps it has started.
        calls: How many calls of all guards it has made; None if it may still call other guards.
        action: What it is doing there, as a verb phrase after the name of the rank.
        is_ending: Whether its process is ending.
        is_waiting: Whether it waits for the ranks to which it sends this.
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
    """How far one guard of this rank is.

    The main thread advances it, and the thread of the `Listener` reads it. A step also counts the
    end of an epoch: in both, the ranks wait for each other in collectives, not in exchanges.
    """

    def __init__(self) -> None:
        self.steps = 0
        # The number of the next exchange, by the name of the thread; "" is the main thread.
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
        """Return the number of a new exchange, and count it.

        Args:
            thread: The name of the thread; empty for the main thread.
        """
        self._exchanges[thread] += 1
        return self._exchanges[thread] - 1
