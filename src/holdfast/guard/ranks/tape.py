"""What a rank has begun in an attempt, sent to one that cannot go on: that one begins the same, by hand.

Nobody knows an order ahead. Undisturbed, a short list grows by a few entries in each attempt, and a thread waits.

What the loss or the model begins by itself (see ``collectives``) cannot be begun by hand, since nobody knows what it
would be given. A rank that has not come to such a collective, and never will, ends all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from holdfast.guard.ranks.collectives import Collectives, shared_with
from holdfast.guard.ranks.messages import Messages

_LOOK_SECONDS = 0.002
ROW = "row"


class Tape:
    """The collectives of the attempts of one rank."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self.collectives = Collectives()
        self._attempt = 0
        self._entries: list[list[Any]] = []
        self._is_over = True
        self._number = 0  # of attempts that somebody could not make
        messages.start(self._serve, "holdfast-tape")

    def begin(self) -> None:
        """Begin an attempt, on all ranks."""
        self._entries, self._is_over = [], False
        self.collectives.begin()
        self._attempt += 1  # last: the thread looks at it first

    def note(self, group: Any, *entry: Any) -> None:
        """Note that a collective of the guard or the wrapper is about to begin on a group."""
        self.collectives.foresee(group)
        if not self._is_over:
            self._entries.append([*entry])

    def end(self) -> None:
        """Note that this rank begins nothing more by running the model."""
        self.collectives.settle()
        self._is_over = True

    def follow(self, begin: Callable[..., None]) -> str | None:
        """Begin what the others have begun and this rank has not, until all of them are at the end of the attempt.

        Return why that cannot be done, or None.

        Raises:
            RankError: H114, if another rank does not come to its end within the timeout of the process group.
        """
        names, at = self._call(), len(self._entries)
        heard_at = time.monotonic()
        while True:
            hindered = self._hindered(names)
            if hindered is not None:
                return hindered
            entry = next(filter(None, (self._messages.said(f"{name}/{at}") for name in names)), None)
            if entry is not None:
                begin(*json.loads(entry))
                at += 1
                heard_at = time.monotonic()
                continue
            ends = {
                rank: self._messages.said(f"{name}/end")
                for name, rank in zip(names, self._messages.others, strict=True)
            }
            late = [rank for rank, end in ends.items() if end is None or int(end) > at]
            if not late:
                return self._hindered(names, is_final=True)
            self._check_time(heard_at, late[0])
            time.sleep(_LOOK_SECONDS)

    def wait_for_row(self) -> str | None:
        """Wait until the others have begun their row, or cannot go on either.

        Return why this rank cannot begin what they wait for, or None.

        Raises:
            RankError: H114, if another rank does not come there within the timeout of the process group.
        """
        names = self._call()
        began = time.monotonic()
        while True:
            hindered = self._hindered(names)
            if hindered is not None:
                return hindered
            late = [
                rank
                for name, rank in zip(names, self._messages.others, strict=True)
                if not (self._messages.said(f"{name}/0") or self._messages.said(f"{name}/end"))
            ]
            if not late:
                return self._hindered(names, is_final=True)
            self._check_time(began, late[0])
            time.sleep(_LOOK_SECONDS)

    def _check_time(self, since: float, late_rank: int) -> None:
        """Raise H114 if the group's timeout has passed since this rank last heard of another one."""
        if time.monotonic() > since + self._messages.timeout_seconds:
            self._messages.lose(late_rank, "has not come to the end of a step, where another rank has failed")

    def _call(self) -> list[str]:
        """Let the others send their tapes; return the names under which they do."""
        self.end()
        name = f"tape/{self._number}"
        self._messages.call(name, str(self._attempt))
        return [f"{name}/{rank}" for rank in self._messages.others]

    def _hindered(self, names: list[str], *, is_final: bool = False) -> str | None:
        """Return which rank has begun a collective of the loss or the model that this one has not, or None.

        Finally, the reverse counts as well.
        """
        own = self.collectives.begun()
        for name, rank in zip(names, self._messages.others, strict=True):
            text = self._messages.said(f"{name}/collectives")
            theirs = Counter(json.loads(text or "{}"))
            groups = shared_with(rank)
            if any(theirs[group] > own[group] for group in groups):
                return f"rank {rank} is in a collective of the loss or the model, which this rank has not come to"
            if is_final and any(theirs[group] < own[group] for group in groups):
                return f"rank {rank} does not come to a collective of the loss or the model that this rank has begun"
        return None

    def next(self) -> None:
        """Note that all ranks know that one of them could not make this attempt."""
        self._number += 1

    def _serve(self, store: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: the run is over
            for number in itertools.count():
                name = f"tape/{number}"
                called = self._messages.called(store, name)
                if called is None:
                    return
                self._send(store, f"{name}/{self._messages.rank}", int(called))

    def _send(self, store: Any, name: str, attempt: int) -> None:
        """Send what this rank begins in an attempt, until it is over."""
        sent = 0
        collectives: Counter[str] = Counter()
        is_over = False
        while not is_over:
            time.sleep(_LOOK_SECONDS)
            if self._attempt < attempt:
                continue
            is_over = self._is_over or self._attempt > attempt
            new = self._entries[sent:]
            # Read after the entries and said before them: whoever reads an entry knows all that came before it.
            begun = self.collectives.begun()
            if begun != collectives:
                store.set(f"{name}/collectives", json.dumps(begun))
                collectives = begun
            for entry in new:
                store.set(f"{name}/{sent}", json.dumps(entry))
                sent += 1
        store.set(f"{name}/end", str(sent))
