"""`Inbox`: short messages ("letters") from rank to rank, which a thread of the receiver reads in
order.

A letter is one of the strings below, or the `Whereabouts` of its sender.
"""

from __future__ import annotations

import json
import time
from typing import final

from holdfast.guard.ranks.progress import Whereabouts
from holdfast.guard.ranks.store import LONGEST_PAUSE_SECONDS, RankStore

# Asks the receiver to read the key ``failure``.
READ_FAILURE = "read failure"
# Asks the receiver whether it is alive.
ARE_YOU_ALIVE = "are you alive"
# How long another rank may take to answer that it is alive, in seconds. Native code may keep its
# threads from running for a while.
_ANSWER_SECONDS = 30.0


@final
class Inbox:
    """Sends letters to the ranks.

    Args:
        store: A connection to the store.
    """

    def __init__(self, store: RankStore) -> None:
        self._store = store

    def send(self, rank: int, letter: str) -> None:
        """Send a letter to a rank."""
        position = self._store.add(f"inbox/{rank}/length", 1) - 1
        self._store.set_text(letter_key(rank, position), letter)

    def send_whereabouts(self, rank: int, whereabouts: Whereabouts) -> None:
        """Send the whereabouts of this rank to another rank."""
        self.send(rank, json.dumps(whereabouts))

    def answers(self, rank: int) -> bool:
        """Ask another rank whether it is alive. Return whether its listening thread answers."""
        before = self._store.add(f"alive/{rank}", 0)
        self.send(rank, ARE_YOU_ALIVE)
        until = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < until:
            if self._store.add(f"alive/{rank}", 0) > before:
                return True
            time.sleep(LONGEST_PAUSE_SECONDS)
        return False


def letter_key(rank: int, position: int) -> str:
    """Return the key of a letter to a rank.

    Args:
        rank: The rank.
        position: The position of the letter among all letters to this rank, from 0.
    """
    return f"inbox/{rank}/{position}"


def answer(store: RankStore, rank: int) -> None:
    """Answer that this rank is alive."""
    store.add(f"alive/{rank}", 1)


def whereabouts_in(letter: str) -> Whereabouts:
    """Return the whereabouts in a letter."""
    return Whereabouts(*json.loads(letter))
