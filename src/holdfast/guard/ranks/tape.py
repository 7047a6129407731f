"""`Tape`: a list of an attempt's collectives, which lets a failed rank start them by hand.

The other ranks wait for the failed rank in collectives whose order is unknown in advance. Each rank
therefore keeps a tape: a list of the collectives that the guard and the model's wrapper have
started in an attempt. A failed rank asks the other ranks for their tapes and starts the same
collectives. In a normal attempt, this costs only a short list and a waiting thread.

Another rank may be in a later attempt by the time it is asked, because the collectives of an
accelerator run while the host continues. Requests and tapes therefore name the attempt, and each
rank keeps its last few tapes.

Collectives that the loss or the model itself starts (see `collectives`) cannot be started by hand,
since their inputs are unknown. If another rank is waiting in such a collective and the failed rank
has not started it, all ranks exit.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from holdfast.guard.ranks.collectives import Collectives, groups_shared_with
from holdfast.guard.ranks.messages import Messages
from holdfast.guard.ranks.store import RankStore

# The time between two checks for new entries on other ranks' tapes or on this rank's tape, in
# seconds.
_POLL_SECONDS = 0.002
# How many tapes of earlier attempts a rank keeps. A rank may be one attempt ahead of a rank that
# asks for its tape. It cannot be further ahead, because after each attempt it waits for the result
# of the attempt before.
_KEPT_TAPES = 2
# The kinds of collectives on a tape. The tape of a sharded model has all kinds. That of a
# replicated model has only `ROW`, since the process group counts the other collectives.
ROW = "row"
GATHER = "gather"
SCATTER = "scatter"
NORMS = "norms"
# The prefix of the keys under which tapes are requested.
_REQUESTS = "tape requests"


class Entry(NamedTuple):
    """A collective on a tape. It is sent as JSON.

    Attributes:
        kind: `ROW`, `GATHER`, `SCATTER` or `NORMS`. It determines which other attributes are set.
        module: For weights and gradients, the index of their module.
        size: For gradients and norms, the number of elements.
        dtype: For gradients and norms, the name of the dtype, such as ``"float32"``.
        averages: For gradients, whether they are averaged over the ranks rather than added.
    """

    kind: str
    module: int = 0
    size: int = 0
    dtype: str = ""
    averages: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _EndedTape:
    """The tape of an attempt that this rank has ended."""

    entries: Sequence[Entry] = ()
    # How many collectives the loss or the model has started on each group.
    collectives: Counter[str] = field(default_factory=Counter)


@final
class Tape:
    """Records this rank's collectives in the current attempt, which other ranks may ask for.

    Args:
        messages: The connection to the other ranks.
    """

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self.collectives = Collectives()
        self._attempt = 0
        self._entries: list[Entry] = []
        self._is_over = True
        # The tapes of the last attempts, by the number of the attempt.
        self._ended: dict[int, _EndedTape] = {}
        messages.start_thread(self._serve, "holdfast-tape")

    def begin(self) -> None:
        """Start a new tape for an attempt. All ranks must call this the same number of times."""
        self.end()
        self._ended[self._attempt] = _EndedTape(
            entries=self._entries, collectives=self.collectives.started()
        )
        self._ended.pop(self._attempt - _KEPT_TAPES, None)
        self._entries = []
        self._is_over = False
        self.collectives.begin()
        # This is set last, because the thread that sends the tape reads it first.
        self._attempt += 1

    def note(self, group: Any, entry: Entry) -> None:
        """Record that the guard or the model's wrapper is about to start a collective.

        Args:
            group: The process group of the collective.
            entry: The information that another rank needs to start the collective by hand.
        """
        self.collectives.exclude_next(group)
        if not self._is_over:
            self._entries.append(entry)

    def end(self) -> None:
        """Record that this rank has finished its forward and backward passes in this attempt."""
        self.collectives.freeze()
        self._is_over = True

    def follow(self, start: Callable[[Entry], None]) -> str | None:
        """Start the collectives that other ranks have started but this rank has not.

        This returns once all other ranks have ended the attempt.

        Args:
            start: Function that starts a collective by hand.

        Returns:
            None, or the reason why this rank cannot start them.

        Raises:
            RankError: H114 if another rank does not end the attempt within the timeout of the
                process group.
        """
        names = self._request_tapes()
        position = len(self._entries)
        last_entry_time = time.monotonic()
        while True:
            obstacle = self._obstacle(names)
            if obstacle is not None:
                return obstacle
            texts = (self._messages.read(f"{name}/{position}") for name in names)
            text = next(filter(None, texts), None)
            if text is not None:
                start(Entry(*json.loads(text)))
                position += 1
                last_entry_time = time.monotonic()
                continue
            lengths = {
                rank: self._messages.read(f"{name}/end")
                for name, rank in zip(names, self._messages.others, strict=True)
            }
            # Another rank has ended the attempt once its whole tape has been followed.
            missing = [
                rank for rank, length in lengths.items() if length is None or int(length) > position
            ]
            if not missing:
                return self._obstacle(names, all_have_ended=True)
            self._check_timeout(last_entry_time, missing[0])
            time.sleep(_POLL_SECONDS)

    def wait_for_row(self) -> str | None:
        """Wait for all other ranks to start the exchange of rows, or to fail in this attempt.

        Returns:
            None, or why this rank cannot start the collective in which the others are waiting.

        Raises:
            RankError: H114 if another rank does neither within the timeout of the process group.
        """
        names = self._request_tapes()
        start = time.monotonic()
        while True:
            obstacle = self._obstacle(names)
            if obstacle is not None:
                return obstacle
            missing = [
                rank
                for name, rank in zip(names, self._messages.others, strict=True)
                if not (self._messages.read(f"{name}/0") or self._messages.read(f"{name}/end"))
            ]
            if not missing:
                return self._obstacle(names, all_have_ended=True)
            self._check_timeout(start, missing[0])
            time.sleep(_POLL_SECONDS)

    def _check_timeout(self, since: float, missing_rank: int) -> None:
        """Report H114 about a rank if the timeout of the process group has passed.

        The next call to `Messages.read` then raises it.

        Args:
            since: The monotonic time at which the wait started.
            missing_rank: The rank that this rank is waiting for.
        """
        if time.monotonic() > since + self._messages.timeout_seconds:
            self._messages.lose(
                missing_rank, "has not reached the end of a step in which another rank has failed"
            )

    def _request_tapes(self) -> list[str]:
        """Ask the other ranks for their tapes of the current attempt.

        Returns:
            The prefixes of the keys under which the other ranks will send their tapes.
        """
        self.end()
        self._messages.request_once(_REQUESTS, str(self._attempt))
        name = _name_of(self._attempt)
        return [f"{name}/{rank}" for rank in self._messages.others]

    def _obstacle(self, names: list[str], *, all_have_ended: bool = False) -> str | None:
        """Describe a collective, started by the loss or the model, that other ranks do not join.

        Args:
            names: The prefixes of the tapes, in the order of the other ranks.
            all_have_ended: Whether the counts of the other ranks are final. If so, a rank that has
                started fewer collectives than this one is reported too.

        Returns:
            A message, or None if there is no such collective.
        """
        own = self.collectives.started()
        for name, rank in zip(names, self._messages.others, strict=True):
            text = self._messages.read(f"{name}/collectives")
            others_count = Counter(json.loads(text or "{}"))
            groups = groups_shared_with(rank)
            if any(others_count[group] > own[group] for group in groups):
                return (
                    f"rank {rank} is in a collective of the loss or the model that this rank has"
                    " not reached"
                )
            if all_have_ended and any(others_count[group] < own[group] for group in groups):
                return (
                    f"rank {rank} will not reach a collective of the loss or the model that this"
                    " rank has started"
                )
        return None

    def _serve(self, store: RankStore) -> None:
        """Send this rank's tape whenever another rank asks for it. This runs in its own thread."""
        # The store raises an error when it is gone, which means that the run is over.
        with contextlib.suppress(RuntimeError):
            for number in itertools.count():
                attempt = self._messages.wait_for_request(store, f"{_REQUESTS}/{number}")
                if attempt is None:
                    return
                self._send(store, f"{_name_of(int(attempt))}/{self._messages.rank}", int(attempt))

    def _send(self, store: RankStore, name: str, attempt: int) -> None:
        """Send the tape of an attempt, entry by entry, until the attempt is over.

        Args:
            store: The store connection of the calling thread.
            name: The prefix of the keys under which the tape is sent.
            attempt: The number of the attempt, which this rank may not have started yet.
        """
        sent = 0
        sent_collectives: Counter[str] = Counter()
        is_over = False
        while not is_over:
            time.sleep(_POLL_SECONDS)
            if self._attempt < attempt:
                continue
            is_over = self._is_over or self._attempt > attempt
            entries, started = self._recorded(attempt)
            # The counts are read after the entries, and sent before them. A rank that has received
            # an entry therefore knows about all collectives that were started before that entry.
            if started != sent_collectives:
                store.set_text(f"{name}/collectives", json.dumps(started))
                sent_collectives = started
            for entry in entries[sent:]:
                store.set_text(f"{name}/{sent}", json.dumps(entry))
                sent += 1
        store.set_text(f"{name}/end", str(sent))

    def _recorded(self, attempt: int) -> tuple[Sequence[Entry], Counter[str]]:
        """Return the entries of an attempt so far, and its counts of collectives."""
        entries = self._entries
        length = len(entries)
        started = self.collectives.started()
        if self._attempt == attempt:
            return entries[:length], started
        # The attempt has ended, perhaps while the values above were read.
        ended = self._ended.get(attempt, _EndedTape())
        return ended.entries, ended.collectives


def _name_of(attempt: int) -> str:
    """Return the prefix of the keys for the tapes of an attempt."""
    return f"tape/{attempt}"
