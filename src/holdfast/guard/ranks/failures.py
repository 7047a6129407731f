"""`Failures`: the first failure on any rank, after which all ranks exit.

A failing rank writes its error to the store under the key ``failure``, unless another rank has
already done so. It then sends every rank a message that asks the rank to read this key.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import final

from holdfast.core.errors import HoldfastError, RankError
from holdfast.core.standard_streams import write_to_stderr
from holdfast.guard.ranks.inbox import READ_FAILURE, Inbox
from holdfast.guard.ranks.progress import GUARDS
from holdfast.guard.ranks.store import RankStore

_KEY = "failure"
# Words in an error message that suggest that another rank has exited.
_SIGNS_OF_A_LOST_PEER = (
    "gloo",
    "NCCL",
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    # The connection to the store, which the first rank hosts.
    "Connection was likely closed",
)
_HAS_LEFT = "this rank has left the group after an error, or this is a fork of its process"
# How long a failing rank waits for all ranks to read its error, in seconds.
_READ_SECONDS = 1.0
# How long a rank waits for the text of another rank's error, in seconds.
_TEXT_SECONDS = 2.0


@final
class Failures:
    """Reports a failure of this rank to the other ranks, and receives their failures.

    Args:
        rank: This rank.
        ranks: All ranks.
        store: A connection to the store.
        inbox: The object that sends messages to the ranks.
    """

    def __init__(self, rank: int, ranks: Sequence[int], store: RankStore, inbox: Inbox) -> None:
        self._rank = rank
        self._ranks = ranks
        self._store = store
        self._inbox = inbox
        # The error of another rank that has failed. None if no failure is known.
        self.known: RankError | None = None
        # Whether this rank has failed, or this process is a fork of a rank. If so, it sends no
        # messages.
        self.has_failed = False

    def check(self) -> None:
        """Raise H114 or H116 if this rank or another one has failed."""
        if self.known is not None:
            raise self.known
        if self.has_failed:
            raise rank_is_gone(_HAS_LEFT)

    def be_silent(self) -> None:
        """Disable reports in a forked process, since its exit is not a failure of the rank."""
        self.has_failed = True

    # --- failures of this rank

    def publish(self, error: BaseException) -> None:
        """Tell the other ranks why this one exits. Only the first error on any rank is kept."""
        self.has_failed = True
        with contextlib.suppress(RuntimeError):
            self.post(error)
            # The store may disappear with this process, so wait until the others have read it.
            self._store.poll([_read_key(rank) for rank in self._ranks], _READ_SECONDS)
        # A known failure makes the threads of this process stop waiting for other ranks.
        self.known = self.known or rank_is_gone(_HAS_LEFT)

    def post(self, error: BaseException) -> None:
        """Write an error to the store unless it has one already, and ask all ranks to read it."""
        out_of_step_by = None
        if isinstance(error, RankError) and error.rule == "H116":
            out_of_step_by = error.what
        failure = [self._rank, f"{type(error).__name__}: {error}", out_of_step_by]
        self._store.set_first_text(_KEY, json.dumps(failure))
        for rank in self._ranks:
            self._inbox.send(rank, READ_FAILURE)

    # --- failures of other ranks

    def lose(self, rank: int, how: str) -> RankError:
        """Report to all ranks that a rank is lost. Afterwards, `check` raises an error.

        Args:
            rank: The lost rank.
            how: How the rank was lost, as a verb phrase that follows its name.

        Returns:
            Error H114 for the lost rank, or an error of another rank that was already known.
        """
        error = rank_is_gone(f"rank {rank} {how}")
        self.known = self.known or error
        GUARDS.note_failure(self.known)
        with contextlib.suppress(RuntimeError):
            self.post(error)
        return self.known

    def note(self, error: RankError | None) -> None:
        """Remember an error that the listening thread has received. Do nothing if it is None."""
        if error is not None:
            self.known = error
            GUARDS.note_failure(error)

    def read(self, store: RankStore) -> RankError | None:
        """Return the error in the store, or None if it is this rank's own error.

        Args:
            store: The store connection of the calling thread.
        """
        rank, text, out_of_step_by = json.loads(store.text(_KEY) or "")
        if rank == self._rank:
            return None
        if out_of_step_by is not None:
            # If ranks are out of step, all of them raise H116, not only the rank that noticed.
            return out_of_step(out_of_step_by)
        return RankError(
            f"rank {rank} has failed with {text}",
            limit=(
                "the others cannot continue without it; their weights are those of the last"
                " committed step"
            ),
            fix=f"fix the error of rank {rank}, and start all ranks again.",
            rule="H114",
        )

    def confirm_reading(self, store: RankStore) -> None:
        """Tell the failed rank that this rank has read its error."""
        store.set_text(_read_key(self._rank), "")

    def cause_of(self, error: BaseException) -> RankError | None:
        """Return the error of another rank that caused an error on this rank, or None."""
        if isinstance(error, HoldfastError) or not isinstance(error, RuntimeError):
            return None
        if not any(sign in str(error) for sign in _SIGNS_OF_A_LOST_PEER):
            return None
        with contextlib.suppress(RuntimeError):
            if self._store.poll([_KEY], _TEXT_SECONDS, lambda: self.known is not None):
                return self.known or self.read(self._store)
        return self.known_or("another rank has ended without reporting an error")

    def known_or(self, what: str) -> RankError:
        """Return another rank's error that is known to this process, or else a new error H114.

        Args:
            what: The message of H114, without a final period.
        """
        return self.known or GUARDS.failure or rank_is_gone(what)


def _read_key(rank: int) -> str:
    # A rank sets this key in the store once it has read the failure.
    return f"{_KEY}/read/{rank}"


def rank_is_gone(what: str) -> RankError:
    """Return error H114 for a rank that has exited without reporting an error."""
    return RankError(
        what,
        limit="the others cannot continue without it",
        fix=(
            "check the end of each rank's output to see whether it was killed or exited, and start"
            " all ranks again."
        ),
        rule="H114",
    )


def out_of_step(what: str) -> RankError:
    """Return error H116 for ranks that have not made the same calls with the same batches."""
    return RankError(
        what,
        limit="all ranks must call the guard in the same order, with the same batches",
        fix=(
            "call guard.step, validated and close on all ranks, and leave the loop on all ranks,"
            " for example with request_stop. If one rank has to skip a batch, skip it on all ranks."
        ),
        rule="H116",
    )


def print_error(error: RankError) -> None:
    """Print an error to stderr."""
    write_to_stderr(f"holdfast: {error}\n")
