"""What happens in a training process: the guard, the loader and frameworks record these.

See ``events``.

`why` is a sentence for people, `error` the type and text of an exception, `promise` what the rest
of the run is equal to. Steps are optimizer steps, and the step that an event belongs to is not
repeated in its fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from holdfast.core.events.event import EventData, Promise


class _Why(EventData):
    kind: ClassVar[str] = ""
    why: str


class _Failure(EventData):
    kind: ClassVar[str] = ""
    error: str


# --- a run begins, is looked at, and ends
# ------------------------------------------------------------------------


class Loop(EventData):
    """An iteration over batches began.

    Who drives it (``by``), and what the loader promises after a resume.
    """

    by: str = "guard"
    resume_promise: str | None = None
    epoch: int | None = None
    batches: int | None = None
    max_epochs: int | None = None
    max_steps: int | None = None


class EpochEnded(EventData):
    """So many epochs are over, the last of so many batches and steps (None.

    Begun before a restart or a return).

    Recorded of each of the first 100, then after 1, 2, 4, 8 ... whole ones of a process.
    """

    epochs: int
    steps: int | None
    batches: int
    batch_size: int | None = None


class Resumed(EventData):
    """The run went on from a checkpoint, or from what a framework loaded.

    Batches are those of its epoch.
    """

    checkpoint: str | None = None
    trained_batches: int | None = None
    by: str = "guard"


class SettingsKept(EventData):
    """The script sets an optimizer or a scheduler up otherwise than the run began with.

    That stays in force.
    """

    changed: tuple[str, ...]
    why: str = (
        "a run goes on with the settings of its checkpoint. To change them, set them after"
        " Guard(...), such as optimizer.param_groups[0]['lr'], or begin in another directory"
    )


class GroupsChanged(EventData):
    """Parameter groups were added since the run began, which the script will not have when it
    starts again.
    """

    why: str = (
        "a resume is refused (H313) unless Guard(...) is given the same groups: add them before, if"
        " holdfast.latest(run_dir) is of a later step, or give all from the start, and set"
        " requires_grad"
    )


class PositionNotKept(EventData):
    """A resumed run does not continue at the batch at which it was interrupted, at least on one
    rank.
    """

    why: str = (
        "the loop is not guard.batches(...), and begins wherever it begins: an epoch that was under"
        " way is repeated. Iterate guard.batches(max_epochs=...), or go to the place of"
        " guard.global_step yourself"
    )


class ResumeMayDiffer(_Why):
    """A resume may read other batches, augment them differently, or train at another rate than
    an unbroken run.
    """


class OwnStateNotKept(EventData):
    """The run resumed on another number of ranks, so the state in which ranks differed could not be
    restored.

    The buffers and ``state=`` with these names now have the values of rank 0 on all ranks.
    """

    names: tuple[str, ...]
    ranks_before: int
    ranks_now: int
    why: str = (
        "these values differed between ranks, and can only be restored on the same number of ranks;"
        " all ranks continue with those of rank 0"
    )


class StepsLeftBehind(EventData):
    """A guard resumes at `to_step`, although an earlier guard of this process had trained up to
    `from_step`.
    """

    from_step: int
    to_step: int
    why: str = (
        "the loop was left without a save, so its last steps are in no checkpoint, and the run"
        " resumes from the newest one. To keep such steps, end a loop with guard.request_stop(), or"
        " call guard.close() before making a new Guard"
    )


class BeginsAnew(EventData):
    """A framework began at step 0, although there are checkpoints in this directory."""

    though_saved_in: str


class StopRequested(EventData):
    """The run was asked to stop, by a signal (`signal` is its name) or by a call.

    With several ranks, `asked_rank` is the one that was asked; all ranks stop for the same reason.
    """

    reason: str
    signal: str | None = None
    asked_rank: int | None = None


class SignalLeftAlone(EventData):
    """A signal of ``Policy.stop_signals`` does not stop the run, because native code handles it."""

    signal: str
    why: str = (
        "it has a handler in C, such as that of faulthandler.register. Register that handler for"
        " another signal, such as signal.SIGRTMIN, or leave the signal out of stop_signals"
    )


class LeftByException(EventData):
    """An exception ended the loop.

    Its class, its text, frames as [file, line, function], and its causes.
    """

    exception: str
    rule: str | None = None
    type: str | None = None
    message: str = ""
    frames: tuple[Any, ...] = ()
    chain: tuple[Any, ...] = ()


class Closed(EventData):
    """The run was closed; without this or an exception as last word it was cut off."""

    how: Literal["finished", "stopped", "left", "failed"]


class Validated(EventData):
    """The loss of an evaluation or another metric (`name`), and the schedulers that changed a
    rate because of it.
    """

    loss: float
    learning_rate_changed_by: tuple[str, ...] = ()
    name: str = "loss"
    kept_as: str | None = None  # the checkpoint that was kept for it


class RankIsSlow(EventData):
    """The others have waited for one rank in the steps of an epoch.

    Its own seconds before the loss.

    `share` is of the time of a step; items and memory are those of all ranks. What is lost in
    backward does not show.
    """

    rank: int
    where: str
    seconds_a_step: float
    of_others: float
    share: float
    items_a_step: tuple[float, ...]
    peak_bytes: tuple[int, ...] = ()  # since each process began


class OwnCollectives(EventData):
    """The loss or the model began collectives itself, for the first time in this run.

    `count` is how many.
    """

    count: int
    why: str = (
        "if a rank runs out of memory before one of them, all ranks end (H401); no rank splits or"
        " recomputes alone; and NaN is traced only up to the first of them"
    )


class ImageAdded(EventData):
    """An image was written, relative to the run directory; and how many of its values were odd."""

    tag: str
    path: str
    nonfinite: int = 0
    outside_0_to_1: int = 0


class ImageLeftOut(EventData):
    """An image could not be written."""

    tag: str
    reason: str


class RecordingMovedAside(EventData):
    """A recording could not be continued.

    A new one was begun, and `what` says where the old one lies.
    """

    what: str


class SchedulersWait(EventData):
    """These schedulers need a validation loss, and an epoch went by without one."""

    schedulers: tuple[str, ...]
    fix: str


# --- checkpoints
# ------------------------------------------------------------------------


class CheckpointSaved(EventData):
    """A checkpoint counts from now on; `stall_seconds` of these seconds held the loop."""

    checkpoint: str
    size_bytes: int
    seconds: float
    stall_seconds: float
    removed: tuple[str, ...] = ()


class Saved(EventData):
    """A framework saved a checkpoint of its own, which was sealed."""

    checkpoint: str


class SaveFailed(_Failure):
    """A checkpoint could not be written; training goes on, and the older ones stay."""

    checkpoint: str | None = None
    seconds: float | None = None


class SaveRefused(_Why):
    """A state was not saved, or not kept as a checkpoint, since it is not sound."""

    checkpoint: str | None = None
    kept: str | None = None
    nonfinite: tuple[str, ...] = ()
    count: int = 0


class SavePostponed(_Why):
    """A save waits until spikes are over."""


class SavesSynchronous(_Why):
    """From now on training waits for saves."""


class PruneFailed(_Failure):
    """Older checkpoints could not be removed."""


class NotSaved(EventData):
    """The run ended with steps that are in no checkpoint; `error` is why the newest save failed."""

    newest_checkpoint: int | None
    failed_saves: int
    error: str | None = None


class StepsNotSaved(EventData):
    """The loop was left, or the process ended, with steps that no checkpoint held then.

    Both steps are included.
    """

    from_step: int
    to_step: int


class ChangesNotSaved(_Why):
    """Something changes that no checkpoint holds."""


class CheckpointDamaged(_Why):
    """A checkpoint did not verify and was moved aside; `kept` is its name from now on."""

    checkpoint: str | None = None
    kept: str | None = None


class CheckpointKept(_Why):
    """A checkpoint that does not verify was kept."""

    checkpoint: str


class CheckpointInstead(EventData):
    """This checkpoint was loaded, in the place of another."""

    checkpoint: str
    of: str


# --- memory and splitting
# ------------------------------------------------------------------------


class OutOfMemory(_Failure):
    """An attempt ran out of memory."""

    attempt: int
    micro_batch_size: int | None
    recompute: bool


class StateTaken(_Failure):
    """The optimizer of this rank ran out of memory half-way.

    The state of a rank that has stepped is taken.
    """


class Promises(EventData):
    """What splitting a batch of this loss function would be equal to, and how that was found
    out.
    """

    batch_size: int | None
    split: str
    split_promise: str | None = None
    weighting: str | None = None
    split_check: Mapping[str, Any] | None = None
    side_effects: tuple[str, ...] | None = None


class SideEffects(_Why):
    """Each forward pass changes attributes that are in no checkpoint."""

    attributes: tuple[str, ...]


class SplitNotTried(_Why):
    """This process could not be forked to try whether batches can be split.

    It is tried before the first split.
    """


class SplitRefused(_Why):
    """Batches of this loss function are not split, unless the hazard is allowed by name."""

    allow_split_with: str


class SplitStopped(_Why):
    """Batches of this loss function are no longer split, because a later check has failed.

    `equal_until_step` is the last step at which a check passed, or None if none did. Steps that
    were split after it may have had another gradient than that of the whole batch.
    """

    allow_split_with: str
    equal_until_step: int | None
    promise: Promise = "changes training"


class CannotSplit(_Why):
    """A batch could not be cut."""

    fix: str


class RecomputeImpossible(_Why):
    """Activation checkpointing cannot help, or not in these modules."""

    modules: tuple[str, ...] = ()


class NotRestored(EventData):
    """These changed in an attempt that was taken back, and could not be put back."""

    names: tuple[str, ...]
    promise: Promise = "changes training"


class OnednnSwitchedOff(EventData):
    """oneDNN keeps memory of its own; it is off from now on."""

    promise: Promise = "equal up to rounding"


# --- values
# ------------------------------------------------------------------------


class NonfiniteOrigin(EventData):
    """Where NaN or Inf came from, as `numerics.provenance.Origin` says it, and the samples that
    cause it.
    """

    origin: Mapping[str, Any]
    bad_samples: tuple[int, ...]
    dataset_indices: tuple[int, ...] | None


class NonfiniteNotTraced(_Why):
    """The replay of a step did not show where NaN or Inf came from."""


class SamplesDropped(EventData):
    """A step was made without its bad samples."""

    reason: str
    promise: Promise = "changes training"
    epoch: int | None = None
    batch: int | None = None


class MicroBatchDropped(EventData):
    """A step was made without micro-batches whose loss was not finite: ranges of the batch."""

    samples: tuple[tuple[int, int], ...]
    dataset_indices: tuple[int, ...] | None
    promise: Promise = "changes training"
    epoch: int | None = None
    batch: int | None = None


class Spike(EventData):
    """Loss and gradient norm stand out, and the step was made."""

    loss: float
    grad_norm: float
    usual_norm: float | None
    level: str


class NormOverflowed(EventData):
    """The norm of a finite gradient is larger than float32 holds; it was taken in float64."""

    total: float


class LossScaleLowered(EventData):
    """A step was skipped and the loss scale of fp16 lowered, as it does when it looks for its
    place.
    """

    loss_scale: float
    reason: str


class LossScaleCollapsed(LossScaleLowered):
    """The loss scale of fp16 has fallen below 1: gradients are not finite whatever it is."""


class RolledBack(EventData):
    """The run is back at an earlier step."""

    from_step: int
    to_step: int


class RollbackFailed(_Failure):
    """The state could not be put back."""


class SnapshotFailed(_Failure):
    """The state could not be copied to host memory."""


class SnapshotsDoNotFit(EventData):
    """No copies of the state are kept in host memory: a rollback returns to a checkpoint."""


# --- why it does not learn
# ------------------------------------------------------------------------


class Finding(EventData):
    """A rule of the diagnosis speaks; `about` says whether it names a cause or a symptom."""

    rule: str
    severity: str
    what: str
    fix: str
    about: str = "symptom"
    confidence: float | None = None
    where: str = ""


class Note(Finding):
    """A rule speaks of what is worth knowing and often intended."""


class DiagnosisLimited(_Why):
    """The diagnosis sees less than it could."""


class Aligned(EventData):
    """How the attention of a speech synthesiser lies: see `learning.alignment.alignment_facts`."""

    diagonality: float
    sharpness: float
    entropy: float
    monotonic_share: float
    share_at_max_decoder: float
    utterances: int


# --- the loader
# ------------------------------------------------------------------------


class LoaderHealed(EventData):
    """Workers were lost or stuck, and new ones go on where the last batch was handed out."""

    cause: str
    remedy: str
    sample: int | str | None
    workers_before: int
    workers: int
    seconds: float


class SampleQuarantined(_Why):
    """A sample is replaced by another one from now on.

    How many are, and why that could not be written.
    """

    sample: int | str
    evidence: str
    quarantined: int
    not_written: str | None = None


class QuarantineFull(_Failure):
    """One more sample would be too many."""


class DescriptorLimitRaised(_Why):
    """This process may open more files from now on, also after the loader is gone."""

    before: int
    now: int


class StreamReadOver(_Why):
    """Items before the position are read again and dropped."""

    items: int


class RanksNotDivided(_Why):
    """Each rank gets all samples."""


class NothingLeft(_Why):
    """An iteration without batches: the position that was loaded is the end of its epoch."""

    epoch: int


class EpochSetBack(_Why):
    """The loop has set an earlier epoch than that of the loader."""

    before: int
    now: int


class Preflight(EventData):
    """Loading will probably fail or be slow; it is certain if a single batch is too much."""

    rule: str
    what: str
    limit: str
    fix: str
    certain: bool = False


# --- frameworks
# ------------------------------------------------------------------------


class OwnSteps(_Why):
    """A module of Lightning optimizes by itself, past the guard."""


class OwnFitBatch(_Why):
    """A Brain of SpeechBrain has a `fit_batch` of its own, which is not guarded."""


class ItemsIgnored(_Why):
    """The model ignores `num_items_in_batch`."""

    model: str
