"""One save, from the look at its tensors to the event: the same work in the training thread and beside it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.checkpoint.saver import Snapshot, write
from holdfast.checkpoint.store import Entry, Store
from holdfast.core.clock import Clock
from holdfast.core.errors import HoldfastError, RunDirectoryError
from holdfast.core.version import __version__
from holdfast.run.record import RunRecord

Named = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A save that was begun.

    Args:
        shot: What is written.
        must_be_finite: Tensors to look through before.
        position: Where the run stood.
        started: When, by the clock.
        stall_seconds: How long the loop was held; None if it is until the end.
    """

    shot: Snapshot
    must_be_finite: Named
    position: tuple[int, int]
    started: float
    stall_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """What came of a save: saved, refused, or failed.

    Args:
        position: Where the run stood.
        seconds: It took.
        stall_seconds: How long the loop was held.
        entry: The checkpoint, if it was saved.
        refused: Why, if it was refused.
        error: What was raised, if it failed.
    """

    position: tuple[int, int]
    seconds: float
    stall_seconds: float
    entry: Entry | None = None
    refused: str | None = None
    error: Exception | None = None


class Writer:
    """Carries saves out, and records what came of them at once.

    Args:
        store: The checkpoints.
        record: The recording.
        clock: Time.
        keep: Checkpoints to keep.
        costs: Returns what the saves before have taken from the training, None if that is not known.
    """

    def __init__(
        self, store: Store, record: RunRecord, clock: Clock, *, keep: int, costs: Callable[[], float | None]
    ) -> None:
        self._store = store
        self._record = record
        self._clock = clock
        self._keep = keep
        self._costs = costs

    def carry_out(self, attempt: Attempt, find_nonfinite: Callable[[Named], tuple[list[str], int]]) -> End:
        """Look through the state, write it and prune. Nothing is raised: errors are in what is returned.

        Args:
            attempt: The save.
            find_nonfinite: Returns the names of bad tensors, and how many there are.
        """
        shot = attempt.shot
        try:
            bad, count = find_nonfinite(attempt.must_be_finite)
            if count:
                return self.refuse(attempt, bad, count)
            entry = write(self._store, shot, unix_seconds=self._clock.unix_seconds(), written_by=__version__)
        except Exception as error:  # noqa: BLE001 - an event, and the caller's to judge
            end = self._end(attempt, error=error)
            self.failed(shot.global_step, error, end.seconds)
            return end
        try:
            removed = self._store.prune(self._keep, known_good=entry)
        except (OSError, HoldfastError) as error:
            removed = []  # the checkpoint is good all the same
            self._record.happened_at(shot.global_step, "prune_failed", error=str(error))
        end = self._end(attempt, entry=entry)
        # Of the saves before: what this one takes is known when the step that goes on beside it is over, and an event
        # that waited for that would be lost with a kill.
        costs = self._costs()
        self._record.happened_at(
            shot.global_step,
            "checkpoint_saved",
            checkpoint=entry.path.name,
            size_bytes=shot.size_bytes(),
            seconds=round(end.seconds, 4),
            stall_seconds=round(end.stall_seconds, 4),
            **({} if costs is None else {"save_costs_seconds": round(costs, 4)}),
            removed=[path.name for path in removed],
        )
        return end

    def refuse(self, attempt: Attempt, bad: list[str], count: int) -> End:
        """Record that a state is not finite, so that no checkpoint appears.

        Args:
            attempt: The save.
            bad: Names of some of the tensors.
            count: How many there are.
        """
        self._record.happened_at(attempt.shot.global_step, "save_refused", nonfinite=bad, count=count)
        return self._end(attempt, refused=f"{count} tensor(s) hold NaN or Inf: {', '.join(bad)}")

    def failed(self, global_step: int, error: Exception, seconds: float) -> None:
        """Record that a save has failed."""
        told = f"{type(error).__name__}: {error}"[:500]
        self._record.happened_at(global_step, "save_failed", error=told, seconds=round(seconds, 4))

    def _end(self, attempt: Attempt, **came_of_it: Any) -> End:
        seconds = self._clock.monotonic_seconds() - attempt.started
        stall = seconds if attempt.stall_seconds is None else attempt.stall_seconds
        return End(position=attempt.position, seconds=seconds, stall_seconds=stall, **came_of_it)


def for_good(error: Exception | None) -> Exception | None:
    """Return what the caller must know before any work is done: no later save could succeed, as on a full disk."""
    if not isinstance(error, OSError):
        return error
    if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        return None
    return RunDirectoryError(
        f"the first checkpoint cannot be written ({error})",
        limit="nothing of this run could be saved",
        fix="make the folder writable, choose another run directory, or set save_interval_steps=None.",
        rule="H302",
    )
