"""What a rank has begun in an attempt, sent to one that cannot go on: that one begins the same, by hand.

Nobody knows an order ahead. Undisturbed, a short list grows by a few entries in each attempt, and a thread waits.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

from holdfast.guard.ranks.messages import Messages

_LOOK_SECONDS = 0.002


class Tape:
    """The collectives of the attempts of one rank."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._attempt = 0
        self._entries: list[list[Any]] = []
        self._is_over = True
        self._number = 0  # of attempts that somebody could not make
        messages.start(self._serve, "holdfast-tape")

    def begin(self) -> None:
        """Begin an attempt, on all ranks."""
        self._entries, self._is_over = [], False
        self._attempt += 1  # last: the thread looks at it first

    def note(self, *entry: Any) -> None:
        """Note that a collective is begun."""
        if not self._is_over:
            self._entries.append([*entry])

    def end(self) -> None:
        """Note that this rank begins nothing more by running the model."""
        self._is_over = True

    def follow(self, begin: Callable[..., None]) -> None:
        """Begin what the others have begun and this rank has not, until all of them are at the end of the attempt."""
        self.end()
        name, at, said = f"tape/{self._number}", len(self._entries), self._messages.said
        self._messages.call(name, str(self._attempt))
        others = {rank: f"{name}/{rank}" for rank in self._messages.others}
        heard_at = time.monotonic()
        while True:
            found = next(filter(None, (said(f"{other}/{at}") for other in others.values())), None)
            if found is not None:
                begin(*json.loads(found))
                at += 1
                heard_at = time.monotonic()
                continue
            ends = {rank: said(f"{other}/end") for rank, other in others.items()}
            late = [rank for rank, end in ends.items() if end is None or int(end) > at]
            if not late:
                return
            if time.monotonic() > heard_at + self._messages.timeout_seconds:
                self._messages.lose(late[0], "has not come to the end of a step, where another rank has failed")
            time.sleep(_LOOK_SECONDS)

    def next(self) -> None:
        """Note that all ranks know that one of them could not make this attempt."""
        self._number += 1

    def _serve(self, store: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: the run is over
            for number in itertools.count():
                name, sent, is_over = f"tape/{number}", 0, False
                if (called := self._messages.called(store, name)) is None:
                    return
                attempt, own = int(called), f"{name}/{self._messages.rank}"
                while not is_over:
                    time.sleep(_LOOK_SECONDS)
                    if self._attempt < attempt:
                        continue
                    is_over, entries = self._is_over or self._attempt > attempt, self._entries
                    for entry in entries[sent:]:  # a copy: it grows meanwhile
                        store.set(f"{own}/{sent}", json.dumps(entry))
                        sent += 1
                store.set(f"{own}/end", str(sent))
