"""Choose a remedy for the loss of workers from a table of named rules.

This module does not apply the remedy: `choose_remedy` returns a `WorkerRemedy`, which
`WorkerRecovery` applies.

If only one worker fails, the sample that it was reading is suspected. A sample is quarantined if
two workers are lost while reading it and other workers are fine. If new workers fail as well, the
machine is suspected, and the number of workers is reduced step by step, down to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from holdfast.core.errors import LoaderError
from holdfast.loader.quarantine import key_of
from holdfast.loader.workers.watch import WorkerLoss

# Number of losses blamed on a sample after which the sample is quarantined. A single loss may be a
# coincidence.
_LOSSES_BEFORE_QUARANTINE = 2

# Number of consecutive pools that must hang, each at a different sample, before loading continues
# without workers. One or two pools may have hit a bad sample by chance.
_BLOCKED_POOLS_BEFORE_NONE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """The evidence against a sample that a lost worker was reading."""

    # Whether a worker has been lost while reading this sample before.
    is_known: bool
    # Whether the loss is blamed on the sample, because workers are able to read other samples.
    is_blamed: bool
    # Number of losses blamed on the sample, including this one.
    blamed_losses: int


class SuspectSamples:
    """Counts, for each sample, the losses that are blamed on it."""

    def __init__(self) -> None:
        self._blamed_losses: dict[Any, int] = {}

    def note_loss(self, index: Any, loss: WorkerLoss) -> Suspicion:
        """Record that a worker was lost while reading a sample, and return the evidence against it.

        Args:
            index: Dataset index of the sample.
            loss: The loss of the worker.
        """
        key = key_of(index)
        is_known = key in self._blamed_losses
        # Workers that start after a loss first read another sample (see `MapSource.requests`). If
        # that succeeds and a worker is then lost at the suspected sample again, the suspected
        # sample is to blame.
        has_worked = loss.status is not None and loss.status.has_worked
        is_blamed = bool(loss.others_fine) or (is_known and has_worked)
        blamed_losses = self._blamed_losses.get(key, 0)
        if is_blamed:
            blamed_losses += 1
        self._blamed_losses[key] = blamed_losses
        return Suspicion(is_known=is_known, is_blamed=is_blamed, blamed_losses=blamed_losses)

    def clear(self, indices: tuple[Any, ...]) -> None:
        """Forget the losses blamed on samples that were read successfully or are quarantined."""
        if not self._blamed_losses:
            return
        for index in indices:
            self._blamed_losses.pop(key_of(index), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCase:
    """A loss, with all facts needed to choose a remedy."""

    loss: WorkerLoss
    # The evidence against the sample that the worker was reading, or None if there is no such
    # sample.
    suspicion: Suspicion | None
    # Number of losses since the last batch arrived, including this one.
    losses_in_a_row: int
    # Number of workers in the lost pool, at least 1.
    workers: int
    # Whether tensors are already shared through named files.
    share_by_file: bool
    # Whether the user passed a ``worker_init_fn``.
    has_worker_init_fn: bool

    @property
    def is_repeated(self) -> bool:
        """Whether the previous pool was also lost, and no batch has arrived since then."""
        return self.losses_in_a_row > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRemedy:
    """The changes to make before the next pool is started."""

    # Describes the changes in the event.
    text: str
    # Number of workers from now on, or None to keep the current number.
    workers: int | None = None
    share_by_file: bool = False
    stop_pinning: bool = False
    quarantine_sample: bool = False


Rule: TypeAlias = Callable[[LossCase], WorkerRemedy | None]


def choose_remedy(case: LossCase) -> WorkerRemedy:
    """Return the remedy for a loss, from the first rule in `RULES` that has one.

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
    """If file descriptors ran out, share tensors through named files, which do not need any."""
    if case.loss.shortage != "file descriptors" or case.share_by_file:
        return None
    return WorkerRemedy(text="tensors are shared through files from now on", share_by_file=True)


def use_fewer_workers_in_a_shortage(case: LossCase) -> WorkerRemedy | None:
    """If the machine ran out of a resource and no sample is suspected, use fewer workers."""
    if case.loss.shortage is None or case.suspicion is not None:
        return None
    return _halve_the_workers(case)


def stop_pinning_memory(case: LossCase) -> WorkerRemedy | None:
    """If the thread that pins memory failed twice in a row, stop pinning memory."""
    if "Pin memory" not in case.loss.cause or not case.is_repeated:
        return None
    return WorkerRemedy(text="memory is no longer pinned", stop_pinning=True)


def quarantine_the_sample(case: LossCase) -> WorkerRemedy | None:
    """If several losses are blamed on the same sample, quarantine the sample."""
    suspicion = case.suspicion
    if suspicion is None or not suspicion.is_blamed:
        return None
    if suspicion.blamed_losses < _LOSSES_BEFORE_QUARANTINE:
        return None
    return WorkerRemedy(text="the sample is quarantined", quarantine_sample=True)


def use_fewer_workers_at_a_large_sample(case: LossCase) -> WorkerRemedy | None:
    """If the machine ran out of a resource while a worker was reading a sample, use fewer workers.

    At least one worker is kept while the sample may be at fault, because without workers, the
    sample could kill the training process.
    """
    suspicion = case.suspicion
    if case.loss.shortage is None or suspicion is None:
        return None
    sample_is_cleared = suspicion.is_known and not suspicion.is_blamed
    return _halve_the_workers(case, at_least=0 if sample_is_cleared else 1)


def try_the_sample_again(case: LossCase) -> WorkerRemedy | None:
    """After one loss blamed on a sample, retry the sample, as the loss may be a coincidence."""
    if case.suspicion is None or not case.suspicion.is_blamed:
        return None
    return WorkerRemedy(text="the workers are replaced, and the sample is retried")


def replace_the_workers(case: LossCase) -> WorkerRemedy | None:
    """After a first loss, only replace the workers, because the loss may be a coincidence."""
    if case.is_repeated:
        return None
    return WorkerRemedy(text="the workers are replaced")


def use_no_workers_that_hang_at_every_sample(case: LossCase) -> WorkerRemedy | None:
    """If workers hang at every sample, probably on an inherited lock, continue without workers.

    Until several pools in a row have hung, the workers are only replaced.
    """
    if case.loss.kind != "hung" or case.suspicion is None:
        return None
    if case.losses_in_a_row < _BLOCKED_POOLS_BEFORE_NONE:
        return WorkerRemedy(text="the workers are replaced")
    return WorkerRemedy(
        text="no workers from now on, because all of them hang, probably on a lock that was held"
        " when they were forked",
        workers=0,
    )


def use_no_workers_that_hang_at_their_start(case: LossCase) -> WorkerRemedy | None:
    """If workers hang while starting, probably on an inherited lock, continue without workers.

    If a worker hangs while reading a stream or collating, the epoch ends with H614, because the
    main process would hang as well without workers.
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
        "no workers from now on, because they hang while starting, probably on a lock that was held"
        " when they were forked"
    )
    if case.has_worker_init_fn:
        text += "; worker_init_fn is no longer called"
    return WorkerRemedy(text=text, workers=0)


def stop_before_this_process_dies_too(case: LossCase) -> WorkerRemedy | None:
    """If the only worker died while making a batch, stop before the training process dies too.

    This rule does not apply if another process may have killed the worker, or if the worker was
    lost while reading a sample.
    """
    status = case.loss.status
    if case.loss.kind != "died" or case.loss.from_outside or case.suspicion is not None:
        return None
    if case.workers == 1 and status is not None and status.is_at_work:
        raise no_remedy_left(
            f"{case.loss.cause}, {case.losses_in_a_row} times at the same place. Without workers,"
            " this would kill the training process"
        )
    return None


def use_fewer_workers(case: LossCase) -> WorkerRemedy | None:
    """If no sample is to blame and new workers did not help, use fewer workers."""
    return _halve_the_workers(case)


# The first rule that returns a remedy applies. Rules for known causes come first, followed by rules
# for a suspected sample, by a plain replacement of the workers, and finally by rules that reduce
# the number of workers.
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
    """Return an H614 error, which ends the epoch because there is no remedy left to try."""
    return LoaderError(
        what,
        limit="no remedy is left",
        fix="see the preceding loader_healed events for the causes and the remedies tried.",
        rule="H614",
    )
