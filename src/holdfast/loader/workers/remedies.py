"""Choose what to change after workers were lost, from a table of named rules.

Nothing is changed here: `choose_remedy` returns a `WorkerRemedy`, which `WorkerRecovery` carries
out.

As long as only one worker fails, its sample is the suspect: a sample at which two workers are lost
while other workers do well is quarantined. If new workers fail as well, the machine is the suspect:
the number of workers is reduced, finally to none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from holdfast.core.errors import LoaderError
from holdfast.loader.quarantine import key_of
from holdfast.loader.workers.watch import WorkerLoss

# The number of losses blamed on a sample before it is quarantined. The first may be a coincidence.
_LOSSES_BEFORE_QUARANTINE = 2

# The number of consecutive pools that must hang, each at a different sample, before workers are
# given up. One or two of them may have met a bad sample by chance.
_BLOCKED_POOLS_BEFORE_NONE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """What is known about a sample that a lost worker was reading."""

    # Whether a worker was lost at this sample before.
    is_known: bool
    # Whether the loss is blamed on the sample, because workers can read others.
    is_blamed: bool
    # The number of losses blamed on it, including this one.
    blamed_losses: int


class SuspectSamples:
    """Counts the losses that are blamed on each sample."""

    def __init__(self) -> None:
        self._blamed_losses: dict[Any, int] = {}

    def note_loss(self, index: Any, loss: WorkerLoss) -> Suspicion:
        """Return what is known about a sample after a worker was lost while reading it."""
        key = key_of(index)
        is_known = key in self._blamed_losses
        # Workers that start after a loss read another sample first (see `MapSource.requests`). If
        # that succeeds and the worker is lost at the suspect again, the suspect is to blame.
        has_worked = loss.status is not None and loss.status.has_worked
        is_blamed = bool(loss.others_fine) or (is_known and has_worked)
        blamed_losses = self._blamed_losses.get(key, 0)
        if is_blamed:
            blamed_losses += 1
        self._blamed_losses[key] = blamed_losses
        return Suspicion(is_known=is_known, is_blamed=is_blamed, blamed_losses=blamed_losses)

    def clear(self, indices: tuple[Any, ...]) -> None:
        """Clear the suspicion against samples that could be read, or are quarantined now."""
        if not self._blamed_losses:
            return
        for index in indices:
            self._blamed_losses.pop(key_of(index), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCase:
    """A loss, with all facts on which the choice of a remedy depends."""

    loss: WorkerLoss
    # What is known about the sample that the worker was reading, or None if it was reading none.
    suspicion: Suspicion | None
    # The number of losses since a batch was last handed out, including this one.
    losses_in_a_row: int
    # The number of workers in the lost pool; at least 1.
    workers: int
    # Whether tensors are already shared through files.
    share_by_file: bool
    # Whether the user has passed a ``worker_init_fn``.
    has_worker_init_fn: bool

    @property
    def is_repeated(self) -> bool:
        """Whether the previous pool was lost at the same place."""
        return self.losses_in_a_row > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRemedy:
    """The changes to make before the next pool is started. `text` goes into the event."""

    text: str
    # The number of workers from now on; None leaves it unchanged.
    workers: int | None = None
    share_by_file: bool = False
    stop_pinning: bool = False
    quarantine_sample: bool = False


Rule: TypeAlias = Callable[[LossCase], WorkerRemedy | None]


def choose_remedy(case: LossCase) -> WorkerRemedy:
    """Return the remedy of the first rule in `RULES` that has one.

    Raises:
        LoaderError: H614 if no remedy is left.
    """
    for rule in RULES:
        remedy = rule(case)
        if remedy is not None:
            return remedy
    raise AssertionError("the last rule always has a remedy")


# --- rules ----------------------------------------------------------------------------------------


def share_tensors_through_files(case: LossCase) -> WorkerRemedy | None:
    """After a shortage of file descriptors: tensors in named files need none."""
    if case.loss.shortage != "file descriptors" or case.share_by_file:
        return None
    return WorkerRemedy(text="tensors are shared through files from now on", share_by_file=True)


def use_fewer_workers_in_a_shortage(case: LossCase) -> WorkerRemedy | None:
    """A shortage for which no sample is suspected is cured by fewer workers."""
    if case.loss.shortage is None or case.suspicion is not None:
        return None
    return _halve_the_workers(case)


def stop_pinning_memory(case: LossCase) -> WorkerRemedy | None:
    """Torch's thread that pins memory has failed twice at the same place."""
    if "Pin memory" not in case.loss.cause or not case.is_repeated:
        return None
    return WorkerRemedy(text="memory is no longer pinned", stop_pinning=True)


def quarantine_the_sample(case: LossCase) -> WorkerRemedy | None:
    """The sample has caused the loss of more than one worker, while others did well."""
    suspicion = case.suspicion
    if suspicion is None or not suspicion.is_blamed:
        return None
    if suspicion.blamed_losses < _LOSSES_BEFORE_QUARANTINE:
        return None
    return WorkerRemedy(text="the sample is quarantined", quarantine_sample=True)


def use_fewer_workers_at_a_large_sample(case: LossCase) -> WorkerRemedy | None:
    """The machine ran short of something while a worker was reading a sample.

    As long as the sample may be at fault, at least one worker is left: without workers the sample
    could kill the training process instead.
    """
    suspicion = case.suspicion
    if case.loss.shortage is None or suspicion is None:
        return None
    sample_is_cleared = suspicion.is_known and not suspicion.is_blamed
    return _halve_the_workers(case, at_least=0 if sample_is_cleared else 1)


def try_the_sample_again(case: LossCase) -> WorkerRemedy | None:
    """The first loss that is blamed on a sample may be a coincidence."""
    if case.suspicion is None or not case.suspicion.is_blamed:
        return None
    return WorkerRemedy(text="the workers are replaced, and the sample is tried again")


def replace_the_workers(case: LossCase) -> WorkerRemedy | None:
    """The first loss at a place may be a coincidence."""
    if case.is_repeated:
        return None
    return WorkerRemedy(text="the workers are replaced")


def use_no_workers_that_hang_at_every_sample(case: LossCase) -> WorkerRemedy | None:
    """Workers that hang at every sample are blocked by something that they inherited."""
    if case.loss.kind != "hung" or case.suspicion is None:
        return None
    if case.losses_in_a_row < _BLOCKED_POOLS_BEFORE_NONE:
        return WorkerRemedy(text="the workers are replaced")
    return WorkerRemedy(
        text="no workers from now on: all of them hang, probably because a lock was held when they"
        " were forked",
        workers=0,
    )


def use_no_workers_that_hang_at_their_start(case: LossCase) -> WorkerRemedy | None:
    """Workers that never become ready are blocked by something that they inherited.

    A worker that hangs at a batch of a stream, or while it collates, would do so without workers
    too, so that ends the epoch.
    """
    status = case.loss.status
    if case.loss.kind != "hung" or status is None:
        return None
    if not status.is_starting:
        raise no_remedy_left(
            f"the workers were stuck at batch {status.number} {case.losses_in_a_row} times:"
            f" {case.loss.cause}"
        )
    text = (
        "no workers from now on: they hang while they start, probably because a lock was held when"
        " they were forked"
    )
    if case.has_worker_init_fn:
        text += "; worker_init_fn is no longer called"
    return WorkerRemedy(text=text, workers=0)


def stop_before_this_process_dies_too(case: LossCase) -> WorkerRemedy | None:
    """Whatever kills the only worker at work would kill the training process in its place.

    This does not apply if another process may have killed the worker, or if it was lost at a
    sample.
    """
    status = case.loss.status
    if case.loss.kind != "died" or case.loss.from_outside or case.suspicion is not None:
        return None
    if case.workers == 1 and status is not None and status.is_at_work:
        raise no_remedy_left(
            f"{case.loss.cause}, {case.losses_in_a_row} times at the same place; without workers it"
            " would end this process"
        )
    return None


def use_fewer_workers(case: LossCase) -> WorkerRemedy | None:
    """No sample is to blame, and new workers did not help."""
    return _halve_the_workers(case)


# The first rule that has a remedy wins. The order is the argument: a known cause comes first, then
# the suspected sample, then one replacement without any change, and finally fewer workers.
RULES: tuple[Rule, ...] = (
    share_tensors_through_files,
    use_fewer_workers_in_a_shortage,
    stop_pinning_memory,
    quarantine_the_sample,
    use_fewer_workers_at_a_large_sample,
    try_the_sample_again,
    replace_the_workers,
    use_no_workers_that_hang_at_every_sample,
    use_no_workers_that_hang_at_their_start,
    stop_before_this_process_dies_too,
    use_fewer_workers,
)


def _halve_the_workers(case: LossCase, at_least: int = 0) -> WorkerRemedy:
    workers = max(at_least, case.workers // 2)
    noun = "worker" if workers == 1 else "workers"
    return WorkerRemedy(text=f"{workers} {noun} from now on", workers=workers)


def no_remedy_left(what: str) -> LoaderError:
    """Return the error that ends an epoch when nothing is left to try (H614)."""
    return LoaderError(
        what,
        limit="no remedy is left",
        fix="look at the loader_healed events before it: they name each cause and what was tried.",
        rule="H614",
    )
