"""`Inbox`: send short messages from rank to rank through the store.

A thread of the receiver reads these messages in order. Each of them, called a letter in the code,
is one of the strings below or the `Whereabouts` of its sender.
"""

from __future__ import annotations

import json
import time
from typing import final

from holdfast.guard.ranks.progress import Whereabouts
from holdfast.guard.ranks.store import LONGEST_PAUSE_SECONDS, RankStore

# Asks the receiver to read the error that is in the store under the key ``failure``.
READ_FAILURE = "read failure"
# Asks the receiver whether it is alive.
ARE_YOU_ALIVE = "are you alive"
# How long another rank may take to answer that it is alive, in seconds. Native code may prevent
# Python threads from running for a while.
_ANSWER_SECONDS = 30.0


@final
class Inbox:
    """Sends messages to the ranks.

    Args:
        store: A connection to the store.
    """

    def __init__(self, store: RankStore) -> None:
        self._store = store

    def send(self, rank: int, letter: str) -> None:
        """Send a message to a rank."""
        # `add` returns the new number of messages, and positions start at 0.
        position = self._store.add(f"inbox/{rank}/length", 1) - 1
        self._store.set_text(letter_key(rank, position), letter)

    def send_whereabouts(self, rank: int, whereabouts: Whereabouts) -> None:
        """Tell another rank how far this rank has got in the program."""
        self.send(rank, json.dumps(whereabouts))

    def answers(self, rank: int) -> bool:
        """Ask another rank whether it is alive, and return whether its listening thread answers."""
        # Adding 0 reads the counter, which the other rank increments.
        before = self._store.add(f"alive/{rank}", 0)
        self.send(rank, ARE_YOU_ALIVE)
        until = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < until:
            if self._store.add(f"alive/{rank}", 0) > before:
                return True
            time.sleep(LONGEST_PAUSE_SECONDS)
        return False


def letter_key(rank: int, position: int) -> str:
    """Return the store key of a message to a rank.

    Args:
        rank: The receiving rank.
        position: The index of the message among all messages to this rank, from 0.
    """
    return f"inbox/{rank}/{position}"


def answer(store: RankStore, rank: int) -> None:
    """Answer a message that asks whether this rank is alive."""
    store.add(f"alive/{rank}", 1)


def whereabouts_in(letter: str) -> Whereabouts:
    """Return the `Whereabouts` that are encoded in a message."""
    return Whereabouts(*json.loads(letter))
